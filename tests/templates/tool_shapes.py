"""Tools that OpenAI accepts, in shapes that templates may not expect."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "string", "description": "Where."}},
    "required": ["at"],
}
FUNCTION: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": SCHEMA}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


COMPLETE = _tool(**FUNCTION)
TOOL_SHAPES: dict[str, dict[str, Any]] = {
    "without parameters": _tool(name="look", description="Looks."),
    "null parameters": _tool(name="look", description="Looks.", parameters=None),
    "empty parameters": _tool(name="look", description="Looks.", parameters={}),
    "without properties": _tool(name="look", description="Looks.", parameters={"type": "object"}),
    "without a description": _tool(name="look", parameters=SCHEMA),
    "null description": _tool(name="look", description=None, parameters=SCHEMA),
    "name only": _tool(name="look"),
    "without descriptions of parameters": _tool(
        **{**FUNCTION, "parameters": {**SCHEMA, "properties": {"at": {"type": "string"}}}}
    ),
    "strict": _tool(**FUNCTION, strict=True),
    "null strict": _tool(**FUNCTION, strict=None),
    "extra keys": {**_tool(**FUNCTION, returns={"type": "string"}), "cache_control": {"type": "ephemeral"}},
    "additionalProperties": _tool(**{**FUNCTION, "parameters": {**SCHEMA, "additionalProperties": False}}),
    "schemas without types": _tool(
        **{
            **FUNCTION,
            "parameters": {
                **SCHEMA,
                "properties": {
                    "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "where": {"$ref": "#/$defs/Place"},
                    "any": {},
                    "flag": True,
                    "kind": {"enum": ["a", 1, None]},
                    "maybe": {"type": ["string", "null"]},
                    "list": {"type": "array"},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        }
    ),
}
