"""Detects the output format of a model from its chat template.

Detection reads the markers in the template's source, because the template decides what later prompts show:
reasoning that the template does not show must not be parsed out, or every call would fork.
"""

from __future__ import annotations

from collections.abc import Collection

from branchline.chat.parsing.output_parser import REASONING_MARKERS, OutputFormat

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
