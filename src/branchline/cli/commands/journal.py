"""The options and texts of `branchline journal check` and `branchline journal repair`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.options.command import Command, CommandGroup
from branchline.core.option_fields import option


@dataclass(frozen=True)
class JournalOptions:
    """A journal."""

    file: Path = option(positional=True, metavar="FILE")
    """The journal."""


_DESCRIPTION = """\
Checks or repairs the file that `branchline serve --journal FILE` writes.

Each record in a journal has a checksum. When a gateway starts, a session with a damaged record is
quarantined: requests for it are refused, its records stay in the journal, and all other sessions continue.
A file whose pages SQLite cannot read has to be repaired before a gateway can use it.
"""
_EXAMPLES = """\
examples:
  branchline journal check run.journal      read everything, list what is damaged; changes nothing
  branchline journal repair run.journal     keep what is intact; the old file stays beside the new one
"""
_CHECK_DESCRIPTION = """\
Reads every record, image and page of a journal, and lists what is damaged. Changes nothing, and may run while
a gateway has the journal open; then the end of the write-ahead log (FILE-wal) is not checked.

Exit codes: 0 nothing is damaged, 1 something is, 2 the file is not a journal.
"""
_REPAIR_DESCRIPTION = """\
Replaces a damaged journal by one with everything that is intact. The old file is kept as FILE.damaged-1 (or
the next free number). Of a session with a damaged record, the records before that one are kept, and the
session continues there: later ones were recorded in a context that the file no longer has. Complete commits
after a damaged page of the write-ahead log are recovered. An intact journal is left unchanged.

Stop the gateway first. Exit codes: 0 the journal is intact now, 2 it is in use, or not a journal.
"""
_CHECK = Command("journal check", JournalOptions, "branchline.cli.journal:run_check", _CHECK_DESCRIPTION)
_REPAIR = Command("journal repair", JournalOptions, "branchline.cli.journal:run_repair", _REPAIR_DESCRIPTION)
COMMAND = CommandGroup(
    "journal",
    _DESCRIPTION,
    {"check": ("list what is damaged", _CHECK), "repair": ("keep what is intact", _REPAIR)},
    _EXAMPLES,
)
