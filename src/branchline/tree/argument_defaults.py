"""Recognises tool calls whose echo differs from the sampled call only by defaults of the tool's schema.

A client that parses arguments through a schema fills in its defaults, and some clients send the result back
as history. Only a call that echoes its id is considered, and it must equal the sampled call after the
defaults are filled in on both sides; any other difference remains an edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from branchline.core.call import AppliedEquivalence, Equivalence
from branchline.core.message import Message, ToolCall, canonical_json

Tools = Sequence[Mapping[str, Any]]


def restore_sampled_arguments(
    messages: Sequence[Message], start: int, tools: Tools, sampled: Mapping[str, ToolCall]
) -> tuple[tuple[Message, ...], tuple[AppliedEquivalence, ...]]:
    """Returns the messages with sampled arguments from `start` on, where only defaults differ.

    `sampled` holds the sampled tool calls by their wire ids.
    """
    restored = list(messages)
    applied: list[AppliedEquivalence] = []
    for index in range(start, len(restored)):
        message = restored[index]
        calls = tuple([_restore_call(call, tools, sampled.get(call.id)) for call in message.tool_calls])
        if calls != message.tool_calls:
            restored[index] = structs.replace(message, tool_calls=calls)
            applied.append(AppliedEquivalence(index, Equivalence.DEFAULTS_FILLED))
    return tuple(restored), tuple(applied)


def _restore_call(call: ToolCall, tools: Tools, sampled: ToolCall | None) -> ToolCall:
    if (
        sampled is None
        or sampled.canonical_arguments == call.canonical_arguments
        or not differ_only_by_defaults(sampled, call, tools)
    ):
        return call
    return structs.replace(call, arguments=sampled.arguments)


def differ_only_by_defaults(sampled: ToolCall, shown: ToolCall, tools: Tools) -> bool:
    """Whether two calls are equal once the defaults of their tool's schema are filled in."""
    if sampled.name != shown.name or not (sampled.is_json and shown.is_json):
        return False
    schema = _find_schema(sampled.name, tools)
    if not schema:
        return False
    try:
        one, other = (
            fill_defaults(msgspec.json.decode(call.canonical_arguments), schema) for call in (sampled, shown)
        )
        return canonical_json(one) == canonical_json(other)
    except (RecursionError, TypeError, ValueError):
        return False


def fill_defaults(value: Any, schema: Any) -> Any:
    """Returns a value with the defaults of its schema filled in.

    >>> fill_defaults({"old": "a"}, {"properties": {"old": {}, "all": {"default": False}}})
    {'old': 'a', 'all': False}
    """
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [fill_defaults(item, schema.get("items")) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    filled = {name: fill_defaults(item, properties.get(name)) for name, item in value.items()}
    for name, property_schema in properties.items():
        if name not in filled and isinstance(property_schema, Mapping) and "default" in property_schema:
            filled[name] = property_schema["default"]
    return filled


def _find_schema(name: str, tools: Tools) -> Any:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None
