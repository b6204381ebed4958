"""Qwen3-Coder: `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`, a tag to a line.

One newline on either side of a value is the template's; more of them are the value's.
"""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.xml_arguments import ParameterSchemas, parse_tool_name
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(("<tool_call>", "</tool_call>"))
_OPENING = re.compile(r"\s*<function=([^<>]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def qwen3_coder(schemas: ParameterSchemas) -> FramedParser:
    return FramedParser(DELIMITERS, lambda body: _parse_body(body, schemas))


def _parse_body(body: str, schemas: ParameterSchemas) -> ToolCall | None:
    opening = _OPENING.match(body)
    name = parse_tool_name(opening[1]) if opening is not None else None
    if opening is None or name is None:
        return None
    inner = body[opening.end() :].strip()
    if inner.endswith("</function>"):
        return schemas.build_call(name, inner.removesuffix("</function>"), _PARAMETER)
    # Not closed: as it stands, unless nothing does, which would mean no arguments.
    return ToolCall(name, inner) if inner else None
