"""Tool calls that come back with what their tool's schema says anyway: defaults written out, or left out.

A client that reads arguments through a schema gets its defaults filled in, and some send that back as
history. It means what was sampled. Only a call that echoes its id is looked at, and it must be equal to the
sampled one once the defaults are filled in on both sides; everything else stays an edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from branchline.core.arguments import canonical_json
from branchline.core.call import AppliedEquivalence
from branchline.core.echo import Equivalence
from branchline.core.message import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]


class SampledToolCalls:
    """The tool calls that were sampled, by the ids they have on the wire."""

    def __init__(self) -> None:
        self._by_id: dict[str, ToolCall] = {}

    def add(self, message: Message) -> None:
        for call in message.tool_calls:
            if call.id:
                self._by_id[call.id] = call

    def find(self, call_id: str) -> ToolCall | None:
        return self._by_id.get(call_id)

    def restore_sampled_arguments(
        self, messages: Sequence[Message], start: int, tools: Tools
    ) -> tuple[tuple[Message, ...], tuple[AppliedEquivalence, ...]]:
        """The messages, from `start` on with arguments as they were sampled where they mean the same."""
        restored = list(messages)
        echoes: list[AppliedEquivalence] = []
        for index in range(start, len(restored)):
            message = restored[index]
            calls = tuple([self._restore_call(call, tools) for call in message.tool_calls])
            if calls != message.tool_calls:
                restored[index] = structs.replace(message, tool_calls=calls)
                echoes.append(AppliedEquivalence(index, Equivalence.DEFAULTS_FILLED))
        return tuple(restored), tuple(echoes)

    def _restore_call(self, call: ToolCall, tools: Tools) -> ToolCall:
        sampled = self._by_id.get(call.id)
        if (
            sampled is None
            or sampled.canonical_arguments == call.canonical_arguments
            or not differ_only_by_defaults(sampled, call, tools)
        ):
            return call
        return structs.replace(call, arguments=sampled.arguments)


def differ_only_by_defaults(sampled: ToolCall, shown: ToolCall, tools: Tools) -> bool:
    """Whether two calls differ in nothing but defaults of their tool."""
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
    """A value with the defaults of its schema.

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
    for name, of in properties.items():
        if name not in filled and isinstance(of, Mapping) and "default" in of:
            filled[name] = of["default"]
    return filled


def _find_schema(name: str, tools: Tools) -> Any:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None
