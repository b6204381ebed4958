"""Tools of OpenAI's protocols as Chat Completions writes functions, and what the client calls them.

A freeform tool takes any text. The model is offered it as a function with one argument, `input`, and a tool
of a namespace under both names; an `Alias` remembers what the client calls it. A function that is written as
Chat Completions has them is shown as it was written. Vendors' own tools are in `vendor_tools`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from branchline.core.errors import MessageError
from branchline.core.fields import clean
from branchline.gateway.protocols.base import Fields
from branchline.gateway.protocols.vendor_tools import OPENAI, VendorTool, note_left_out

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_OWN = ("function", "custom", "namespace")
_ALLOWED = "allowed_tools"
_PLAIN_NAMESPACE = "functions"
"""The namespace of what has none."""


@dataclass(frozen=True)
class Alias:
    """What the client calls a tool that the model is offered under another name or in another shape."""

    name: str
    namespace: str = ""
    is_freeform: bool = False
    vendor: VendorTool | None = None
    """One of a vendor's own, called with an item of its own."""


def offered_name(namespace: str, name: str) -> str:
    """The name a model knows a tool by.

    >>> offered_name("mcp__files", "read"), offered_name("functions", "look")
    ('mcp__files__read', 'look')
    """
    return name if namespace in ("", _PLAIN_NAMESPACE) else f"{namespace.rstrip('_')}__{name}"


def read_tools(
    raw: object, where: str = "tools", namespace: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Alias]]:
    """Tools as Chat Completions writes them, and what the client calls them where that differs."""
    if raw is None:
        return [], {}
    if not isinstance(raw, list):
        raise MessageError(where, raw, "a list of tools (objects) or null")
    tools: list[dict[str, Any]] = []
    aliases: dict[str, Alias] = {}
    for index, tool in enumerate(raw):
        place = f"{where}[{index}]"
        if not isinstance(tool, dict):
            raise MessageError(place, tool, "a tool (an object)")
        kind = _kind(tool)
        if kind == "namespace":
            inner, known = read_tools(tool.get("tools"), f"{place}.tools", _name(tool, place))
            tools += inner
            aliases |= known
        elif kind == "function" and isinstance(tool.get(kind), dict) and not namespace:
            _name(tool[kind], f"{place}.{kind}")
            tools.append(tool)
        elif kind in ("function", "custom"):
            # Chat Completions has what a tool is in a field of its own.
            body = tool[kind] if isinstance(tool.get(kind), dict) else tool
            name = _name(body, place)
            offered = offered_name(namespace, name)
            shape = _freeform(body) if kind == "custom" else _function(body, place)
            tools.append({"type": "function", "function": {**shape, "name": offered}})
            if kind == "custom" or offered != name:
                aliases[offered] = Alias(name, namespace if offered != name else "", kind == "custom")
        elif is_offered(tool):
            tools.append(OPENAI[kind].function(kind))
            aliases[kind] = Alias(kind, vendor=OPENAI[kind])
        else:
            note_left_out(str(kind))
    return tools, aliases


def is_offered(tool: Fields) -> bool:
    """Whether a tool is one that this client would run, so that a model here may call it."""
    environment = tool.get("environment") or {"type": "local"}
    is_local = isinstance(environment, dict) and environment.get("type") == "local"
    return _kind(tool) in (*_OWN, *OPENAI) and is_local


def offered_choice(choice: object, tools: Sequence[Fields]) -> object:
    """A `tool_choice` in the shape that its tools are offered in; what is none of these stays as it is.

    >>> offered_choice({"type": "custom", "custom": {"name": "patch"}}, [{"function": {"name": "patch"}}])
    {'type': 'function', 'function': {'name': 'patch'}}
    """
    names = [tool["function"]["name"] for tool in tools]
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return _offered(choice, names)
    allowed = choice.get(_ALLOWED)
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        return choice
    return {**choice, _ALLOWED: {**allowed, "tools": [_offered(tool, names) for tool in allowed["tools"]]}}


def _offered(chosen: object, names: Sequence[str]) -> object:
    kind = chosen.get("type") if isinstance(chosen, dict) else None
    if not isinstance(chosen, dict) or not isinstance(kind, str):
        return chosen
    body = chosen[kind] if isinstance(chosen.get(kind), dict) else chosen
    name, namespace = body.get("name"), body.get("namespace") or ""
    if kind in OPENAI:
        name = kind
    elif kind in _OWN and isinstance(name, str) and isinstance(namespace, str):
        name = offered_name(namespace, clean(name))
    else:
        return chosen
    return {"type": "function", "function": {"name": name}} if name in names else chosen


def _kind(tool: Fields) -> Any:
    return "function" if tool.get("type") is None else tool["type"]


def _name(tool: Fields, place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{place}.name", name, "a non-empty string")
    return clean(name)


def _function(tool: Fields, place: str) -> dict[str, Any]:
    # The second is Anthropic's name for it.
    named = "parameters" if tool.get("parameters") is not None else "input_schema"
    parameters = tool.get(named)
    if parameters is not None and not isinstance(parameters, dict):
        raise MessageError(f"{place}.{named}", parameters, "a JSON schema (an object) or null")
    shape = {key: value for key, value in tool.items() if key in _FUNCTION_FIELDS and value is not None}
    return shape if parameters is None else {**shape, "parameters": parameters}


def _freeform(tool: Fields) -> dict[str, Any]:
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


def as_input(text: str) -> str:
    """The arguments that mean an input of a freeform tool.

    >>> as_input("a patch")
    '{"input":"a patch"}'
    """
    return msgspec.json.encode({"input": text}).decode()


def free_text(arguments: str) -> str:
    """The input of a freeform tool out of the arguments a model wrote; what is nothing of the kind stays.

    >>> free_text('{"input": "a patch"}'), free_text('{"patch": 1}')
    ('a patch', '{"patch": 1}')
    """
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
