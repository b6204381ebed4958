"""Calls between an opener and a closer, with or without a section around them: most formats are this.

A call is judged at its closer, which decides alone: one whose name cannot be read is text, and the next is
read afresh. Inside a section only calls and whitespace may stand; anything else ends it as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from branchline.chat.parsing.base import Delta, Problem
from branchline.chat.parsing.draft import Draft
from branchline.chat.parsing.jsontext import JsonScan
from branchline.chat.parsing.lexer import Lexer
from branchline.core.message import ToolCall


@dataclass(frozen=True)
class Frame:
    """The markers of a format."""

    call: tuple[str, str]
    section: tuple[str, str] | None = None
    is_json: bool = False
    """A body is JSON, so that a closer inside one of its strings closes nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.call, *(self.section or ()))


class _State(Enum):
    TEXT = 0
    SECTION = 1
    CALL = 2


class FramedParser(Draft):
    """Text with framed calls; `read` makes a call of what stands between the markers, or None."""

    def __init__(self, frame: Frame, read: Callable[[str], ToolCall | None]) -> None:
        super().__init__()
        self._frame = frame
        self._read = read
        self._lexer = Lexer(*frame.markers)
        self._state = _State.TEXT
        self._outside = _State.TEXT
        self._opener = frame.section[0] if frame.section else frame.call[0]
        self._section_calls = 0
        self._body_start = 0
        self._scan = JsonScan()
        self._passed = 0
        """The place in the block of the first closer that a string seems to hold; 0: there is none."""
        self._is_again = False
        """What is read again has no such strings: each closer is met twice at most."""

    def feed(self, text: str) -> list[Delta]:
        if self._state is _State.TEXT and self._lexer.passes(text):
            return self._alone(text)
        for piece in self._lexer.feed(text):
            self._take(*piece)
        return self._taken()

    def finish(self, cut: bool) -> list[Delta]:
        self._cut = cut
        held = self._lexer.finish()
        if held:
            self._take(held, False)
        if self._state is _State.CALL and self._passed and not cut:
            self._close_call(self._passed)
        # Whitespace behind the last call of a section that was never closed is framing.
        if self._state is _State.CALL or (self._state is _State.SECTION and not self._section_calls):
            self._release()
        return self._end()

    def _take(self, text: str, is_marker: bool) -> None:
        if self._state is _State.TEXT:
            self._take_text(text, is_marker)
        elif self._state is _State.CALL:
            self._take_body(text, is_marker)
        else:
            self._take_between(text, is_marker)

    def _take_text(self, text: str, is_marker: bool) -> None:
        if not is_marker:
            self._say(text)
        elif text != self._opener:
            if text == self._frame.call[0]:
                self.problems.append(Problem.MALFORMED_CALL)
            self._say(text)
        elif self._frame.section:
            self._block.append(text)
            self._state = _State.SECTION
            self._section_calls = 0
        else:
            self._open_call(text, _State.TEXT)

    def _take_between(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker and text.isspace():
            return
        if is_marker and text == self._frame.call[0]:
            self._block.pop()
            self._open_call(text, _State.SECTION)
            return
        self._state = _State.TEXT
        if self._section_calls and self._frame.section and text == self._frame.section[1]:
            self._block.clear()
            self._after_call = True
        else:
            self._release()

    def _open_call(self, opener: str, outside: _State) -> None:
        self._block.append(opener)
        self._body_start = len(self._block)
        self._scan = JsonScan()
        self._passed = 0
        self._state = _State.CALL
        self._outside = outside

    def _take_body(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        place = len(self._block) - 1
        is_closer = is_marker and text == self._frame.call[1]
        if is_closer and (self._is_again or not self._scan.in_string):
            # Where the brackets do not add up, no string was what it seemed.
            self._close_call(place if self._scan.is_done else self._passed or place)
            return
        if is_closer:
            self._passed = self._passed or place
        if self._frame.is_json:
            self._scan.feed(text)
            if self._scan.is_broken and self._passed:
                self._close_call(self._passed)

    def _close_call(self, closer: int) -> None:
        """Judges what stands before a closer, and reads again what stands behind it."""
        call = self._read("".join(self._block[self._body_start : closer]))
        behind = self._block[closer + 1 :]
        del self._block[closer + 1 :]
        self._state = self._outside
        if call is None:
            self._release()
        else:
            self._call(call)
            self._section_calls += 1
        if behind:
            self._is_again = True
            for text in behind:
                self._take(text, text in self._frame.markers)
            self._is_again = False
