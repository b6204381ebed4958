"""Errors of options: one sentence with the source, what was given and expected, and where the help is."""

from __future__ import annotations

from collections.abc import Iterable

from branchline.core.errors import InputError

_MAX_SHOWN = 120


class UsageError(InputError):
    """A command line, a variable or a file of options cannot be used."""


def usage_error(command: str, problem: str, *, all_options: bool = False) -> UsageError:
    """An error that says where the help is."""
    name = f"branchline {command}".strip()
    return UsageError(f"{problem} ({name} {'--help-all' if all_options else '--help'})")


def show(value: object) -> str:
    """A value for an error, on one line and cut."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def either(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = [*names] or [""]
    return f"{', '.join(first)} or {last}" if first else last
