"""Qwen3-Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, a tag to a line.

One newline on either side of a value is the template's; more of them are the value's.
"""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import Frame, FramedParser
from branchline.chat.parsing.values import Schemas, read_name, read_pairs
from branchline.core.message import ToolCall

FRAME = Frame(("<tool_call>", "</tool_call>"))
_OPENING = re.compile(r"\s*<function=([^<>]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def qwen3_coder(schemas: Schemas) -> FramedParser:
    return FramedParser(FRAME, lambda body: _read(body, schemas))


def _read(body: str, schemas: Schemas) -> ToolCall | None:
    opening = _OPENING.match(body)
    inner = body.rstrip()
    if opening is None or not inner.endswith("</function>"):
        return None
    name = read_name(opening[1])
    pairs = read_pairs(inner[opening.end() :].removesuffix("</function>"), _PARAMETER)
    return schemas.call(name, pairs) if name and pairs is not None else None
