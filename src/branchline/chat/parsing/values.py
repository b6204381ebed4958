"""Arguments that were sampled as bare text between tags, made into JSON by the tool's own schema.

A value that is JSON of a type the schema allows stands in the result exactly as it was sampled; all else
is a string. Without a schema, numbers, booleans, null, objects and arrays are themselves. Where the tags are
not as they should be, nothing is made of them: the arguments are what was sampled in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from branchline.chat.parsing.jsontext import load_json
from branchline.core.message import ToolCall

Tools = Sequence[Mapping[str, Any]]
Parameters = Mapping[str, frozenset[str]]
"""The JSON types each parameter may have; one that says nothing about them is left out."""

_NAME = re.compile(r'[^\s<>{}"]+')
_ANY: frozenset[str] = frozenset()


def read_name(text: str) -> str | None:
    """A tool's name among whitespace; None for prose or markup."""
    name = text.strip()
    return name if _NAME.fullmatch(name) else None


class Schemas:
    """The parameter types of the tools a request brought; it takes whatever a client sends."""

    def __init__(self, tools: Tools = ()) -> None:
        self._given = tools

    @cached_property
    def _tools(self) -> dict[str, Parameters]:
        """Read when a call needs them; most formats never do."""
        found: dict[str, Parameters] = {}
        for tool in self._given:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                # Chat Completions says `parameters`, Anthropic Messages `input_schema`.
                schema = function.get("parameters") or function.get("input_schema")
                found[function["name"]] = _parameters(schema)
        return found

    def call(self, name: str, text: str, pair: re.Pattern[str]) -> ToolCall:
        """The call of a tool with the arguments that are written in a text, in their order.

        A text that is more than pairs, or gives an argument twice, is the arguments as it stands.
        """
        pairs = _read_pairs(text, pair)
        if pairs is None:
            return ToolCall(name, text.strip())
        parameters = self._tools.get(name, {})
        members = (
            f"{_write_string(key)}: {_write_value(value, parameters.get(key, _ANY))}"
            for key, value in pairs.items()
        )
        return ToolCall(name, "{" + ", ".join(members) + "}")


def _read_pairs(text: str, pair: re.Pattern[str]) -> dict[str, str] | None:
    """The keys and values of pairs that follow one another, nothing but whitespace around them."""
    found: dict[str, str] = {}
    at = 0
    while (match := pair.match(text, at)) and match[1] not in found:
        found[match[1]] = match[2]
        at = match.end()
    return None if text[at:].strip() else found


def _parameters(schema: object) -> Parameters:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    found = {str(key): _types(value) for key, value in properties.items()}
    return {key: types for key, types in found.items() if types}


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return _ANY
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(branches, list):
        return _ANY
    known = [_types(branch) for branch in branches]
    # One branch that says nothing allows anything.
    return frozenset().union(*known) if all(known) else _ANY


def _write_value(text: str, types: frozenset[str]) -> str:
    if types == {"string"}:
        return _write_string(text)
    if "boolean" in types and text.strip() in ("True", "False"):
        # Some templates show booleans as Python does, and models learn it from them.
        return text.strip().lower()
    try:
        kind = _type_of(load_json(text))
    except ValueError:
        return _write_string(text)
    if types:
        fits = kind in types or (kind == "integer" and "number" in types)
        is_string = not fits and "string" in types
    else:
        is_string = kind == "string"
    return _write_string(text) if is_string else text.strip()


def _type_of(value: object) -> str:
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


def _write_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
