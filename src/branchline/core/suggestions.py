"""What was probably meant by a name, an option or a path that does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

_SIMILARITY = 0.6
_MAX_ENTRIES = 5000
"""Entries of a folder that a missing name is compared with."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing if no name is close."""
    of_word = {one.lstrip("-"): one for one in known}
    close = closest(name.lstrip("-"), of_word, _SIMILARITY)
    return f"; did you mean {of_word[close]}?" if close else ""


def closest(name: str, known: Iterable[str], similarity: float) -> str:
    """The name that is most like another one, or an empty text if none is."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=similarity)), "")


def did_you_mean_path(path: str | Path) -> str:
    """`; did you mean …?` with an existing path, or nothing if none is close to the missing one."""
    path = Path(path)
    found = near_path(path)
    return f"; did you mean {found}?" if found not in (None, path) else ""


def near_path(path: Path) -> Path | None:
    """The existing path that is most like a missing one, or None. Each part that does not exist is compared
    with what lies beside it."""
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (found / part).exists():
            part = _closest_entry(part, found)
            if not part:
                return None
        found /= part
    return found


def _closest_entry(name: str, folder: Path) -> str:
    """The entry that is most like a name. Stems are compared first: endings are alike anyway."""
    from difflib import SequenceMatcher, get_close_matches

    try:
        with os.scandir(folder) as entries:
            by_stem: dict[str, list[str]] = {}
            for entry in islice(entries, _MAX_ENTRIES):
                by_stem.setdefault(Path(entry.name).stem.lower(), []).append(entry.name)
    except OSError:
        return ""
    stems = get_close_matches(Path(name).stem.lower(), list(by_stem), cutoff=_SIMILARITY)
    near = [(SequenceMatcher(None, name, entry).ratio(), entry) for stem in stems for entry in by_stem[stem]]
    return max(near, default=(0.0, ""))[1]
