"""Converts arguments generated as bare text between tags to JSON, typed by the tool's schema.

A value that is JSON of a type the schema allows is copied exactly as generated; any other value becomes a
string. Without a schema, numbers, booleans, null, objects and arrays are copied. If the tags are malformed,
the arguments are the generated text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from branchline.chat.parsing.json_scan import load_json
from branchline.core.message import ToolCall

Tools = Sequence[Mapping[str, Any]]
ParameterTypes = Mapping[str, frozenset[str]]
"""The JSON types each parameter may have; parameters without a type are left out."""

_NAME = re.compile(r'[^\s<>{}"]+')
_ANY_TYPE: frozenset[str] = frozenset()


def parse_tool_name(text: str) -> str | None:
    """Returns the tool name in a text, or None if the text is prose or markup."""
    name = text.strip()
    return name if _NAME.fullmatch(name) else None


class ParameterSchemas:
    """The parameter types of a request's tools. Accepts any JSON that a client sends as tools."""

    def __init__(self, tools: Tools = ()) -> None:
        self._tool_definitions = tools

    @cached_property
    def _parameter_types(self) -> dict[str, ParameterTypes]:
        """Computed on first use; most formats need no types."""
        found: dict[str, ParameterTypes] = {}
        for tool in self._tool_definitions:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                # Chat Completions use `parameters`, Anthropic Messages `input_schema`.
                schema = function.get("parameters") or function.get("input_schema")
                found[function["name"]] = _schema_parameter_types(schema)
        return found

    def build_call(self, name: str, text: str, pair: re.Pattern[str]) -> ToolCall:
        """Returns a call with the arguments in a text, in their order.

        If the text contains more than pairs, or an argument twice, the text itself is the arguments.
        """
        pairs = _parse_pairs(text, pair)
        if pairs is None:
            return ToolCall(name, text.strip())
        parameters = self._parameter_types.get(name, {})
        members = (
            f"{_string_to_json(key)}: {_value_to_json(value, parameters.get(key, _ANY_TYPE))}"
            for key, value in pairs.items()
        )
        return ToolCall(name, "{" + ", ".join(members) + "}")


def _parse_pairs(text: str, pair: re.Pattern[str]) -> dict[str, str] | None:
    """Returns the keys and values of consecutive pairs, or None if other text stands around them."""
    found: dict[str, str] = {}
    at = 0
    while (match := pair.match(text, at)) and match[1] not in found:
        found[match[1]] = match[2]
        at = match.end()
    return None if text[at:].strip() else found


def _schema_parameter_types(schema: object) -> ParameterTypes:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    found = {str(key): _schema_types(value) for key, value in properties.items()}
    return {key: types for key, types in found.items() if types}


def _schema_types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return _ANY_TYPE
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset(_json_type(value) for value in values)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(branches, list):
        return _ANY_TYPE
    known = [_schema_types(branch) for branch in branches]
    # One branch without a type allows any type.
    return frozenset().union(*known) if all(known) else _ANY_TYPE


def _value_to_json(text: str, types: frozenset[str]) -> str:
    if types == {"string"}:
        return _string_to_json(text)
    if "boolean" in types and text.strip() in ("True", "False"):
        # Some templates print booleans as Python does, and models learn it from them.
        return text.strip().lower()
    try:
        kind = _json_type(load_json(text))
    except ValueError:
        return _string_to_json(text)
    if types:
        fits = kind in types or (kind == "integer" and "number" in types)
        is_string = not fits and "string" in types
    else:
        is_string = kind == "string"
    return _string_to_json(text) if is_string else text.strip()


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "object" if isinstance(value, Mapping) else "array"


def _string_to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
