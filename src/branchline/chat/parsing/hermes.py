"""Hermes, Qwen2.5, Qwen3: `<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`."""

from __future__ import annotations

from branchline.chat.parsing.framed import Frame, FramedParser
from branchline.chat.parsing.jsontext import read_call

FRAME = Frame(("<tool_call>", "</tool_call>"), is_json=True)


def hermes() -> FramedParser:
    return FramedParser(FRAME, lambda body: read_call(body, "arguments"))
