"""How things look in a terminal, and that they are the same without one.

Commands build rich renderables and turn them into text here, in one piece. Message text is somebody else's:
it is shown letter by letter, never read as markup, and its control characters are written out.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType
from rich.text import Text

_PIPED_WIDTH = 120
_JOINERS = "\u200c\u200d"
"""Unprintable by the book, yet parts of ordinary words and emoji."""


def columns(width: int | None = None) -> int:
    """How wide stdout is; a pipe is as wide as it is told to be."""
    return _console(width).width


def _console(width: int | None) -> Console:
    if width is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = _PIPED_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def printed(*shown: RenderableType, width: int | None = None) -> str:
    """What these look like on stdout: coloured on a terminal, plain text elsewhere."""
    console = _console(width)
    with console.capture() as capture:
        for part in shown:
            # Sentences are cut by the terminal, not by us: a pipe gets them whole.
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def plain(text: str, most: int = 400) -> str:
    """A message's text on one line, harmless to a terminal.

    >>> plain("two\\n lines \\x1b[31m")
    'two lines \\\\x1b[31m'
    """
    line = " ".join(text[:most].split())
    if line.isprintable():
        return line
    return "".join(
        letter
        if letter.isprintable() or letter in _JOINERS
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in line
    )


def number(count: int) -> str:
    """A count as people read it: 12,345."""
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "call"), counted(1200, "call")
    ('1 call', '1,200 calls')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
