"""Hermes, Qwen2.5, Qwen3: `<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`."""

from __future__ import annotations

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.json_scan import parse_call, parse_lenient
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(("<tool_call>", "</tool_call>"), is_json=True)


def hermes() -> FramedParser:
    return FramedParser(DELIMITERS, _parse_body)


def _parse_body(body: str) -> ToolCall | None:
    return parse_call(body, "arguments") or parse_lenient(body)
