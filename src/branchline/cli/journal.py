"""`branchline journal`: checks a journal for damage, and repairs it."""

from __future__ import annotations

from collections.abc import Iterator

from branchline.cli.commands.journal import JournalOptions
from branchline.cli.render import format_count, pluralize, sanitize
from branchline.tree.journal_repair import JournalDamage, JournalReport, check_journal, repair_journal

_EXIT_DAMAGED = 1
_MAX_LISTED = 50
"""Damages that are listed; the others are counted."""


def run_check(options: JournalOptions) -> tuple[str, int]:
    """The report as text, and the exit code."""
    report = check_journal(options.file)
    return "\n".join(_report_lines(report)) + "\n", _EXIT_DAMAGED if report.damages else 0


def run_repair(options: JournalOptions) -> str:
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
