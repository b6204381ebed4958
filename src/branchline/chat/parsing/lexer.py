"""Text cut at markers, piece by piece: only a suffix that could still become a marker is held back.

No marker holds the first character of any marker again behind its own first, so markers cannot overlap and
at most one can be under way: the pieces between the markers are the same for every chunking.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_MAX_SKIP_CHARS = 64


class Lexeme(NamedTuple):
    """A run of text, or one marker."""

    text: str
    is_marker: bool


@cache
def _compile_markers(markers: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """What markers begin with, and how they are found. There are as many as there are formats."""
    starts = frozenset(marker[0] for marker in markers)
    if any(letter in starts for marker in markers for letter in marker[1:]):
        raise ValueError(f"markers {markers} could overlap")
    return starts, re.compile("|".join(map(re.escape, markers)))


class Lexer:
    """Finds markers in a stream of text.

    >>> lexer = Lexer("<a>", "</a>")
    >>> lexer.feed("x</"), lexer.feed("a>y<"), lexer.finish()
    ([Lexeme(text='x', is_marker=False)], [Lexeme(text='</a>', is_marker=True), \
Lexeme(text='y', is_marker=False)], '<')
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._starts, self._pattern = _compile_markers(markers)
        self._held = ""

    def feed(self, text: str) -> list[Lexeme]:
        text = self._held + text
        pieces: list[Lexeme] = []
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                pieces.append(Lexeme(text[at : match.start()], False))
            pieces.append(Lexeme(match[0], True))
            at = match.end()
        end = self._partial_marker_start(text, at)
        if end > at:
            pieces.append(Lexeme(text[at:end], False))
        self._held = text[end:]
        return pieces

    def can_skip(self, text: str) -> bool:
        """Whether a short text is no part of any marker: then it need not be fed."""
        return not self._held and len(text) < _MAX_SKIP_CHARS and self._starts.isdisjoint(text)

    def finish(self) -> str:
        """What was held back, which is no marker."""
        held, self._held = self._held, ""
        return held

    def _partial_marker_start(self, text: str, at: int) -> int:
        start = max(text.rfind(letter, at) for letter in self._starts)
        if start >= 0:
            suffix = text[start:]
            if any(marker.startswith(suffix) for marker in self._markers):
                return start
        return len(text)
