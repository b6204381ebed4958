"""Formats whose calls are tags: a name, and pairs of keys and values.

Most write values as bare text; the tool's schema then tells strings from other values (`xml_arguments`).
"""

from __future__ import annotations

import re

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.framed import BodyParser, CallFormat
from branchline.chat.parsing.nested_tags import parse_nested_tags
from branchline.chat.parsing.xml_arguments import build_call, parse_tool_name
from branchline.core.message import ToolCall

_FUNCTION_OPENING = re.compile(r"\s*<function=([^<>]*)>")
_QUOTED_NAME = re.compile(r'"([^"<>]*)"(?: index="[^"<>]*")?(?:>|<\|sep\|>)')


def _pairs(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\s*" + pattern, re.DOTALL)


def _parse_function_tags(pair: re.Pattern[str]) -> BodyParser:
    """Returns a parser of `<function=f><parameter=k>v</parameter></function>`."""

    def parse(body: str, tools: Tools) -> list[ToolCall]:
        opening = _FUNCTION_OPENING.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return []
        inner = body[opening.end() :].strip()
        if inner.endswith("</function>"):
            return [build_call(name, inner.removesuffix("</function>"), pair, tools)]
        # Not closed: the arguments are the text as it is. Empty text would mean a call without arguments.
        return [ToolCall(name, inner)] if inner else []

    return parse


def _parse_quoted_name(pair: re.Pattern[str]) -> BodyParser:
    """Returns a parser of a quoted name, the end of its tag, and pairs."""

    def parse(body: str, tools: Tools) -> list[ToolCall]:
        opening = _QUOTED_NAME.match(body)
        name = parse_tool_name(opening[1]) if opening is not None else None
        if opening is None or name is None:
            return []
        return [build_call(name, body[opening.end() :], pair, tools)]

    return parse


def _parse_bare_name(pair: re.Pattern[str], separator: str = "") -> BodyParser:
    """Returns a parser of a name and pairs."""

    def parse(body: str, tools: Tools) -> list[ToolCall]:
        head, tag, rest = body.partition(separator or "<")
        name = parse_tool_name(head)
        return [build_call(name, rest if separator else tag + rest, pair, tools)] if name else []

    return parse


def _parse_minimax_m3(body: str, tools: Tools) -> list[ToolCall]:
    opening = _QUOTED_NAME.match(body)
    name = parse_tool_name(opening[1]) if opening is not None else None
    if opening is None or name is None:
        return []
    return [ToolCall(name, parse_nested_tags(name, body[opening.end() :], _MINIMAX_TAG, tools))]


_MINIMAX_TAG = "]<]minimax[>["
# One newline on either side of a value belongs to the template, further ones to the value.
_QWEN3_CODER_PAIR = _pairs(r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>")
_SEED_PAIR = _pairs(r"<parameter=(?P<key>[^<>\n]+)>(?P<value>.*?)</parameter>")
_GLM_PAIR = _pairs(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>")
_HUNYUAN_PAIR = _pairs(
    r"<arg_key:opensource>(?P<key>[^<]+)</arg_key:opensource>\s*"
    r"<arg_value:opensource>(?P<value>.*?)</arg_value:opensource>"
)
_MINIMAX_PAIR = _pairs(r'<parameter name="(?P<key>[^"<>]+)">(?P<value>.*?)</parameter>')
_DSML_PAIR = _pairs(
    r'<｜DSML｜parameter name="(?P<key>[^"<>]+)" string="(?P<is_string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>"
)
_KIMI_K3_PAIR = _pairs(
    r'<\|open\|>argument key="(?P<key>[^"<>]+)" type="(?P<is_string>[a-z]+)"<\|sep\|>'
    r"(?P<value>.*?)<\|close\|>argument<\|sep\|>"
)
_MINICPM_PAIR = _pairs(
    r'<param name="(?P<key>[^"<>]+)">(?:<!\[CDATA\[(?P<verbatim>.*?)\]\]>|(?P<value>.*?))</param>'
)

TAGGED_FORMATS: dict[str, CallFormat] = {
    # Qwen3-Coder, Qwen3.5, Nemotron 3, Step: a tag per line.
    "qwen3_coder": CallFormat(("<tool_call>", "</tool_call>"), _parse_function_tags(_QWEN3_CODER_PAIR)),
    "seed": CallFormat(("<seed:tool_call>", "</seed:tool_call>"), _parse_function_tags(_SEED_PAIR)),
    # GLM-4.5 and later, Laguna, Ling: <tool_call>f, then <arg_key>k</arg_key><arg_value>v</arg_value>
    "glm": CallFormat(("<tool_call>", "</tool_call>"), _parse_bare_name(_GLM_PAIR)),
    "hunyuan": CallFormat(
        ("<tool_call:opensource>", "</tool_call:opensource>"),
        _parse_bare_name(_HUNYUAN_PAIR, "<tool_sep:opensource>"),
        ("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    # MiniMax-M2: <invoke name="f">\n<parameter name="k">v</parameter>\n</invoke> in a section.
    "minimax": CallFormat(
        ("<invoke name=", "</invoke>"),
        _parse_quoted_name(_MINIMAX_PAIR),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # MiniMax-M3: tags named by the keys, nested, each after a token of its own.
    "minimax_m3": CallFormat(
        (f"{_MINIMAX_TAG}<invoke name=", f"{_MINIMAX_TAG}</invoke>"),
        _parse_minimax_m3,
        (f"{_MINIMAX_TAG}<tool_call>", f"{_MINIMAX_TAG}</tool_call>"),
    ),
    "deepseek_v32": CallFormat(
        ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
        _parse_quoted_name(_DSML_PAIR),
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    "deepseek_v4": CallFormat(
        ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
        _parse_quoted_name(_DSML_PAIR),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    "kimi_k3": CallFormat(
        ("<|open|>call tool=", "<|close|>call<|sep|>"),
        _parse_quoted_name(_KIMI_K3_PAIR),
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        text_markers=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ),
    # MiniCPM5: <function name="f"><param name="k">v</param></function>
    "minicpm5": CallFormat(("<function name=", "</function>"), _parse_quoted_name(_MINICPM_PAIR)),
}
