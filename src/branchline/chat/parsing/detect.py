"""Which parser a model needs, read off the markers its own chat template writes.

The template speaks for what the next prompt will show: where it shows no reasoning, none is parsed out,
because a message whose reasoning its template cannot show would fork at every call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from branchline.chat.parsing.reasoning import REASONING_MARKERS
from branchline.chat.parsing.registry import NO_REASONING

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
"""Markers that all have to be there, the more telling first."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What `parser_for` wants to know."""

    tool_format: str = "plain"
    reasoning_format: str = NO_REASONING
    starts_in_reasoning: bool = False
    """The generation prompt leaves the model inside its reasoning."""


def detect_output_format(
    template_source: str, generation_prompt: str = "", added_tokens: Collection[str] = ()
) -> OutputFormat:
    """Reads a template's source; where a model ships none, its added tokens have to do.

    >>> detect_output_format("… <think> … {{ '<tool_call>' }} …", "<|im_start|>assistant\\n<think>\\n")
    OutputFormat(tool_format='hermes', reasoning_format='think', starts_in_reasoning=True)
    """
    source = template_source or "\n".join(added_tokens)
    tool_format = next(
        (name for name, markers in _TOOL_MARKERS if all(marker in source for marker in markers)), "plain"
    )
    if tool_format == "harmony":
        # Its channels are its reasoning.
        return OutputFormat(tool_format)
    for name, (opener, closer) in REASONING_MARKERS.items():
        opened = generation_prompt.rfind(opener)
        if closer in source or opened >= 0:
            return OutputFormat(tool_format, name, opened > generation_prompt.rfind(closer))
    return OutputFormat(tool_format)
