"""Formats whose calls stand between an opener and a closer, with or without a section around them.

The closer decides: a call whose name is not readable is text, and parsing continues after it. A section may
hold only calls and whitespace; anything else ends the section as text.

Each format is a pair of delimiters and a function that parses what stands between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.format_parser import FormatParser, Lexer
from branchline.chat.parsing.json_scan import JsonScanner, parse_call, parse_lenient
from branchline.chat.parsing.xml_arguments import ParameterSchemas, parse_tool_name
from branchline.core.message import ToolCall


@dataclass(frozen=True)
class CallDelimiters:
    """The markers of a format."""

    call: tuple[str, str]
    section: tuple[str, str] | None = None
    is_json: bool = False
    """The body of a call is JSON, so a closer inside one of its strings does not close it."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.call, *(self.section or ()))


class _FramedState(Enum):
    TEXT = 0
    SECTION = 1
    CALL = 2


class FramedParser(FormatParser):
    """Parses text with delimited calls. `parse_body` returns the call between the markers, or None."""

    def __init__(self, delimiters: CallDelimiters, parse_body: Callable[[str], ToolCall | None]) -> None:
        super().__init__()
        self._delimiters = delimiters
        self._parse_body = parse_body
        self._lexer = Lexer(*delimiters.markers)
        self._state = _FramedState.TEXT
        self._outer_state = _FramedState.TEXT
        self._opener = delimiters.section[0] if delimiters.section else delimiters.call[0]
        self._section_calls = 0
        self._body_start = 0
        self._scan = JsonScanner()
        self._quoted_closer = 0
        """The index in the block of the first closer that seems to be inside a string; 0 if there is none."""
        self._rescanning = False
        """Text is being consumed a second time and closers in strings count; no text is consumed thrice."""

    def feed(self, text: str) -> list[MessageDelta]:
        for lexeme in self._lexer.feed(text):
            self._consume(*lexeme)
        return self._pop_deltas()

    def finish(self, cut: bool) -> list[MessageDelta]:
        self._truncated = cut
        held = self._lexer.finish()
        if held:
            self._consume(held, False)
        if self._state is _FramedState.CALL and self._quoted_closer and not cut:
            self._close_call(self._quoted_closer)
        # Whitespace after the last call of a section that was never closed is framing.
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
        is_closer = is_marker and text == self._delimiters.call[1]
        if is_closer and (self._rescanning or not self._scan.in_string):
            # If the brackets do not balance, what looked like a string was not one.
            self._close_call(index if self._scan.is_complete else self._quoted_closer or index)
            return
        if is_closer:
            self._quoted_closer = self._quoted_closer or index
        if self._delimiters.is_json:
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
                self._consume(text, text in self._delimiters.markers)
            self._rescanning = False


# -- Hermes, Qwen2.5, Qwen3: <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call> --------------------

_HERMES = CallDelimiters(("<tool_call>", "</tool_call>"), is_json=True)


def hermes(_: ParameterSchemas) -> FramedParser:
    return FramedParser(_HERMES, lambda body: parse_call(body, "arguments") or parse_lenient(body))


# -- Qwen3-Coder: <tool_call><function=f><parameter=k>v</parameter></function></tool_call>, a tag per line -

_TAGGED = CallDelimiters(("<tool_call>", "</tool_call>"))
_QWEN3_CODER_OPENING = re.compile(r"\s*<function=([^<>]*)>")
# One newline on either side of a value belongs to the template, further ones to the value.
_QWEN3_CODER_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def qwen3_coder(schemas: ParameterSchemas) -> FramedParser:
    def parse_body(body: str) -> ToolCall | None:
        opening = _QWEN3_CODER_OPENING.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return None
        inner = body[opening.end() :].strip()
        if inner.endswith("</function>"):
            return schemas.build_call(name, inner.removesuffix("</function>"), _QWEN3_CODER_PARAMETER)
        # Not closed: the arguments are the text as it is. Empty text would mean a call without arguments.
        return ToolCall(name, inner) if inner else None

    return FramedParser(_TAGGED, parse_body)


# -- GLM-4.5 and later: <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call> ---------

_GLM_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm(schemas: ParameterSchemas) -> FramedParser:
    def parse_body(body: str) -> ToolCall | None:
        head, tag, rest = body.partition("<")
        name = parse_tool_name(head)
        return schemas.build_call(name, tag + rest, _GLM_PAIR) if name else None

    return FramedParser(_TAGGED, parse_body)


# -- MiniMax-M2: <invoke name="f">\n<parameter name="k">v</parameter>\n</invoke> in a section --------------

_MINIMAX = CallDelimiters(("<invoke name=", "</invoke>"), ("<minimax:tool_call>", "</minimax:tool_call>"))
_MINIMAX_NAME = re.compile(r'"([^"<>]*)">')
_MINIMAX_PARAMETER = re.compile(r'\s*<parameter name="([^"<>]+)">(.*?)</parameter>', re.DOTALL)


def minimax(schemas: ParameterSchemas) -> FramedParser:
    def parse_body(body: str) -> ToolCall | None:
        opening = _MINIMAX_NAME.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return None
        return schemas.build_call(name, body[opening.end() :], _MINIMAX_PARAMETER)

    return FramedParser(_MINIMAX, parse_body)


# -- Kimi-K2: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|> in a section -

_KIMI = CallDelimiters(
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    is_json=True,
)
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_CALL_NUMBER = re.compile(r":\d+$")


def kimi(_: ParameterSchemas) -> FramedParser:
    def parse_body(body: str) -> ToolCall | None:
        head, marker, rest = body.partition(_KIMI_ARGUMENTS)
        # The template prints ids as they are, so the generated `functions.f:0` is the id of the call.
        call_id = head.strip()
        name = parse_tool_name(_KIMI_CALL_NUMBER.sub("", call_id).removeprefix("functions."))
        return ToolCall(name, rest.strip(), id=call_id) if name and marker else None

    return FramedParser(_KIMI, parse_body)


# -- DeepSeek: <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜> in a section (V3.1) -------------

_DEEPSEEK = CallDelimiters(
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    is_json=True,
)
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def deepseek(_: ParameterSchemas) -> FramedParser:
    def parse_body(body: str) -> ToolCall | None:
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

    return FramedParser(_DEEPSEEK, parse_body)
