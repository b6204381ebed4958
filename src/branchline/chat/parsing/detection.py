"""Detects the output format of a model from its chat template.

The template decides what later prompts show, so its markers decide: those in its source, in its generation
prompt, and in a call that it renders. A format is accepted only if its parser reads this call back. If the
template shows a call that no parser reads, outputs are plain text and `unread_call` is set.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.output_parser import CHANNEL_FORMATS, REASONING_MARKERS, OutputFormat
from branchline.core.message import ToolCall

_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>",)),
    ("muse_glimmer", ("<atem:invoke",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>", "call tool=")),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls")),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("hunyuan", ("<tool_calls:opensource>",)),
    ("seed", ("<seed:tool_call>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("cohere", ("<|START_RESPONSE|>",)),
    ("command_r", ("Action:", "```json")),
    ("apertus", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("solar", ("<|tool_call:begin|>",)),
    ("gigachat", ("<|function_call|>",)),
    ("gigachat3", ("function call", "<|role_sep|>")),
    ("nemotron_v2", ("<TOOLCALL>",)),
    ("minicpm5", ("<function name=", "<param name=")),
    ("glm", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("tool_calls", ("<tool_calls>",)),
    ("granite", ("<|tool_call|>",)),
    ("functionary", ("<function=",)),
    ("functionary_v32", (">>>all",)),
    ("functools", ("functools[",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4", ("<|header_start|>", "tool_calls")),
    ("llama4", ("<|python_start|>",)),
    ("llama3", ("<|start_header_id|>", "tool_calls")),
    ("llama3", ("<|python_tag|>",)),
)
"""A format is possible if the source contains all of its markers; the more specific formats come first."""
_REASONING_SIGNS = {name: closer for name, (_, closer) in REASONING_MARKERS.items()} | {"solar": "<|think|>"}
"""The marker that shows a reasoning format: the closer, unless other formats write it too."""


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """A reply with one call, as a template shows it."""

    text: str
    call: ToolCall
    tools: Tools

    def is_read_by(self, tool_format: str) -> bool:
        """Whether the parser of a format reads the call back."""
        parser = OutputFormat(tool_format).create_parser(self.tools)
        deltas = [*parser.feed(self.text), *parser.finish(False)]
        calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
        return [(call.name, call.canonical_arguments) for call in calls] == [
            (self.call.name, self.call.canonical_arguments)
        ]


@dataclass(frozen=True, slots=True)
class DetectedFormat:
    """The format of a template's outputs."""

    output_format: OutputFormat
    unread_call: str = ""
    """A call as the template shows it, if no parser reads it."""


def detect_output_format(
    template_source: str,
    generation_prompt: str = "",
    added_tokens: Collection[str] = (),
    rendered_call: RenderedCall | None = None,
    rendered_reasoning: str = "",
) -> DetectedFormat:
    """Detects the format from a template's source and what it renders, or from the added tokens if there is
    no template.

    >>> source = "… <think> … </think> … {{ '<tool_call>' }} …"
    >>> detect_output_format(source, "<|im_start|>assistant\\n<think>\\n").output_format
    OutputFormat(tool_format='hermes', reasoning_format='think', starts_in_reasoning=True)
    """
    shown = rendered_call.text if rendered_call is not None else ""
    source = (template_source or "\n".join(added_tokens)) + shown
    possible = [name for name, markers in _TOOL_MARKERS if all(marker in source for marker in markers)]
    readable = [name for name in possible if rendered_call is None or rendered_call.is_read_by(name)]
    tool_format = readable[0] if readable else "plain"
    unread_call = "" if readable else shown
    if tool_format in CHANNEL_FORMATS:
        return DetectedFormat(OutputFormat(tool_format))
    for name, (opener, closer) in REASONING_MARKERS.items():
        opened = generation_prompt.rfind(opener)
        if opened >= 0 or _REASONING_SIGNS[name] in source + rendered_reasoning:
            starts_inside = opened > generation_prompt.rfind(closer)
            return DetectedFormat(OutputFormat(tool_format, name, starts_inside), unread_call)
    return DetectedFormat(OutputFormat(tool_format), unread_call)


def closes_reasoning(text: str, reasoning_format: str) -> bool:
    """Whether a text has an empty block of reasoning. A template that writes it before replies has a format
    with reasoning, even if history never shows any."""
    opener, closer = REASONING_MARKERS.get(reasoning_format, ("", ""))
    _, found, rest = text.partition(opener) if opener else ("", "", "")
    return bool(found) and rest.lstrip().startswith(closer)
