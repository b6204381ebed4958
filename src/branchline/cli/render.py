"""Text output shared by the commands: coloured on a terminal, plain text everywhere else.

Commands build rich renderables and convert them to one string here. Message text comes from outside: it is
never parsed as markup, and its control characters are escaped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

_DEFAULT_WIDTH = 120
_JOINERS = "\u200c\u200d"
"""Not printable according to `str.isprintable`, but part of ordinary words and emoji."""


def output_width(width: int | None = None) -> int:
    """The columns to use: `width` if given, else those of the terminal, `$COLUMNS` or 120."""
    return _console(width).width


def to_text(*renderables: RenderableType, width: int | None = None) -> str:
    """The renderables as stdout shows them, with colour codes only if stdout is a terminal."""
    console = _console(width)
    with console.capture() as capture:
        for renderable in renderables:
            # Sentences are not wrapped: a terminal wraps them itself, and a pipe gets each on one line.
            console.print(renderable, soft_wrap=isinstance(renderable, Text))
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def _console(width: int | None) -> Console:
    if width is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = _DEFAULT_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def sanitize(text: str, max_chars: int = 400) -> str:
    """The text on one line, cut to `max_chars`, with control characters escaped.

    >>> sanitize("two\\n lines \\x1b[31m")
    'two lines \\\\x1b[31m'
    """
    line = " ".join(text[:max_chars].split())
    if line.isprintable():
        return line
    return "".join(
        char
        if char.isprintable() or char in _JOINERS
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in line
    )


def more_lines(count: int) -> Iterator[Text]:
    """A line for `count` entries that are not shown; none if the count is not positive."""
    if count > 0:
        yield Text(f"  {format_count(count)} more; --json lists them all")


def format_count(count: int) -> str:
    """A count with thousands separators: 12,345."""
    return f"{count:,}"


def format_duration(seconds: float) -> str:
    """Minutes and seconds, and hours if there are some.

    >>> format_duration(7.4), format_duration(3725)
    ('0:07', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pluralize(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless the count is 1.

    >>> pluralize(1, "call"), pluralize(1200, "call")
    ('1 call', '1,200 calls')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
