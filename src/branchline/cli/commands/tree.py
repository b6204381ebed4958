"""The options and texts of `branchline tree`."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.cli.log_options import LOG_FORMAT_HELP, LogOptions
from branchline.cli.options.command import Command
from branchline.core.errors import InputError
from branchline.core.option_fields import group, option

_MIN_WIDTH = 20


@dataclass(frozen=True)
class TreeOptions:
    """A log, and how it is shown."""

    log: LogOptions = group(LogOptions, "log")
    # A run sets BRANCHLINE_SESSION for its agents, to the id of their session.
    session: str | None = option(None, basic=True, metavar="ID", variable=False)
    """Print this session only; by default all."""
    width: int | None = option(None, basic=True)
    """Columns to use; by default the terminal's width."""

    def __post_init__(self) -> None:
        if self.width is not None and self.width < _MIN_WIDTH:
            raise InputError(f"width: got {self.width}, expected a number of columns from {_MIN_WIDTH}")


_DESCRIPTION = """\
Prints the merged calls of a log as a tree. Each line is one message: * if the model sampled it, its role,
its tokens, the cause of the branch if it starts one, and the beginning of its text.

Tokens are written 12+3: 12 prompt tokens, then 3 sampled ones. A log has token ids for a whole prompt, not
for each message, so all prompt tokens are counted on the line of the output that follows them.
"""
_EXAMPLES = f"""\
example:
  branchline tree calls.jsonl --session task-7 --width 100

{LOG_FORMAT_HELP}"""
COMMAND = Command("tree", TreeOptions, "branchline.cli.tree:run", _DESCRIPTION, _EXAMPLES)
