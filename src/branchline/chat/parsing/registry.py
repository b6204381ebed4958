"""Every output format by name; parsers hold state, so each output gets its own."""

from __future__ import annotations

from collections.abc import Callable

from branchline.chat.parsing.base import TextParser
from branchline.chat.parsing.deepseek import deepseek
from branchline.chat.parsing.glm import glm
from branchline.chat.parsing.harmony import HarmonyParser
from branchline.chat.parsing.hermes import hermes
from branchline.chat.parsing.kimi import kimi
from branchline.chat.parsing.llama3 import Llama3Parser
from branchline.chat.parsing.minimax import minimax
from branchline.chat.parsing.mistral import MistralParser
from branchline.chat.parsing.plain import PlainParser
from branchline.chat.parsing.qwen3_coder import qwen3_coder
from branchline.chat.parsing.reasoning import REASONING_MARKERS, ReasoningParser
from branchline.chat.parsing.xml_arguments import ParameterSchemas, Tools
from branchline.core.errors import CodecError

NO_REASONING = "none"

TOOL_FORMATS: dict[str, Callable[[ParameterSchemas], TextParser]] = {
    "plain": lambda _: PlainParser(),
    "hermes": lambda _: hermes(),
    "qwen3_coder": qwen3_coder,
    "harmony": lambda _: HarmonyParser(),
    "llama3": lambda _: Llama3Parser(),
    "mistral": lambda _: MistralParser(),
    "deepseek": lambda _: deepseek(),
    "glm": glm,
    "kimi": lambda _: kimi(),
    "minimax": minimax,
}


def create_text_parser(
    name: str, *, reasoning_format: str = NO_REASONING, starts_in_reasoning: bool = False, tools: Tools = ()
) -> TextParser:
    """A new parser of a tool format, behind a reasoning layer unless `reasoning` is `none`.

    `tools` type the arguments of formats that write them as bare text.
    """
    if name not in TOOL_FORMATS:
        raise CodecError(f"tool format: got {name!r}, expected one of {', '.join(TOOL_FORMATS)}")
    parser = TOOL_FORMATS[name](ParameterSchemas(tools))
    if reasoning_format == NO_REASONING:
        return parser
    if reasoning_format not in REASONING_MARKERS:
        expected = ", ".join([NO_REASONING, *REASONING_MARKERS])
        raise CodecError(f"reasoning format: got {reasoning_format!r}, expected one of {expected}")
    return ReasoningParser(
        parser, REASONING_MARKERS[reasoning_format], starts_in_reasoning=starts_in_reasoning
    )
