"""Writers of outputs in each format, and helpers to parse them."""

from __future__ import annotations

import json
import re
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


def llama4(text: str, calls: Sequence[ToolCall]) -> str:
    return f"[{', '.join(map(_python_call, calls))}]" if calls else text


def llama4_json(text: str, calls: Sequence[ToolCall]) -> str:
    values = [(call.name, json.dumps(json.loads(call.arguments), ensure_ascii=False)) for call in calls]
    blocks = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in values]
    return f"<|python_start|><|python_end|>{''.join(blocks)}" if calls else text


def lfm2(text: str, calls: Sequence[ToolCall]) -> str:
    listed = ", ".join(map(_python_call, calls))
    return text + (f"<|tool_call_start|>[{listed}]<|tool_call_end|>" if calls else "")


def gemma4(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<|tool_call>call:{call.name}{gemma_value(json.loads(call.arguments))}<tool_call|>" for call in calls
    ]
    return text + "".join(blocks)


def cohere(text: str, calls: Sequence[ToolCall]) -> str:
    items = [
        f'{{"tool_call_id": "{call.id}", "tool_name": "{call.name}", "parameters": {call.arguments}}}'
        for call in calls
    ]
    listed = ",\n    ".join(items)
    actions = f"<|START_ACTION|>[\n    {listed}\n]<|END_ACTION|>" if calls else ""
    return (f"<|START_RESPONSE|>{text}<|END_RESPONSE|>" if text else "") + actions


def apertus(text: str, calls: Sequence[ToolCall]) -> str:
    items = [f'{{"{call.name}": {call.arguments}}}' for call in calls]
    return text + (f"<|tools_prefix|>[{', '.join(items)}]<|tools_suffix|>" if calls else "")


def apriel(text: str, calls: Sequence[ToolCall]) -> str:
    return text + (f"<tool_calls>[{', '.join(_json_calls(calls))}]</tool_calls>" if calls else "")


def minimax_m1(text: str, calls: Sequence[ToolCall]) -> str:
    listed = "\n".join(_json_calls(calls))
    return text + (f"<tool_calls>\n{listed}\n</tool_calls>" if calls else "")


def nemotron_v2(text: str, calls: Sequence[ToolCall]) -> str:
    return text + (f"<TOOLCALL>[{', '.join(_json_calls(calls))}]</TOOLCALL>" if calls else "")


def granite(text: str, calls: Sequence[ToolCall]) -> str:
    return text + (f"<|tool_call|>[{', '.join(_json_calls(calls))}]" if calls else "")


def phi4_mini(text: str, calls: Sequence[ToolCall]) -> str:
    return text + (f"<|tool_call|>[{', '.join(_json_calls(calls))}]<|/tool_call|>" if calls else "")


def gigachat(text: str, calls: Sequence[ToolCall]) -> str:
    return text + "<|message_sep|>".join(f"<|function_call|>{call}" for call in _json_calls(calls))


def solar(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<|tool_call:begin|>{call.id}<|tool_call:name|>{call.name}"
        f"<|tool_call:args|>{call.arguments}<|tool_call:end|>"
        for call in calls
    ]
    content = f"<|content|>{text}" if text else ""
    return content + (f"<|tool_calls|>{''.join(blocks)}" if calls else "")


def functionary(text: str, calls: Sequence[ToolCall]) -> str:
    return text + "".join(f"<function={call.name}>{call.arguments}</function>" for call in calls)


