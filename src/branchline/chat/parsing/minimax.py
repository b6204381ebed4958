"""MiniMax-M2: `<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="k">v</parameter>\\n</invoke>\\n\
</minimax:tool_call>`, several invokes to a section."""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.xml_arguments import ParameterSchemas, parse_tool_name
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(("<invoke name=", "</invoke>"), ("<minimax:tool_call>", "</minimax:tool_call>"))
_NAME = re.compile(r'"([^"<>]*)">')
_PARAMETER = re.compile(r'\s*<parameter name="([^"<>]+)">(.*?)</parameter>', re.DOTALL)


def minimax(schemas: ParameterSchemas) -> FramedParser:
    return FramedParser(DELIMITERS, lambda body: _parse_body(body, schemas))


def _parse_body(body: str, schemas: ParameterSchemas) -> ToolCall | None:
    opening = _NAME.match(body)
    name = parse_tool_name(opening[1]) if opening is not None else None
    return (
        schemas.build_call(name, body[opening.end() :], _PARAMETER) if opening is not None and name else None
    )
