"""`branchline journal`: checks a journal for damage, and repairs it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from branchline.cli.render import format_count, pluralize, sanitize
from branchline.tree.journal_repair import JournalDamage, JournalReport, check_journal, repair_journal

_DESCRIPTION = """\
Checks or repairs the file that `branchline serve --journal FILE` writes.

Each record in a journal has a checksum. When a gateway starts, a session with a damaged record is
quarantined: requests for it are refused, its records stay in the journal, and all other sessions continue.
A file whose pages SQLite cannot read has to be repaired before a gateway can use it.
"""
_EPILOG = """\
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
_EXIT_DAMAGED = 1
_MAX_LISTED = 50
"""Damages that are listed; the others are counted."""


def add_journal(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "journal",
        help="check a journal for damage, or repair it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, summary, description, run in (
        ("check", "list what is damaged", _CHECK_DESCRIPTION, run_check),
        ("repair", "keep what is intact", _REPAIR_DESCRIPTION, run_repair),
    ):
        action = actions.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_argument("file", type=Path, metavar="FILE", help="the journal")
        action.set_defaults(run=run)


def run_check(options: argparse.Namespace) -> tuple[str, int]:
    """The report as text, and the exit code."""
    report = check_journal(options.file)
    return "\n".join(_report_lines(report)) + "\n", _EXIT_DAMAGED if report.damages else 0


def run_repair(options: argparse.Namespace) -> str:
    """What was damaged, kept and dropped, as text."""
    repaired = repair_journal(options.file)
    lines = list(_report_lines(repaired.before))
    if repaired.copy is None:
        return "\n".join([*lines, "nothing to repair"]) + "\n"
    lines.append(f"kept {pluralize(repaired.kept, 'record')}; the old file is {repaired.copy}")
    for session, count in repaired.dropped.items():
        lines.append(f"  session {sanitize(session)}: dropped {pluralize(count, 'record')} after the damage")
    return "\n".join(lines) + "\n"


def _report_lines(report: JournalReport) -> Iterator[str]:
    counts = f"{pluralize(report.records, 'intact record')} of {pluralize(report.sessions, 'session')}"
    yield f"{report.path}: {counts}"
    if report.unchecked:
        yield f"  {pluralize(report.unchecked, 'record')} without a checksum, from an older version"
    if report.is_open:
        yield "  in use by a gateway; the end of its write-ahead log was not checked"
    if not report.damages:
        yield "no damage found"
        return
    yield f"{pluralize(len(report.damages), 'damage')} found:"
    for damage in report.damages[:_MAX_LISTED]:
        yield f"  {_damage_text(damage)}"
    if len(report.damages) > _MAX_LISTED:
        yield f"  and {format_count(len(report.damages) - _MAX_LISTED)} more"


def _damage_text(damage: JournalDamage) -> str:
    session = f"session {sanitize(damage.session)}: " if damage.session is not None else ""
    return session + sanitize(damage.problem)
