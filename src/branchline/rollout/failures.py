"""Where the code of a user failed: one place for a line about a session, and the whole traceback for its log.

The place is the last frame in a file of the user's own: one that is neither Python's nor installed, nor part
of this package.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from branchline.core.errors import BranchlineError

_OTHER_FOLDERS = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


def own_place(error: BaseException) -> str:
    """` (FILE:LINE in FUNCTION)` of the user's file in which an error was raised, or which called what raised
    it; nothing if no file of the user is in its traceback."""
    for one in _with_causes(error, set()):
        places = [
            (file, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(one.__traceback__)
            if _is_own(file := frame.f_code.co_filename)
        ]
        if places:
            file, line, function = places[-1]
            return f" ({_short(file)}:{line} in {function})"
    return ""


def describe_traceback(error: BaseException) -> str:
    """The whole traceback. None for an error of this package in which no file of the user is: its text says
    all that there is to know."""
    if isinstance(error, BranchlineError) and not own_place(error):
        return ""
    return "".join(traceback.format_exception(error))


def keep_traceback(folder: Path | None, session: str, trace: str) -> str:
    """Adds a traceback to the log of a session in a folder of logs; returns `; log: FILE` if the session has
    one, which may also be the output of its command."""
    if folder is None:
        return ""
    file = folder / f"{session}.log"
    if trace:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(trace)
        except OSError as error:
            return f"; its traceback could not be written to {file}: {error.strerror}"
    return f"; log: {file}" if file.exists() else ""


def _with_causes(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The errors in a group before the group, and an error before what it was raised from or during."""
    if id(error) in seen:
        return
    seen.add(id(error))
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _with_causes(inner, seen)
    yield error
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _with_causes(before, seen)


def _is_own(file: str) -> bool:
    return not file.startswith("<") and not os.path.realpath(file).startswith(_OTHER_FOLDERS)


def _short(file: str) -> str:
    """The file as seen from the working directory if it is there."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
