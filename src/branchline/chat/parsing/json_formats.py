"""Formats whose calls are JSON between markers: one call per block, or a list of calls.

Arguments are kept exactly as they were generated.
"""

from __future__ import annotations

import re

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.framed import BodyParser, CallFormat
from branchline.chat.parsing.json_scan import (
    is_json_object,
    parse_call,
    parse_lenient,
    split_array,
    split_object,
    split_sequence,
)
from branchline.chat.parsing.xml_arguments import parse_tool_name
from branchline.core.message import ToolCall

_FENCE = "```"
_NAMED_OBJECT = re.compile(r'\s*\[\s*\{\s*"([^\s<>{}"\\,]+)"\s*:')
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_CALL_NUMBER = re.compile(r":\d+$")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"


# -- what stands between the markers -----------------------------------------------------------------------


def _parse_object(body: str, _: Tools) -> list[ToolCall]:
    """Parses `{"name": "f", "arguments": {…}}`."""
    call = parse_call(body, "arguments") or parse_lenient(body)
    return [call] if call is not None else []


def parse_objects(name_key: str, argument_key: str, id_key: str = "") -> BodyParser:
    """Returns a parser of an array of objects, or of several objects one after the other.

    Calls that cannot be separated are one call: the first name, with all that follows as arguments.
    """

    def parse(body: str, _: Tools) -> list[ToolCall]:
        items = split_array(body)
        if items is None:
            items = split_sequence(body)
        if items is None:
            call = parse_lenient(
                body.strip().removeprefix("[").removesuffix("]"), name_key, argument_key, id_key
            )
            return [call] if call is not None else []
        calls = [
            parse_call(item, argument_key, name_key=name_key, id_key=id_key)
            or parse_lenient(item, name_key, argument_key, id_key)
            for item in items
        ]
        return [call for call in calls if call] if all(calls) else []

    return parse


def _parse_named_objects(body: str, _: Tools) -> list[ToolCall]:
    """Parses `[{"f": {…}}, {"g": {…}}]`."""
    items = split_array(body)
    if items is None:
        # Calls that cannot be separated are one call.
        opening = _NAMED_OBJECT.match(body)
        if opening is None:
            return []
        arguments = body[opening.end() :].strip().removesuffix("]").rstrip().removesuffix("}").rstrip()
        is_kept = arguments and not is_json_object(arguments)
        return [ToolCall(opening[1], arguments if is_kept else body[opening.end() :].strip())]
    calls: list[ToolCall] = []
    for item in items:
        members = [(parse_tool_name(key), text) for key, text in (split_object(item) or {}).items()]
        if len(members) != 1 or members[0][0] is None:
            return []
        calls.append(ToolCall(members[0][0], members[0][1]))
    return calls


def _parse_kimi(body: str, _: Tools) -> list[ToolCall]:
    """Parses `functions.f:0<|tool_call_argument_begin|>{…}`."""
    head, marker, rest = body.partition(_KIMI_ARGUMENTS)
    # The template prints ids as they are, so the generated `functions.f:0` is the id of the call.
    call_id = head.strip()
    name = parse_tool_name(_KIMI_CALL_NUMBER.sub("", call_id).removeprefix("functions."))
    return [ToolCall(name, rest.strip(), id=call_id)] if name and marker else []


def _parse_deepseek(body: str, _: Tools) -> list[ToolCall]:
    """Parses `f<｜tool▁sep｜>{…}`, and the fenced arguments of V3 and R1."""
    head, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
    rest = rest.strip()
    if head.strip() == "function" and not rest.startswith("{"):
        # V3 and R1: `function`, the separator, the name, a newline and fenced arguments.
        head, *lines = rest.split("\n", 1)
        rest = "".join(lines).strip()
        if rest.startswith(_FENCE) and rest.endswith(_FENCE):
            rest = rest.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
    name = parse_tool_name(head)
    return [ToolCall(name, rest)] if name and separator else []


def _parse_solar(body: str, _: Tools) -> list[ToolCall]:
    """Parses `id<|tool_call:name|>f<|tool_call:args|>{…}`."""
    head, marker, arguments = body.partition(_SOLAR_ARGUMENTS)
    call_id, name_marker, text = head.partition(_SOLAR_NAME)
    name = parse_tool_name(text)
    if not (name and name_marker and marker):
        return []
    return [ToolCall(name, arguments.strip(), id=call_id.strip())]


def _parse_functionary(body: str, _: Tools) -> list[ToolCall]:
    """Parses `f>{…}`."""
    head, marker, arguments = body.partition(">")
    name = parse_tool_name(head)
    return [ToolCall(name, arguments.strip())] if name and marker and arguments.strip() else []


# -- formats -----------------------------------------------------------------------------------------------

JSON_FORMATS: dict[str, CallFormat] = {
    # Hermes, Qwen2.5, Qwen3, Granite 4: <tool_call>\n{…}\n</tool_call>
    "hermes": CallFormat(("<tool_call>", "</tool_call>"), _parse_object, is_json=True),
    "deepseek": CallFormat(
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        _parse_deepseek,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        is_json=True,
    ),
    "kimi": CallFormat(
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        _parse_kimi,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        is_json=True,
    ),
    # Command R7B, Command A: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]
    "cohere": CallFormat(
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        parse_objects("tool_name", "parameters", "tool_call_id"),
        is_json=True,
        text_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    # The closer is also a stop token.
    "apertus": CallFormat(
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        _parse_named_objects,
        is_json=True,
        closer_is_optional=True,
    ),
    # MiniMax-M1 writes an object per line, Apriel, Jamba and Hunyuan-A13B a list.
    "tool_calls": CallFormat(
        ("<tool_calls>", "</tool_calls>"), parse_objects("name", "arguments"), is_json_sequence=True
    ),
    "nemotron_v2": CallFormat(
        ("<TOOLCALL>", "</TOOLCALL>"), parse_objects("name", "arguments"), is_json=True
    ),
    # Granite 3 writes no closer, Phi-4-mini does.
    "granite": CallFormat(
        ("<|tool_call|>", "<|/tool_call|>"),
        parse_objects("name", "arguments"),
        is_json=True,
        closer_is_optional=True,
    ),
    "gigachat": CallFormat(
        ("<|function_call|>", "<|message_sep|>"), _parse_object, is_json=True, closer_is_optional=True
    ),
    # GigaChat 3 opens a message of its own for a call; 3.1 writes a token.
    "gigachat3": CallFormat(
        ("function call<|role_sep|>", "<|message_sep|>"),
        _parse_object,
        is_json=True,
        closer_is_optional=True,
        text_markers=("<|message_sep|>",),
    ),
    "solar": CallFormat(
        ("<|tool_call:begin|>", "<|tool_call:end|>"),
        _parse_solar,
        is_json=True,
        text_markers=("<|begin|>assistant", "<|tool_calls|>", "<|calls|>", "<|content|>", "<|end|>"),
    ),
    # Functionary 3.1: <function=f>{…}</function>
    "functionary": CallFormat(("<function=", "</function>"), _parse_functionary, is_json=True),
}