def seed(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        pairs = [f"<parameter={k}>{v}</parameter>\n" for k, v in bare_arguments(call)]
        blocks.append(
            f"<seed:tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</seed:tool_call>"
        )
    return "\n".join([text, *blocks] if text else blocks)


def hunyuan(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in bare_arguments(call)]
        blocks.append(f"<tool_call>{call.name}<tool_sep>\n{''.join(pairs)}</tool_call>\n")
    section = f"<tool_calls>\n{''.join(blocks)}</tool_calls>"
    tags = re.sub(r"<(/?(?:tool_calls?|tool_sep|arg_key|arg_value))>", r"<\1:opensource>", section)
    return text + (tags if calls else "")


def minimax_m3(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = [
        f'<invoke name="{call.name}">{_nested_tags(json.loads(call.arguments))}</invoke>\n' for call in calls
    ]
    section = f"<tool_call>\n{''.join(blocks)}</tool_call>"
    return text + (re.sub(r"(?=</?[^<>]+>)", "]<]minimax[>[", section) if calls else "")


def deepseek_v32(text: str, calls: Sequence[ToolCall]) -> str:
    return _dsml(text, calls, "function_calls")


def deepseek_v4(text: str, calls: Sequence[ToolCall]) -> str:
    return _dsml(text, calls, "tool_calls")


def kimi_k3(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for number, call in enumerate(calls):
        pairs = [
            f'<|open|>argument key="{k}" type="{_type_name(json.loads(call.arguments)[k])}"<|sep|>{v}'
            "<|close|>argument<|sep|>"
            for k, v in bare_arguments(call)
        ]
        opening = f'<|open|>call tool="{call.name}" index="{number + 1}"<|sep|>'
        blocks.append(f"{opening}{''.join(pairs)}<|close|>call<|sep|>")
    content = f"<|open|>response<|sep|>{text}<|close|>response<|sep|>" if text else ""
    return content + (f"<|open|>tools<|sep|>{''.join(blocks)}<|close|>tools<|sep|>" if calls else "")


def minicpm5(text: str, calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        pairs = [f'<param name="{k}">{v}</param>' for k, v in bare_arguments(call)]
        blocks.append(f'<function name="{call.name}">{"".join(pairs)}</function>')
    return "\n".join([text, *blocks] if text else blocks)


def gigachat3(text: str, calls: Sequence[ToolCall]) -> str:
    return text + "".join(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}" for call in _json_calls(calls)
    )


def functionary_v32(text: str, calls: Sequence[ToolCall]) -> str:
    parts = [f"all\n{text}"] if text or not calls else []
    return ">>>".join([*parts, *(f"{call.name}\n{call.arguments}" for call in calls)])


def command_r(text: str, calls: Sequence[ToolCall]) -> str:
    items = [f'    {{\n"tool_name": "{call.name}",\n"parameters": {call.arguments}\n}}' for call in calls]
    listed = ",\n".join(items)
    return text + (f"\nAction:\n```json\n[\n{listed}\n]```\n" if calls else "")


def functools(text: str, calls: Sequence[ToolCall]) -> str:
    return text + (f"functools[{', '.join(_json_calls(calls))}]" if calls else "")


def muse_glimmer(text: str, calls: Sequence[ToolCall]) -> str:
    messages = [f" to=user<|message|>{text}"] if text else []
    for call in calls:
        pairs = [f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in bare_arguments(call)]
        invoke = f'<atem:invoke name="{call.name}">\n{"".join(pairs)}</atem:invoke>'
        block = f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"
        messages.append(f" to={call.name}<|message|>{block}")
    return "<|eom|><|start|>assistant".join(messages)


def plain(text: str, calls: Sequence[ToolCall]) -> str:
    return text


def bare_arguments(call: ToolCall) -> list[tuple[str, str]]:
    """Returns arguments as the tagged formats write them: strings unquoted, other values as JSON."""
    values: dict[str, Any] = json.loads(call.arguments)
    return [(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for k, v in values.items()]


def _json_calls(calls: Sequence[ToolCall]) -> list[str]:
    return [f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in calls]


def _python_call(call: ToolCall) -> str:
    arguments = [f"{key}={value!r}" for key, value in json.loads(call.arguments).items()]
    return f"{call.name}({', '.join(arguments)})"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return json.dumps(value)


def _nested_tags(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"<{key}>{_nested_tags(member)}</{key}>" for key, member in value.items())
    if isinstance(value, list):
        return "".join(f"<item>{_nested_tags(item)}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _dsml(text: str, calls: Sequence[ToolCall], section: str) -> str:
    blocks = []
    for call in calls:
        pairs = []
        for k, v in bare_arguments(call):
            is_string = json.dumps(isinstance(json.loads(call.arguments)[k], str))
            pairs.append(f'<｜DSML｜parameter name="{k}" string="{is_string}">{v}</｜DSML｜parameter>\n')
        blocks.append(f'<｜DSML｜invoke name="{call.name}">\n{"".join(pairs)}</｜DSML｜invoke>\n')
    joined = "".join(blocks)
    return text + (f"\n\n<｜DSML｜{section}>\n{joined}</｜DSML｜{section}>" if calls else "")


def _type_name(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names: dict[type, str] = {str: "string", dict: "object", list: "array"}
    return names.get(type(value), "number")


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
    ("llama4", llama4),
    ("llama4", llama4_json),
    ("lfm2", lfm2),
    ("gemma4", gemma4),
    ("cohere", cohere),
    ("apertus", apertus),
    ("tool_calls", apriel),
    ("tool_calls", minimax_m1),
    ("nemotron_v2", nemotron_v2),
    ("granite", granite),
    ("granite", phi4_mini),
    ("gigachat", gigachat),
    ("solar", solar),
    ("functionary", functionary),
    ("seed", seed),
    ("hunyuan", hunyuan),
    ("minimax_m3", minimax_m3),
    ("deepseek_v32", deepseek_v32),
    ("deepseek_v4", deepseek_v4),
    ("kimi_k3", kimi_k3),
    ("minicpm5", minicpm5),
    ("gigachat3", gigachat3),
    ("functionary_v32", functionary_v32),
    ("command_r", command_r),
    ("functools", functools),
    ("muse_glimmer", muse_glimmer),
]
WRITER_IDS: dict[str, Any] = {"ids": [writer.__name__ for _, writer in WRITERS]}
FORMATS = list(dict.fromkeys(name for name, _ in WRITERS))
"""Every format once."""
WITH_CALLS = [pair for pair in WRITERS if pair[0] != "plain"]
BARE = {"qwen3_coder", "glm", "minimax", "seed", "hunyuan", "minimax_m3", "minicpm5", "muse_glimmer"}
"""Formats that write values as bare text, so that a string may look like another value."""
CONVERTED = {*BARE, "deepseek_v32", "deepseek_v4", "kimi_k3", "llama4", "lfm2", "gemma4"}
"""Formats whose arguments are not JSON and are converted to it."""
UNFRAMED = {"llama3", "llama4"}
"""Formats in which the complete output is the calls."""
FRAMED_TEXT = {"harmony", "cohere", "solar", "kimi_k3", "gigachat3", "functionary_v32", "muse_glimmer"}
"""Formats with markers around text."""

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
    sampled = {
        "kimi": f"functions.{name}:{number}",
        "mistral": f"call{number:05}",
        "cohere": str(number),
        "solar": f"call{number}",
    }.get(format, "")
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
