"""Kimi-K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section.

The template prints ids as they are, so the sampled `functions.f:0` is the call's id.
"""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    is_json=True,
)
ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_NUMBER = re.compile(r":\d+$")


def kimi() -> FramedParser:
    return FramedParser(DELIMITERS, _parse_body)


def _parse_body(body: str) -> ToolCall | None:
    head, begun, rest = body.partition(ARGUMENTS)
    sampled_id = head.strip()
    name = parse_tool_name(_CALL_NUMBER.sub("", sampled_id).removeprefix("functions."))
    return ToolCall(name, rest.strip(), id=sampled_id) if name and begun else None
