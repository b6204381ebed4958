"""GLM-4.5 and later: `<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>`."""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.xml_arguments import ParameterSchemas, parse_tool_name
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(("<tool_call>", "</tool_call>"))
_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm(schemas: ParameterSchemas) -> FramedParser:
    return FramedParser(DELIMITERS, lambda body: _parse_body(body, schemas))


def _parse_body(body: str, schemas: ParameterSchemas) -> ToolCall | None:
    head, tag, rest = body.partition("<")
    name = parse_tool_name(head)
    return schemas.build_call(name, tag + rest, _PAIR) if name else None
