"""Tools with the optional fields that a template takes for granted.

OpenAI accepts a tool that has only a name; some templates fail on it. Such a template gets the fields with
their empty values: no description is "", no parameters is an object without properties. A template that
accepts a tool as written gets it as written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from branchline.chat.base import Tools
from branchline.core.call import CachedJsonDict


def completed_tools(tools: Tools) -> Iterator[list[CachedJsonDict]]:
    """Yields the tools with more and more optional fields: of functions, then of their parameters."""
    for fills_parameters in (False, True):
        yield [CachedJsonDict(_complete_tool(tool, fills_parameters)) for tool in tools]


def _complete_tool(tool: Mapping[str, Any], fills_parameters: bool) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    completed = {name: value for name, value in function.items() if value is not None}
    completed.setdefault("description", "")
    parameters = completed.get("parameters") or {}
    if isinstance(parameters, Mapping):
        completed["parameters"] = _complete_object(parameters, fills_parameters)
    return {"type": "function", **tool, "function": completed}


def _complete_object(schema: Mapping[str, Any], fills_parameters: bool) -> dict[str, Any]:
    completed = {"type": "object", "properties": {}, **schema}
    properties = completed["properties"]
    if fills_parameters and isinstance(properties, Mapping):
        completed["properties"] = {name: _complete_property(value) for name, value in properties.items()}
    return completed


def _complete_property(schema: Any) -> Any:
    """A property with a description and one type; `true` is a schema too."""
    fields = dict(schema) if isinstance(schema, Mapping) else {}
    completed = {"description": "", **fields, "type": _type_name(fields)}
    # True is what JSON Schema assumes.
    return {"additionalProperties": True, **completed} if completed["type"] == "object" else completed


def _type_name(schema: Mapping[str, Any]) -> str:
    """The type of a schema, or the first that it allows besides null.

    >>> _type_name({"anyOf": [{"type": "null"}, {"type": "integer"}]}), _type_name({"enum": ["a", "b"]})
    ('integer', 'string')
    """
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str) and kind != "null":
            return kind
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(keyword) or ():
            if isinstance(option, Mapping) and option.get("type") != "null":
                return _type_name(option)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) for value in values):
        return "string"
    return "object"
