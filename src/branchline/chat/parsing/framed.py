"""Calls between an opener and a closer, with or without a section around them.

The closer decides: a block in which no call is readable is text, and parsing continues after it. A section
may hold only calls and whitespace; anything else ends the section as text.

`CallFormat` holds the delimiters of one format and the function that parses what stands between them. The
formats are values of it: `json_formats`, `tagged_formats` and `literal_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, ParseProblem, Tools
from branchline.chat.parsing.json_scan import JsonScanner
from branchline.core.message import ToolCall

BodyParser = Callable[[str, Tools], Sequence[ToolCall]]
"""Returns the calls between two markers; none if they are not readable."""


@dataclass(frozen=True)
class CallFormat:
    """The delimiters of calls, and how the text between them is parsed. Calling it creates a parser."""

    call_markers: tuple[str, str]
    parse_body: BodyParser
    section_markers: tuple[str, str] | None = None
    is_json: bool = False
    """The body of a call is JSON, so a closer inside one of its strings does not close it."""
    is_json_sequence: bool = False
    """The body is JSON, and may be several values."""
    closer_is_optional: bool = False
    """The end of an output closes a call too, unless the output was cut."""
    text_markers: tuple[str, ...] = ()
    """Markers around text; they are framing and not part of the text."""

    def __call__(self, tools: Tools = ()) -> FramedParser:
        return FramedParser(self, tools)

    @cached_property
    def splitter(self) -> MarkerSplitter:
        return MarkerSplitter(*self.call_markers, *(self.section_markers or ()), *self.text_markers)


class _FramedState(Enum):
    TEXT = 0
    SECTION = 1
    CALL = 2


class FramedParser(FormatParser):
    """Parses text with delimited calls."""

    def __init__(self, call_format: CallFormat, tools: Tools = ()) -> None:
        super().__init__(tools)
        self.splitter = call_format.splitter
        self._format = call_format
        self._opener, self._closer = call_format.call_markers
        self._section_opener, self._section_closer = call_format.section_markers or ("", "")
        self._scan: JsonScanner
        """Follows the body of the open call."""
        self._state = _FramedState.TEXT
        self._outer_state = _FramedState.TEXT
        self._section_calls = 0
        self._body_start = 0
        self._quoted_closer = 0
        """The index in the block of the first closer that seems to be inside a string; 0 if there is none."""
        self._rescanning = False
        """Text is being consumed a second time and closers in strings count; no text is consumed thrice."""

    def _close(self) -> None:
        if (
            self._state is _FramedState.CALL
            and self._quoted_closer
            and not self._truncated
            # A call that is complete without a closer has its closers inside strings.
            and not (self._format.closer_is_optional and self._scan.is_complete)
        ):
            self._close_call(self._quoted_closer)
        if self._state is _FramedState.CALL and self._format.closer_is_optional and not self._truncated:
            self._close_call(len(self._block))
        # Whitespace after the last call of a section that was never closed is framing.
        if self._state is _FramedState.CALL or (
            self._state is _FramedState.SECTION and not self._section_calls
        ):
            self._flush_block_as_text()

    def _consume(self, text: str, is_marker: bool) -> None:
        if self._state is _FramedState.CALL:
            self._consume_body(text, is_marker)
        elif self._state is _FramedState.SECTION:
            self._consume_section(text, is_marker)
        elif is_marker and text == self._section_opener:
            self._block.append(text)
            self._state = _FramedState.SECTION
            self._section_calls = 0
        elif is_marker and not self._section_opener and text == self._opener:
            self._open_call(text, _FramedState.TEXT)
        elif not (is_marker and text in self._format.text_markers):
            if is_marker and text == self._opener:
                self.problems.append(ParseProblem.MALFORMED_CALL)
            self._add_text(text)

    def _consume_section(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker and text.isspace():
            return
        if is_marker and text == self._opener:
            self._block.pop()
            self._open_call(text, _FramedState.SECTION)
            return
        self._state = _FramedState.TEXT
        if self._section_calls and is_marker and text == self._section_closer:
            self._block.clear()
            self._after_call = True
        else:
            self._flush_block_as_text()

    def _open_call(self, opener: str, outer_state: _FramedState) -> None:
        self._block.append(opener)
        self._body_start = len(self._block)
        self._scan = JsonScanner(repeats=self._format.is_json_sequence)
        self._quoted_closer = 0
        self._state = _FramedState.CALL
        self._outer_state = outer_state

    def _consume_body(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        index = len(self._block) - 1
        is_closer = is_marker and text == self._closer
        if is_closer and (self._rescanning or not self._scan.in_string):
            # If the brackets do not balance, what looked like a string was not one.
            self._close_call(index if self._scan.is_complete else self._quoted_closer or index)
            return
        if is_closer:
            self._quoted_closer = self._quoted_closer or index
        if self._format.is_json or self._format.is_json_sequence:
            self._scan.feed(text)
            if self._scan.is_invalid and self._quoted_closer:
                self._close_call(self._quoted_closer)

    def _close_call(self, closer: int) -> None:
        """Parses the call before a closer, and consumes again what follows the closer."""
        calls = self._format.parse_body("".join(self._block[self._body_start : closer]), self._tools)
        rest = self._block[closer + 1 :]
        del self._block[closer + 1 :]
        self._state = self._outer_state
        if calls:
            self._add_calls(*calls)
            self._section_calls += 1
        else:
            self._flush_block_as_text()
        if rest:
            self._rescanning = True
            for text in rest:
                self._consume(text, text in self.splitter.markers)
            self._rescanning = False
