"""Every output format by name, and the format of a model, detected from its chat template.

Detection reads the markers in the template's source, because the template decides what later prompts show:
reasoning that the template does not show must not be parsed out, or every call would fork.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from branchline.chat.parsing.base import TextParser
from branchline.chat.parsing.format_parser import PlainParser
from branchline.chat.parsing.framed import deepseek, glm, hermes, kimi, minimax, qwen3_coder
from branchline.chat.parsing.harmony import HarmonyParser
from branchline.chat.parsing.llama3 import Llama3Parser
from branchline.chat.parsing.mistral import MistralParser
from branchline.chat.parsing.reasoning import REASONING_MARKERS, ReasoningParser
from branchline.chat.parsing.xml_arguments import ParameterSchemas, Tools
from branchline.core.errors import CodecError

NO_REASONING = "none"

TOOL_FORMATS: dict[str, Callable[[ParameterSchemas], TextParser]] = {
    "plain": lambda _: PlainParser(),
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "harmony": lambda _: HarmonyParser(),
    "llama3": lambda _: Llama3Parser(),
    "mistral": lambda _: MistralParser(),
    "deepseek": deepseek,
    "glm": glm,
    "kimi": kimi,
    "minimax": minimax,
}


def create_text_parser(
    name: str, *, reasoning_format: str = NO_REASONING, starts_in_reasoning: bool = False, tools: Tools = ()
) -> TextParser:
    """Returns a new parser of a tool format, after a reasoning layer unless `reasoning_format` is `none`.

    `tools` give the argument types for formats that write arguments as bare text.
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


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the outputs of a model are parsed."""

    tool_format: str = "plain"
    reasoning_format: str = NO_REASONING
    starts_in_reasoning: bool = False
    """The generation prompt opens the reasoning."""

    def create_parser(self, tools: Tools = (), *, starts_in_reasoning: bool | None = None) -> TextParser:
        """Returns a parser for one output; `starts_in_reasoning` overrides the format's own."""
        if starts_in_reasoning is None:
            starts_in_reasoning = self.starts_in_reasoning
        return create_text_parser(
            self.tool_format,
            reasoning_format=self.reasoning_format,
            starts_in_reasoning=starts_in_reasoning,
            tools=tools,
        )


_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("glm", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|start_header_id|>", "tool_calls")),
    ("llama3", ("<|python_tag|>",)),
)
"""A format is detected if the source contains all of its markers; the more specific formats come first."""


def detect_output_format(
    template_source: str, generation_prompt: str = "", added_tokens: Collection[str] = ()
) -> OutputFormat:
    """Detects the format from a template's source, or from the added tokens if there is no template.

    >>> detect_output_format("… <think> … {{ '<tool_call>' }} …", "<|im_start|>assistant\\n<think>\\n")
    OutputFormat(tool_format='hermes', reasoning_format='think', starts_in_reasoning=True)
    """
    source = template_source or "\n".join(added_tokens)
    tool_format = next(
        (name for name, markers in _TOOL_MARKERS if all(marker in source for marker in markers)), "plain"
    )
    if tool_format == "harmony":
        # Its parser reads reasoning from the channels.
        return OutputFormat(tool_format)
    for name, (opener, closer) in REASONING_MARKERS.items():
        opened = generation_prompt.rfind(opener)
        if closer in source or opened >= 0:
            return OutputFormat(tool_format, name, opened > generation_prompt.rfind(closer))
    return OutputFormat(tool_format)
