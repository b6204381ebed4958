"""Calls between an opener and a closer, with or without a section around them: most formats are this.

A call is judged at its closer, which decides alone: one whose name cannot be read is text, and the next is
read afresh. Inside a section only calls and whitespace may stand; anything else ends it as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.format_parser import FormatParser
from branchline.chat.parsing.json_scan import JsonScanner
from branchline.chat.parsing.lexer import Lexer
from branchline.core.message import ToolCall


@dataclass(frozen=True)
class CallDelimiters:
    """The markers of a format."""

    call: tuple[str, str]
    section: tuple[str, str] | None = None
    is_json: bool = False
    """A body is JSON, so that a closer inside one of its strings closes nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.call, *(self.section or ()))


class _FramedState(Enum):
    TEXT = 0
    SECTION = 1
    CALL = 2


class FramedParser(FormatParser):
    """Text with framed calls; `read` makes a call of what stands between the markers, or None."""

    def __init__(self, frame: CallDelimiters, read: Callable[[str], ToolCall | None]) -> None:
        super().__init__()
        self._delimiters = frame
        self._parse_body = read
        self._lexer = Lexer(*frame.markers)
        self._state = _FramedState.TEXT
        self._outer_state = _FramedState.TEXT
        self._opener = frame.section[0] if frame.section else frame.call[0]
        self._section_calls = 0
        self._body_start = 0
        self._scan = JsonScanner()
        self._quoted_closer = 0
        """The place in the block of the first closer that a string seems to hold; 0: there is none."""
        self._rescanning = False
        """What is read again has no such strings: each closer is met twice at most."""

    def feed(self, text: str) -> list[MessageDelta]:
        if self._state is _FramedState.TEXT and self._lexer.can_skip(text):
            return self._text_only_deltas(text)
        for piece in self._lexer.feed(text):
            self._consume(*piece)
        return self._pop_deltas()

    def finish(self, cut: bool) -> list[MessageDelta]:
        self._truncated = cut
        held = self._lexer.finish()
        if held:
            self._consume(held, False)
        if self._state is _FramedState.CALL and self._quoted_closer and not cut:
            self._close_call(self._quoted_closer)
        # Whitespace behind the last call of a section that was never closed is framing.
        if self._state is _FramedState.CALL or (
            self._state is _FramedState.SECTION and not self._section_calls
        ):
            self._flush_block_as_text()
        return self._final_deltas()

    def _consume(self, text: str, is_marker: bool) -> None:
        if self._state is _FramedState.TEXT:
            self._consume_text(text, is_marker)
        elif self._state is _FramedState.CALL:
            self._consume_body(text, is_marker)
        else:
            self._consume_section(text, is_marker)

    def _consume_text(self, text: str, is_marker: bool) -> None:
        if not is_marker:
            self._add_text(text)
        elif text != self._opener:
            if text == self._delimiters.call[0]:
                self.problems.append(ParseProblem.MALFORMED_CALL)
            self._add_text(text)
        elif self._delimiters.section:
            self._block.append(text)
            self._state = _FramedState.SECTION
            self._section_calls = 0
        else:
            self._open_call(text, _FramedState.TEXT)

    def _consume_section(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker and text.isspace():
            return
        if is_marker and text == self._delimiters.call[0]:
            self._block.pop()
            self._open_call(text, _FramedState.SECTION)
            return
        self._state = _FramedState.TEXT
        if self._section_calls and self._delimiters.section and text == self._delimiters.section[1]:
            self._block.clear()
            self._after_call = True
        else:
            self._flush_block_as_text()

    def _open_call(self, opener: str, outside: _FramedState) -> None:
        self._block.append(opener)
        self._body_start = len(self._block)
        self._scan = JsonScanner()
        self._quoted_closer = 0
        self._state = _FramedState.CALL
        self._outer_state = outside

    def _consume_body(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        place = len(self._block) - 1
        is_closer = is_marker and text == self._delimiters.call[1]
        if is_closer and (self._rescanning or not self._scan.in_string):
            # Where the brackets do not add up, no string was what it seemed.
            self._close_call(place if self._scan.is_complete else self._quoted_closer or place)
            return
        if is_closer:
            self._quoted_closer = self._quoted_closer or place
        if self._delimiters.is_json:
            self._scan.feed(text)
            if self._scan.is_invalid and self._quoted_closer:
                self._close_call(self._quoted_closer)

    def _close_call(self, closer: int) -> None:
        """Judges what stands before a closer, and reads again what stands behind it."""
        call = self._parse_body("".join(self._block[self._body_start : closer]))
        behind = self._block[closer + 1 :]
        del self._block[closer + 1 :]
        self._state = self._outer_state
        if call is None:
            self._flush_block_as_text()
        else:
            self._add_calls(call)
            self._section_calls += 1
        if behind:
            self._rescanning = True
            for text in behind:
                self._consume(text, text in self._delimiters.markers)
            self._rescanning = False
