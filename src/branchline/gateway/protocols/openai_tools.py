"""Tools of OpenAI's protocols as Chat Completions writes functions, and what the client calls them.

A freeform tool takes any text. The model is offered it as a function with one argument, `input`, and a tool
of a namespace under both names; an `Alias` remembers what the client calls it. A function that is written as
Chat Completions has them is shown as it was written. Vendors' own tools are in `vendor_tools`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchline.core.errors import MessageError
from branchline.core.reader import replace_surrogates
from branchline.gateway.protocols.vendor_tools import OPENAI_TOOLS, VendorTool, warn_unsupported_tool
from branchline.runtime.sampling import JsonObject

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CLIENT_KINDS = ("function", "custom", "namespace")
_ALLOWED_TOOLS = "allowed_tools"
_DEFAULT_NAMESPACE = "functions"
"""The namespace of what has none."""


@dataclass(frozen=True)
class ToolAlias:
    """What the client calls a tool that the model is offered under another name or in another shape."""

    name: str
    namespace: str = ""
    is_freeform: bool = False
    vendor: VendorTool | None = None
    """One of a vendor's own, called with an item of its own."""


def model_tool_name(namespace: str, name: str) -> str:
    """The name a model knows a tool by.

    >>> model_tool_name("mcp__files", "read"), model_tool_name("functions", "look")
    ('mcp__files__read', 'look')
    """
    return name if namespace in ("", _DEFAULT_NAMESPACE) else f"{namespace.rstrip('_')}__{name}"


def read_openai_tools(
    raw: object, where: str = "tools", namespace: str = ""
) -> tuple[list[dict[str, Any]], dict[str, ToolAlias]]:
    """Tools as Chat Completions writes them, and what the client calls them where that differs."""
    if raw is None:
        return [], {}
    if not isinstance(raw, list):
        raise MessageError(where, raw, "a list of tools (objects) or null")
    tools: list[dict[str, Any]] = []
    aliases: dict[str, ToolAlias] = {}
    for index, tool in enumerate(raw):
        place = f"{where}[{index}]"
        if not isinstance(tool, dict):
            raise MessageError(place, tool, "a tool (an object)")
        kind = _kind(tool)
        if kind == "namespace":
            inner, known = read_openai_tools(tool.get("tools"), f"{place}.tools", _read_name(tool, place))
            tools += inner
            aliases |= known
        elif kind == "function" and isinstance(tool.get(kind), dict) and not namespace:
            _read_name(tool[kind], f"{place}.{kind}")
            tools.append(tool)
        elif kind in ("function", "custom"):
            # Chat Completions has what a tool is in a field of its own.
            body = tool[kind] if isinstance(tool.get(kind), dict) else tool
            name = _read_name(body, place)
            offered = model_tool_name(namespace, name)
            shape = _freeform_schema(body) if kind == "custom" else _function_schema(body, place)
            tools.append({"type": "function", "function": {**shape, "name": offered}})
            if kind == "custom" or offered != name:
                aliases[offered] = ToolAlias(name, namespace if offered != name else "", kind == "custom")
        elif is_client_tool(tool):
            tools.append(OPENAI_TOOLS[kind].to_function(kind))
            aliases[kind] = ToolAlias(kind, vendor=OPENAI_TOOLS[kind])
        else:
            warn_unsupported_tool(str(kind))
    return tools, aliases


def is_client_tool(tool: JsonObject) -> bool:
    """Whether a tool is one that this client would run, so that a model here may call it."""
    environment = tool.get("environment") or {"type": "local"}
    is_local = isinstance(environment, dict) and environment.get("type") == "local"
    return _kind(tool) in (*_CLIENT_KINDS, *OPENAI_TOOLS) and is_local


def translate_tool_choice(choice: object, tools: Sequence[JsonObject]) -> object:
    """A `tool_choice` in the shape that its tools are offered in; what is none of these stays as it is.

    >>> translate_tool_choice({"type": "custom", "custom": {"name": "patch"}}, [{"function": {"name": "patch"}}])
    {'type': 'function', 'function': {'name': 'patch'}}
    """
    names = [tool["function"]["name"] for tool in tools]
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED_TOOLS:
        return _translate_choice(choice, names)
    allowed = choice.get(_ALLOWED_TOOLS)
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        return choice
    return {
        **choice,
        _ALLOWED_TOOLS: {**allowed, "tools": [_translate_choice(tool, names) for tool in allowed["tools"]]},
    }


def _translate_choice(chosen: object, names: Sequence[str]) -> object:
    kind = chosen.get("type") if isinstance(chosen, dict) else None
    if not isinstance(chosen, dict) or not isinstance(kind, str):
        return chosen
    body = chosen[kind] if isinstance(chosen.get(kind), dict) else chosen
    name, namespace = body.get("name"), body.get("namespace") or ""
    if kind in OPENAI_TOOLS:
        name = kind
    elif kind in _CLIENT_KINDS and isinstance(name, str) and isinstance(namespace, str):
        name = model_tool_name(namespace, replace_surrogates(name))
    else:
        return chosen
    return {"type": "function", "function": {"name": name}} if name in names else chosen


def _kind(tool: JsonObject) -> Any:
    return "function" if tool.get("type") is None else tool["type"]


def _read_name(tool: JsonObject, place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{place}.name", name, "a non-empty string")
    return replace_surrogates(name)


def _function_schema(tool: JsonObject, place: str) -> dict[str, Any]:
    # The second is Anthropic's name for it.
    named = "parameters" if tool.get("parameters") is not None else "input_schema"
    parameters = tool.get(named)
    if parameters is not None and not isinstance(parameters, dict):
        raise MessageError(f"{place}.{named}", parameters, "a JSON schema (an object) or null")
    shape = {key: value for key, value in tool.items() if key in _FUNCTION_FIELDS and value is not None}
    return shape if parameters is None else {**shape, "parameters": parameters}


def _freeform_schema(tool: JsonObject) -> dict[str, Any]:
    """A function that takes one text; where a grammar says what text, the model is shown it."""
    given = tool.get("format")
    text: dict[str, Any] = {"type": "string"}
    if isinstance(given, dict) and given.get("type") == "grammar":
        # Responses has it right here, Chat Completions one deeper.
        grammar = given["grammar"] if isinstance(given.get("grammar"), dict) else given
        text["description"] = f"Text of this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    shape: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        shape["description"] = tool["description"]
    shape["parameters"] = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return shape
