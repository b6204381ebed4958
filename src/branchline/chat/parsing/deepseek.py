"""DeepSeek: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` in a section (V3.1).

V3 and R1 write `function` before the separator, then the name, a line break and the arguments in a fence.
"""

from __future__ import annotations

from branchline.chat.parsing.framed import CallDelimiters, FramedParser
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

DELIMITERS = CallDelimiters(
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    is_json=True,
)
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def deepseek() -> FramedParser:
    return FramedParser(DELIMITERS, _parse_body)


def _parse_body(body: str) -> ToolCall | None:
    head, separator, rest = body.partition(SEPARATOR)
    rest = rest.strip()
    if head.strip() == "function" and not rest.startswith("{"):
        head, _, rest = rest.partition("\n")
        rest = rest.strip()
        if rest.startswith(_FENCE) and rest.endswith(_FENCE):
            rest = rest.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
    name = parse_tool_name(head)
    return ToolCall(name, rest) if name and separator else None
