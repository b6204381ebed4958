"""What the format parsers share: finding markers in streamed text, and collecting deltas.

Newlines around a call belong to its framing: those directly before its opener, and those after its closer
up to the next call or the end. All other newlines are text, and so is a block that is not a call.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.json_scan import is_json_object
from branchline.core.message import ToolCall


class Lexeme(NamedTuple):
    """A run of text, or one marker."""

    text: str
    is_marker: bool


@cache
def _compile_markers(markers: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """Returns the first characters of the markers and a pattern that finds them. Cached per format."""
    starts = frozenset(marker[0] for marker in markers)
    if any(char in starts for marker in markers for char in marker[1:]):
        raise ValueError(f"markers {markers} could overlap")
    return starts, re.compile("|".join(map(re.escape, markers)))


class Lexer:
    """Splits a stream of text at markers; only a suffix that could become a marker is held back.

    The first character of a marker never occurs inside a marker, so markers cannot overlap and at most one
    can be incomplete. The lexemes are therefore the same for every chunking.

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
        lexemes: list[Lexeme] = []
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                lexemes.append(Lexeme(text[position : match.start()], False))
            lexemes.append(Lexeme(match[0], True))
            position = match.end()
        end = self._partial_marker_start(text, position)
        if end > position:
            lexemes.append(Lexeme(text[position:end], False))
        self._held = text[end:]
        return lexemes

    def finish(self) -> str:
        """Returns the held text, which is not a marker."""
        held, self._held = self._held, ""
        return held

    def _partial_marker_start(self, text: str, position: int) -> int:
        start = max(text.rfind(char, position) for char in self._starts)
        if start >= 0:
            suffix = text[start:]
            if any(marker.startswith(suffix) for marker in self._markers):
                return start
        return len(text)


class FormatParser:
    """Base of the format parsers: adjacent text is merged, and deltas come out in order."""

    def __init__(self) -> None:
        self.problems: list[ParseProblem] = []
        self._deltas: list[MessageDelta] = []
        self._pending: list[str] = []
        self._pending_is_reasoning = False
        self._held_newlines = ""
        """Newlines that are text unless a call follows, or unless only they follow a call."""
        self._after_call = False
        self._block: list[str] = []
        """Every character since an opener, emitted as text if the block is not a call."""
        self._call_count = 0
        self._truncated = False

    def _add_text(self, text: str) -> None:
        """Adds text outside any block."""
        body = text.rstrip("\n")
        if body:
            self._append(self._held_newlines + body)
            self._held_newlines = ""
            self._after_call = False
        self._held_newlines += text[len(body) :]

    def _add_calls(self, *calls: ToolCall) -> None:
        """Emits the block as these calls; its characters and the newlines before it were framing."""
        self._flush_pending()
        for call in calls:
            if not is_json_object(call.arguments):
                self.problems.append(ParseProblem.MALFORMED_ARGUMENTS)
            self._deltas.append(MessageDelta(tool_call=call, index=self._call_count))
            self._call_count += 1
        self._block.clear()
        self._held_newlines = ""
        self._after_call = True

    def _flush_block_as_text(self) -> None:
        """Emits the block as text: it is cut or malformed."""
        self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
        block = "".join(self._block)
        self._block.clear()
        self._add_text(block)

    def _append(self, text: str, *, reasoning: bool = False) -> None:
        """Adds exactly this text, newlines included."""
        if reasoning is not self._pending_is_reasoning:
            self._flush_pending()
            self._pending_is_reasoning = reasoning
        self._pending.append(text)

    def _final_deltas(self) -> list[MessageDelta]:
        """Returns the last deltas of an output."""
        if not self._after_call:
            self._append(self._held_newlines)
        self._held_newlines = ""
        return self._pop_deltas()

    def _pop_deltas(self) -> list[MessageDelta]:
        """Returns the deltas since the last call of this method."""
        self._flush_pending()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _flush_pending(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if text:
            self._deltas.append(
                MessageDelta(reasoning_content=text)
                if self._pending_is_reasoning
                else MessageDelta(content=text)
            )


class PlainParser:
    """The format without tools: all of an output is text."""

    def __init__(self) -> None:
        self.problems: list[ParseProblem] = []

    def feed(self, text: str) -> list[MessageDelta]:
        return [MessageDelta(content=text)] if text else []

    def finish(self, cut: bool) -> list[MessageDelta]:
        return []
