"""Formats whose calls stand between an opener and a closer, with or without a section around them.

The closer decides: a call whose name is not readable is text, and parsing continues after it. A section may
hold only calls and whitespace; anything else ends the section as text.

Each format is a class with its delimiters and a method that parses what stands between them.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import ClassVar

from branchline.chat.parsing.base import FormatParser, MarkerSplitter, ParseProblem, Tools
from branchline.chat.parsing.json_scan import JsonScanner, parse_call, parse_lenient
from branchline.chat.parsing.xml_arguments import build_call, parse_tool_name
from branchline.core.message import ToolCall


class _FramedState(Enum):
    TEXT = 0
    SECTION = 1
    CALL = 2


class FramedParser(FormatParser):
    """Parses text with delimited calls. A subclass sets the markers and parses the text between them."""

    call_markers: ClassVar[tuple[str, str]]
    section_markers: ClassVar[tuple[str, str] | None] = None
    is_json: ClassVar[bool] = False
    """The body of a call is JSON, so a closer inside one of its strings does not close it."""
    _scan: JsonScanner
    """Follows the body of the open call."""

    def __init_subclass__(cls) -> None:
        cls.splitter = MarkerSplitter(*cls.call_markers, *(cls.section_markers or ()))

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._state = _FramedState.TEXT
        self._outer_state = _FramedState.TEXT
        self._section_calls = 0
        self._body_start = 0
        self._quoted_closer = 0
        """The index in the block of the first closer that seems to be inside a string; 0 if there is none."""
        self._rescanning = False
        """Text is being consumed a second time and closers in strings count; no text is consumed thrice."""

    def _parse_body(self, body: str) -> ToolCall | None:
        """Returns the call between the markers, or None if it is not readable."""
        raise NotImplementedError

    def _close(self) -> None:
        if self._state is _FramedState.CALL and self._quoted_closer and not self._truncated:
            self._close_call(self._quoted_closer)
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
        elif is_marker and self.section_markers and text == self.section_markers[0]:
            self._block.append(text)
            self._state = _FramedState.SECTION
            self._section_calls = 0
        elif is_marker and not self.section_markers and text == self.call_markers[0]:
            self._open_call(text, _FramedState.TEXT)
        else:
            if is_marker and text == self.call_markers[0]:
                self.problems.append(ParseProblem.MALFORMED_CALL)
            self._add_text(text)

    def _consume_section(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        if not is_marker and text.isspace():
            return
        if is_marker and text == self.call_markers[0]:
            self._block.pop()
            self._open_call(text, _FramedState.SECTION)
            return
        self._state = _FramedState.TEXT
        if self._section_calls and self.section_markers and text == self.section_markers[1]:
            self._block.clear()
            self._after_call = True
        else:
            self._flush_block_as_text()

    def _open_call(self, opener: str, outer_state: _FramedState) -> None:
        self._block.append(opener)
        self._body_start = len(self._block)
        self._scan = JsonScanner()
        self._quoted_closer = 0
        self._state = _FramedState.CALL
        self._outer_state = outer_state

    def _consume_body(self, text: str, is_marker: bool) -> None:
        self._block.append(text)
        index = len(self._block) - 1
        is_closer = is_marker and text == self.call_markers[1]
        if is_closer and (self._rescanning or not self._scan.in_string):
            # If the brackets do not balance, what looked like a string was not one.
            self._close_call(index if self._scan.is_complete else self._quoted_closer or index)
            return
        if is_closer:
            self._quoted_closer = self._quoted_closer or index
        if self.is_json:
            self._scan.feed(text)
            if self._scan.is_invalid and self._quoted_closer:
                self._close_call(self._quoted_closer)

    def _close_call(self, closer: int) -> None:
        """Parses the call before a closer, and consumes again what follows the closer."""
        call = self._parse_body("".join(self._block[self._body_start : closer]))
        rest = self._block[closer + 1 :]
        del self._block[closer + 1 :]
        self._state = self._outer_state
        if call is None:
            self._flush_block_as_text()
        else:
            self._add_calls(call)
            self._section_calls += 1
        if rest:
            self._rescanning = True
            for text in rest:
                self._consume(text, text in self.splitter.markers)
            self._rescanning = False


# -- Hermes, Qwen2.5, Qwen3: <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call> --------------------


class HermesParser(FramedParser):
    call_markers = ("<tool_call>", "</tool_call>")
    is_json = True

    def _parse_body(self, body: str) -> ToolCall | None:
        return parse_call(body, "arguments") or parse_lenient(body)


# -- Qwen3-Coder: <tool_call><function=f><parameter=k>v</parameter></function></tool_call>, a tag per line -

_QWEN3_CODER_OPENING = re.compile(r"\s*<function=([^<>]*)>")
# One newline on either side of a value belongs to the template, further ones to the value.
_QWEN3_CODER_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderParser(FramedParser):
    call_markers = ("<tool_call>", "</tool_call>")

    def _parse_body(self, body: str) -> ToolCall | None:
        opening = _QWEN3_CODER_OPENING.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return None
        inner = body[opening.end() :].strip()
        if inner.endswith("</function>"):
            pairs = inner.removesuffix("</function>")
            return build_call(name, pairs, _QWEN3_CODER_PARAMETER, self._tools)
        # Not closed: the arguments are the text as it is. Empty text would mean a call without arguments.
        return ToolCall(name, inner) if inner else None


# -- GLM-4.5 and later: <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call> ---------

_GLM_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class GlmParser(FramedParser):
    call_markers = ("<tool_call>", "</tool_call>")

    def _parse_body(self, body: str) -> ToolCall | None:
        head, tag, rest = body.partition("<")
        name = parse_tool_name(head)
        return build_call(name, tag + rest, _GLM_PAIR, self._tools) if name else None


# -- MiniMax-M2: <invoke name="f">\n<parameter name="k">v</parameter>\n</invoke> in a section --------------

_MINIMAX_NAME = re.compile(r'"([^"<>]*)">')
_MINIMAX_PARAMETER = re.compile(r'\s*<parameter name="([^"<>]+)">(.*?)</parameter>', re.DOTALL)


class MiniMaxParser(FramedParser):
    call_markers = ("<invoke name=", "</invoke>")
    section_markers = ("<minimax:tool_call>", "</minimax:tool_call>")

    def _parse_body(self, body: str) -> ToolCall | None:
        opening = _MINIMAX_NAME.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return None
        return build_call(name, body[opening.end() :], _MINIMAX_PARAMETER, self._tools)


# -- Kimi-K2: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|> in a section -

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_CALL_NUMBER = re.compile(r":\d+$")


class KimiParser(FramedParser):
    call_markers = ("<|tool_call_begin|>", "<|tool_call_end|>")
    section_markers = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    is_json = True

    def _parse_body(self, body: str) -> ToolCall | None:
        head, marker, rest = body.partition(_KIMI_ARGUMENTS)
        # The template prints ids as they are, so the generated `functions.f:0` is the id of the call.
        call_id = head.strip()
        name = parse_tool_name(_KIMI_CALL_NUMBER.sub("", call_id).removeprefix("functions."))
        return ToolCall(name, rest.strip(), id=call_id) if name and marker else None


# -- DeepSeek: <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜> in a section (V3.1) -------------

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekParser(FramedParser):
    call_markers = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    section_markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    is_json = True

    def _parse_body(self, body: str) -> ToolCall | None:
        head, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
        rest = rest.strip()
        if head.strip() == "function" and not rest.startswith("{"):
            # V3 and R1: `function`, the separator, the name, a newline and fenced arguments.
            head, _, rest = rest.partition("\n")
            rest = rest.strip()
            if rest.startswith(_FENCE) and rest.endswith(_FENCE):
                rest = rest.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
        name = parse_tool_name(head)
        return ToolCall(name, rest) if name and separator else None
