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
from branchline.chat.parsing.reasoning import REASONING, ReasoningParser
from branchline.chat.parsing.values import Schemas, Tools
from branchline.core.errors import CodecError

NO_REASONING = "none"

FORMATS: dict[str, Callable[[Schemas], TextParser]] = {
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


def parser_for(
    name: str, *, reasoning: str = NO_REASONING, starts_inside: bool = False, tools: Tools = ()
) -> TextParser:
    """A new parser of a tool format, behind a reasoning layer unless `reasoning` is `none`.

    `tools` type the arguments of formats that write them as bare text.
    """
    if name not in FORMATS:
        raise CodecError(f"tool format: got {name!r}, expected one of {', '.join(FORMATS)}")
    parser = FORMATS[name](Schemas(tools))
    if reasoning == NO_REASONING:
        return parser
    if reasoning not in REASONING:
        expected = ", ".join([NO_REASONING, *REASONING])
        raise CodecError(f"reasoning format: got {reasoning!r}, expected one of {expected}")
    return ReasoningParser(parser, REASONING[reasoning], starts_inside=starts_inside)
