"""Hermes, Qwen2.5, Qwen3: `<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`."""

from __future__ import annotations

from branchline.chat.parsing.framed import Frame, FramedParser
from branchline.chat.parsing.jsontext import read_call, read_loosely
from branchline.core.message import ToolCall

FRAME = Frame(("<tool_call>", "</tool_call>"), is_json=True)


def hermes() -> FramedParser:
    return FramedParser(FRAME, _read)


def _read(body: str) -> ToolCall | None:
    return read_call(body, "arguments") or read_loosely(body)
