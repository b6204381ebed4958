"""Writers of outputs in each format, and helpers to parse them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from branchline.chat.parsing.output_parser import OutputFormat, OutputParser, ParsedOutput
from branchline.core.message import ToolCall

Writer = Callable[[str, Sequence[ToolCall]], str]


def hermes(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in calls
    ]
    return "\n".join([text, *blocks] if text else blocks)


def qwen3_coder(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        pairs = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in bare_arguments(call)]
        blocks.append(f"<tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</tool_call>")
    return "\n".join([text, *blocks] if text else blocks)


def glm(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in bare_arguments(call)]
        blocks.append(f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>")
    return "\n".join([text, *blocks] if text else blocks)


def minimax(text: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return text
    blocks = []
    for call in calls:
        pairs = [f'<parameter name="{k}">{v}</parameter>\n' for k, v in bare_arguments(call)]
        blocks.append(f'<invoke name="{call.name}">\n{"".join(pairs)}</invoke>\n')
    return f"{text}\n<minimax:tool_call>\n{''.join(blocks)}</minimax:tool_call>"


def kimi(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<|tool_call_begin|>{call.id}<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
        for call in calls
    ]
    section = f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"
    return text + (section if calls else "")


def deepseek(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    joined = "\n".join(blocks)
    return text + (f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v31(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>" for call in calls
    ]
    return text + (f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>" if calls else "")


def mistral(text: str, calls: Sequence[ToolCall]) -> str:
    items = [
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}, "id": "{call.id}"}}'
        for call in calls
    ]
    return text + (f"[TOOL_CALLS][{', '.join(items)}]" if calls else "")


def mistral_v11(text: str, calls: Sequence[ToolCall]) -> str:
    ids = ["[CALL_ID]" + call.id if call.id else "" for call in calls]
    blocks = [
        f"[TOOL_CALLS]{call.name}{sampled}[ARGS]{call.arguments}"
        for call, sampled in zip(calls, ids, strict=True)
    ]
    return text + "".join(blocks)


def llama3(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [f'{{"name": {json.dumps(call.name)}, "parameters": {call.arguments}}}' for call in calls]
    return "; ".join(blocks) if calls else text


def harmony(text: str, calls: Sequence[ToolCall]) -> str:
    messages = [f"<|channel|>commentary<|message|>{text}<|end|>"] if text else []
    for call in calls:
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        messages.append(f"{header}<|message|>{call.arguments}<|call|>")
    return "<|start|>assistant".join(messages)


def plain(text: str, calls: Sequence[ToolCall]) -> str:
    return text


def bare_arguments(call: ToolCall) -> list[tuple[str, str]]:
    """Returns arguments as the tagged formats write them: strings unquoted, other values as JSON."""
    values: dict[str, Any] = json.loads(call.arguments)
    return [(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for k, v in values.items()]


WRITERS: list[tuple[str, Writer]] = [
    ("plain", plain),
    ("hermes", hermes),
    ("qwen3_coder", qwen3_coder),
    ("harmony", harmony),
    ("llama3", llama3),
    ("mistral", mistral),
    ("mistral", mistral_v11),
    ("deepseek", deepseek),
    ("deepseek", deepseek_v31),
    ("glm", glm),
    ("kimi", kimi),
    ("minimax", minimax),
]
WRITER_IDS: dict[str, Any] = {"ids": [writer.__name__ for _, writer in WRITERS]}
FORMATS = list(dict.fromkeys(name for name, _ in WRITERS))
"""Every format once."""
WITH_CALLS = [pair for pair in WRITERS if pair[0] != "plain"]
TAGGED = {"qwen3_coder", "glm", "minimax"}
"""Formats that write values as bare text."""
NAMED_IDS = {"kimi", "mistral"}
"""Formats in which the model generates the ids of its calls."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "number"},
                    "b": {"type": "boolean"},
                    "maybe": {"type": ["string", "null"]},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "choice": {"enum": ["1", "2"]},
                },
            },
        },
    }
]


def call(name: str, arguments: str = "{}", number: int = 0, *, format: str = "") -> ToolCall:
    """Returns a call as the format parses it: with an id only if models generate one."""
    sampled = {"kimi": f"functions.{name}:{number}", "mistral": f"call{number:05}"}.get(format, "")
    return ToolCall(name, arguments, id=sampled)


def byte_parser(output_format: OutputFormat, stop_ids: Sequence[int] = ()) -> OutputParser:
    """Returns a parser for which a byte is a token; ids from 256 on are stop ids."""
    parser = output_format.create_parser(TOOLS)
    return OutputParser(parser, lambda t: bytes([t]) if t < 256 else b"<stop %d>" % t, stop_ids)


def parse_text(
    name: str,
    output: str,
    finish: str = "stop",
    *,
    reasoning: str = "none",
    starts_in_reasoning: bool = False,
) -> ParsedOutput:
    return byte_parser(OutputFormat(name, reasoning, starts_in_reasoning)).parse(output.encode(), finish)
