"""Converts arguments generated as bare text between tags to JSON, typed by the tool's schema.

A value that is JSON of a type the schema allows is copied exactly as generated; any other value becomes a
string. Without a schema, numbers, booleans, null, objects and arrays are copied. `True`, `False` and `None`
are read as the JSON values where the schema allows these. If the tags are malformed,
the arguments are the generated text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.json_scan import load_json
from branchline.core.message import ToolCall

_NAME = re.compile(r'[^\s<>{}"]+')
_ANY_TYPE: frozenset[str] = frozenset()
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def parse_tool_name(text: str) -> str | None:
    """Returns the tool name in a text, or None if the text is prose or markup."""
    name = text.strip()
    return name if _NAME.fullmatch(name) else None


def build_call(name: str, text: str, pair: re.Pattern[str], tools: Tools) -> ToolCall:
    """Returns a call with the arguments in a text, in their order, typed by the tool of that name.

    If the text contains more than pairs, or an argument twice, the text itself is the arguments.
    """
    pairs = _parse_pairs(text, pair)
    if pairs is None:
        return ToolCall(name, text.strip())
    types = _parameter_types(name, tools)
    members = (
        f"{_string_to_json(key)}: {_value_to_json(value, types.get(key, _ANY_TYPE))}"
        for key, value in pairs.items()
    )
    return ToolCall(name, "{" + ", ".join(members) + "}")


def _parameter_types(name: str, tools: Tools) -> dict[str, frozenset[str]]:
    """Returns the JSON types that each parameter of a tool may have; parameters without a type are left out.

    Accepts any JSON that a client sends as tools. The last tool of a name counts.
    """
    types: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        # Chat Completions use `parameters`, Anthropic Messages `input_schema`.
        schema = function.get("parameters") or function.get("input_schema")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found = properties.items() if isinstance(properties, Mapping) else ()
        types = {str(key): _schema_types(value) for key, value in found if _schema_types(value)}
    return types


def _parse_pairs(text: str, pair: re.Pattern[str]) -> dict[str, str] | None:
    """Returns the keys and values of consecutive pairs, or None if other text stands around them."""
    found: dict[str, str] = {}
    at = 0
    while (match := pair.match(text, at)) and match[1] not in found:
        found[match[1]] = match[2]
        at = match.end()
    return None if text[at:].strip() else found


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
    literal = _PYTHON_LITERALS.get(text.strip())
    if literal is not None and (not types or _json_type(load_json(literal)) in types):
        # Some templates print these values as Python does, and models learn it from them.
        return literal
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
