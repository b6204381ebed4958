"""MiniMax-M2: `<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="k">v</parameter>\\n</invoke>\\n\
</minimax:tool_call>`, several invokes to a section."""

from __future__ import annotations

import re

from branchline.chat.parsing.framed import Frame, FramedParser
from branchline.chat.parsing.values import Schemas, read_name
from branchline.core.message import ToolCall

FRAME = Frame(("<invoke name=", "</invoke>"), ("<minimax:tool_call>", "</minimax:tool_call>"))
_NAME = re.compile(r'"([^"<>]*)">')
_PARAMETER = re.compile(r'\s*<parameter name="([^"<>]+)">(.*?)</parameter>', re.DOTALL)


def minimax(schemas: Schemas) -> FramedParser:
    return FramedParser(FRAME, lambda body: _read(body, schemas))


def _read(body: str, schemas: Schemas) -> ToolCall | None:
    opening = _NAME.match(body)
    name = read_name(opening[1]) if opening is not None else None
    return schemas.call(name, body[opening.end() :], _PARAMETER) if opening is not None and name else None
