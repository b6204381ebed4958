"""GLM-4.5 and later: `<tool_call>f\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>`."""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import Frame, FramedParser
from branchline.chat.parsing.values import Schemas, read_name
from branchline.core.message import ToolCall

FRAME = Frame(("<tool_call>", "</tool_call>"))
_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm(schemas: Schemas) -> FramedParser:
    return FramedParser(FRAME, lambda body: _read(body, schemas))


def _read(body: str, schemas: Schemas) -> ToolCall | None:
    head, tag, rest = body.partition("<")
    name = read_name(head)
    return schemas.call(name, tag + rest, _PAIR) if name else None
