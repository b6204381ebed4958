"""Converts arguments generated as bare text between tags to JSON, typed by the tool's schema.

A value that is JSON of a type the schema allows is copied exactly as generated; any other value becomes a
string. Without a schema, numbers, booleans, null, objects and arrays are copied. Formats that write the type
of a value next to it need no schema. If the tags are malformed, the arguments are the generated text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from branchline.chat.parsing.base import Tools
from branchline.chat.parsing.json_scan import load_json
from branchline.chat.parsing.literals import PYTHON_LITERALS
from branchline.core.message import ToolCall

_NAME = re.compile(r'[^\s<>{}"]+')
ANY_TYPE: frozenset[str] = frozenset()


def parse_tool_name(text: str) -> str | None:
    """Returns the tool name in a text, or None if the text is prose or markup."""
    name = text.strip()
    return name if _NAME.fullmatch(name) else None


def build_call(name: str, text: str, pair: re.Pattern[str], tools: Tools) -> ToolCall:
    """Returns a call with the arguments in a text, in their order, typed by the tool of that name.

    `pair` has the groups `key` and `value`. Two more are optional: `is_string`, whose value "true" or
    "string" says that the value is a string and any other value that it is not, and `verbatim`, a value that
    is always a string. If the text contains more than pairs, or an argument twice, the text itself is the
    arguments.
    """
    pairs = _parse_pairs(text, pair)
    if pairs is None:
        return ToolCall(name, text.strip())
    types = parameter_types(name, tools)
    members = (
        f"{string_to_json(key)}: {value_to_json(value, _pair_types(match, types.get(key, ANY_TYPE)))}"
        for key, (value, match) in pairs.items()
    )
    return ToolCall(name, "{" + ", ".join(members) + "}")


def _pair_types(pair: Mapping[str, str | None], declared: frozenset[str]) -> frozenset[str]:
    """Returns the types that a value may have: those written next to it, or those the schema declares."""
    if pair.get("verbatim") is not None:
        return frozenset({"string"})
    is_string = pair.get("is_string")
    if is_string is None:
        return declared
    return frozenset({"string"}) if is_string in ("true", "string") else declared - {"string"}


def parameter_types(name: str, tools: Tools) -> dict[str, frozenset[str]]:
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


def _parse_pairs(text: str, pair: re.Pattern[str]) -> dict[str, tuple[str, Mapping[str, str | None]]] | None:
    """Returns the keys of consecutive pairs with their values and groups, or None if other text stands around
    them."""
    found: dict[str, tuple[str, Mapping[str, str | None]]] = {}
    at = 0
    while (match := pair.match(text, at)) and match["key"] not in found:
        groups = match.groupdict()
        verbatim = groups.get("verbatim")
        found[match["key"]] = (match["value"] if verbatim is None else verbatim, groups)
        at = match.end()
    return None if text[at:].strip() else found


def _schema_types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return ANY_TYPE
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
        return ANY_TYPE
    known = [_schema_types(branch) for branch in branches]
    # One branch without a type allows any type.
    return frozenset().union(*known) if all(known) else ANY_TYPE


def value_to_json(text: str, types: frozenset[str]) -> str:
    if types == {"string"}:
        return string_to_json(text)
    try:
        kind = _json_type(load_json(text))
    except ValueError:
        return _python_value_to_json(text, types) or string_to_json(text)
    if types:
        fits = kind in types or (kind == "integer" and "number" in types)
        is_string = not fits and "string" in types
    else:
        is_string = kind == "string"
    return string_to_json(text) if is_string else text.strip()


def _python_value_to_json(text: str, types: frozenset[str]) -> str:
    """Returns a value that Python prints and the schema allows, or an empty text.

    Some templates print booleans, null, objects and arrays as Python does, and models learn it from them.
    """
    try:
        value, end = PYTHON_LITERALS.read(text)
        is_whole = end == len(text.rstrip())
        return value if is_whole and _json_type(load_json(value)) in types - {"string"} else ""
    except ValueError:
        return ""


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


def string_to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
