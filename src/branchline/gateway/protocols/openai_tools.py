"""Tools of OpenAI's protocols as Chat Completions functions, and tool calls back in the client's terms.

The model sees functions only. A freeform (`custom`) tool becomes a function with one argument, `input`; a
tool in a namespace gets a name that includes the namespace. A `ToolAlias` keeps the client's own name and
kind. The deprecated `functions` are tools under another field; a client that uses them gets one call per
answer, as `function_call`. What a client sends back is turned into the arguments that the model wrote.
Vendors' own tools are in `vendor_tools`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

import msgspec
from msgspec.structs import replace

from branchline.core.call import ToolList
from branchline.core.call import read_tools as read_objects
from branchline.core.errors import MessageError
from branchline.core.message import Message, ToolCall, freeform_arguments, freeform_input
from branchline.core.reader import read_message, replace_surrogates
from branchline.gateway.protocols.vendor_tools import OPENAI_TOOLS, VendorTool, warn_unsupported_tool
from branchline.runtime.message_cache import MessageCache
from branchline.runtime.sampling import JsonObject, read_tool_choice
from branchline.tree.tree import Tree

_CUSTOM = "custom"
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CLIENT_KINDS = ("function", _CUSTOM, "namespace")
_ALLOWED_TOOLS = "allowed_tools"
_DEFAULT_NAMESPACE = "functions"
"""The namespace of tools that have none."""


@dataclass(frozen=True)
class ToolAlias:
    """The client's name and kind of a tool that the model sees as another function."""

    name: str
    namespace: str = ""
    is_freeform: bool = False
    vendor: VendorTool | None = None
    """The vendor's tool that this is, if it is one; its calls have an item type of their own."""


def qualified_tool_name(namespace: str, name: str) -> str:
    """The name under which the model sees a tool.

    >>> qualified_tool_name("mcp__files", "read"), qualified_tool_name("functions", "look")
    ('mcp__files__read', 'look')
    """
    return name if namespace in ("", _DEFAULT_NAMESPACE) else f"{namespace.rstrip('_')}__{name}"


# -- tools of a request ------------------------------------------------------------------------------


@dataclass
class OfferedTools:
    """Tools as Chat Completions functions, aliases of those that the client knows otherwise, and what the
    client asks of its tools that nobody does."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    aliases: dict[str, ToolAlias] = field(default_factory=dict)
    not_applied: set[str] = field(default_factory=set)

    def add(self, other: OfferedTools) -> None:
        self.tools += other.tools
        self.aliases |= other.aliases
        self.not_applied |= other.not_applied


def read_openai_tools(raw: object, path: str = "tools", namespace: str = "") -> OfferedTools:
    """Reads the tools of a request.

    A function that is already in the form of Chat Completions stays as written, apart from a missing `type`.
    """
    offered = OfferedTools()
    if raw is None:
        return offered
    if not isinstance(raw, list):
        raise MessageError(path, raw, "a list of tools (objects) or null")
    tools, aliases = offered.tools, offered.aliases
    for index, tool in enumerate(raw):
        tool_path = f"{path}[{index}]"
        if not isinstance(tool, dict):
            raise MessageError(tool_path, tool, "a tool (an object)")
        kind = _kind(tool)
        if kind == "namespace":
            name = _read_name(tool, tool_path)
            offered.add(read_openai_tools(tool.get("tools"), f"{tool_path}.tools", name))
        elif kind == "function" and isinstance(tool.get(kind), dict) and not namespace:
            _read_name(tool[kind], f"{tool_path}.{kind}")
            # Some templates show only tools that say what they are.
            tools.append(tool if tool.get("type") == kind else {**tool, "type": kind})
        elif kind in ("function", _CUSTOM):
            # Chat Completions nests the definition in a field named like its kind; Responses does not.
            body = tool[kind] if isinstance(tool.get(kind), dict) else tool
            name = _read_name(body, tool_path)
            model_name = qualified_tool_name(namespace, name)
            schema = _freeform_schema(body) if kind == _CUSTOM else _function_schema(body, tool_path)
            tools.append({"type": "function", "function": {**schema, "name": model_name}})
            if body.get("defer_loading"):
                offered.not_applied.add("tools.defer_loading")
            if kind == _CUSTOM and _grammar_of(body) is not None:
                offered.not_applied.add("tools.format")
            if kind == _CUSTOM or model_name != name:
                alias_namespace = namespace if model_name != name else ""
                aliases[model_name] = ToolAlias(name, alias_namespace, kind == _CUSTOM)
        elif is_run_by_client(tool):
            tools.append(OPENAI_TOOLS[kind].to_function(kind))
            aliases[kind] = ToolAlias(kind, vendor=OPENAI_TOOLS[kind])
        else:
            warn_unsupported_tool(str(kind))
            offered.not_applied.add(f"tools.{kind}")
    return offered


def is_run_by_client(tool: JsonObject) -> bool:
    """Whether the client runs this tool itself, so that any model may call it."""
    environment = tool.get("environment") or {"type": "local"}
    is_local = isinstance(environment, dict) and environment.get("type") == "local"
    return _kind(tool) in (*_CLIENT_KINDS, *OPENAI_TOOLS) and is_local


def translate_tool_choice(choice: object, tools: Sequence[JsonObject]) -> object:
    """A `tool_choice` in terms of the functions that the model sees; other values stay as they are.

    >>> tools = [{"type": "function", "function": {"name": "patch"}}]
    >>> translate_tool_choice({"type": "custom", "custom": {"name": "patch"}}, tools)
    {'type': 'function', 'function': {'name': 'patch'}}
    """
    names = [tool["function"]["name"] for tool in tools]
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED_TOOLS:
        return _translate_choice(choice, names)
    allowed = choice.get(_ALLOWED_TOOLS)
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        return choice
    translated = [_translate_choice(tool, names) for tool in allowed["tools"]]
    return {**choice, _ALLOWED_TOOLS: {**allowed, "tools": translated}}


def _translate_choice(choice: object, names: Sequence[str]) -> object:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str):
        return choice
    body = choice[kind] if isinstance(choice.get(kind), dict) else choice
    name, namespace = body.get("name"), body.get("namespace") or ""
    if kind in OPENAI_TOOLS:
        name = kind
    elif kind in _CLIENT_KINDS and isinstance(name, str) and isinstance(namespace, str):
        name = qualified_tool_name(namespace, replace_surrogates(name))
    else:
        return choice
    return {"type": "function", "function": {"name": name}} if name in names else choice


def _kind(tool: JsonObject) -> Any:
    return "function" if tool.get("type") is None else tool["type"]


def _read_name(tool: JsonObject, path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{path}.name", name, "a non-empty string")
    return replace_surrogates(name)


def _function_schema(tool: JsonObject, path: str) -> dict[str, Any]:
    # `input_schema` is Anthropic's name of the field.
    name = "parameters" if tool.get("parameters") is not None else "input_schema"
    parameters = tool.get(name)
    if parameters is not None and not isinstance(parameters, dict):
        raise MessageError(f"{path}.{name}", parameters, "a JSON schema (an object) or null")
    schema = {key: value for key, value in tool.items() if key in _FUNCTION_FIELDS and value is not None}
    return schema if parameters is None else {**schema, "parameters": parameters}


def _freeform_schema(tool: JsonObject) -> dict[str, Any]:
    """A function with one text argument; if the tool has a grammar, the argument's description shows it."""
    grammar = _grammar_of(tool)
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        text["description"] = f"Text of this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    schema: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        schema["description"] = tool["description"]
    schema["parameters"] = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return schema


def _grammar_of(tool: JsonObject) -> JsonObject | None:
    """The grammar of a custom tool, which the model sees in a description and no engine enforces."""
    format = tool.get("format")
    if not isinstance(format, dict) or format.get("type") != "grammar":
        return None
    # Responses has the grammar's fields here, Chat Completions one level deeper.
    return format["grammar"] if isinstance(format.get("grammar"), dict) else format


# -- Chat Completions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolSet:
    """The tools of a Chat Completions request, as the model sees them, and how calls are sent back."""

    tools: ToolList = field(default_factory=ToolList)
    aliases: Mapping[str, ToolAlias] = field(default_factory=dict)
    is_legacy: bool = False
    """The client uses `functions` and does not know `tool_calls`."""
    choice: object = None
    """The tool that the model is asked to call, or `required`; None if it is free to call none."""
    not_applied: tuple[str, ...] = ()
    """What the client asks of its tools that nobody does."""

    def to_wire(self, calls: Sequence[ToolCall], first: int | None = None) -> dict[str, Any]:
        """Calls as fields of a message; in a stream they are numbered from `first` on."""
        if self.is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        wire_calls = []
        for number, call in enumerate(calls, first or 0):
            wire_call = {"id": call.id, **self._call_body(call)}
            if call.extra_fields:
                wire_call = {**msgspec.json.decode(call.extra_fields), **wire_call}
            wire_calls.append(wire_call if first is None else {"index": number, **wire_call})
        return {"tool_calls": wire_calls}

    def _call_body(self, call: ToolCall) -> dict[str, Any]:
        alias = self.aliases.get(call.name, ToolAlias(call.name))
        if alias.is_freeform:
            return {"type": _CUSTOM, _CUSTOM: {"name": alias.name, "input": freeform_input(call.arguments)}}
        return {"type": "function", "function": {"name": alias.name, "arguments": call.arguments}}

    def finish_reason(self, finish_reason: str) -> str:
        return "function_call" if self.is_legacy and finish_reason == "tool_calls" else finish_reason


def read_tool_set(body: JsonObject, fields: JsonObject, cache: MessageCache) -> ToolSet:
    """The tools of a body; `fields` are its fields merged with the session's sampling."""
    if body.get("tools") is None and body.get("functions") is not None:
        functions = read_objects(body["functions"], "functions")
        tools = [{"type": "function", "function": function} for function in functions]
        tool_set = ToolSet(ToolList(read_openai_tools(tools, "functions").tools), is_legacy=True)
        choice_name = "function_call"
    else:
        tool_set, choice_name = cache.read_field(body.get("tools"), _parse_tool_set), "tool_choice"
    choice = read_tool_choice(fields, choice_name)
    if choice is None:
        return tool_set
    if choice == "none":
        return ToolSet(is_legacy=tool_set.is_legacy)
    return replace_fields(tool_set, choice=choice)


def _parse_tool_set(raw: object) -> ToolSet:
    offered = read_openai_tools(list(read_objects(raw)))
    not_applied = tuple(sorted(offered.not_applied))
    return ToolSet(ToolList(offered.tools), offered.aliases, not_applied=not_applied)


def read_message_with_custom_calls(raw: object, index: int) -> Message:
    """A message; the input of a custom tool becomes the argument of the function that the model sees."""
    message = read_message(raw, "messages", index)
    if all(call.kind != _CUSTOM for call in message.tool_calls):
        return message
    calls = [
        replace(call, arguments=freeform_arguments(call.arguments)) if call.kind == _CUSTOM else call
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=tuple(calls))


def restore_custom_arguments(message: Message, tree: Tree) -> Message:
    """The message with the arguments of its custom tool calls as the model wrote them.

    The model may have written other arguments than `input`; the client saw only the input made from them.
    """
    if all(call.kind != _CUSTOM for call in message.tool_calls):
        return message
    calls = [_restore_call_arguments(call, tree) for call in message.tool_calls]
    return replace(message, tool_calls=tuple(calls))


def _restore_call_arguments(call: ToolCall, tree: Tree) -> ToolCall:
    sampled = tree.find_sampled_tool_call(call.id) if call.kind == _CUSTOM else None
    if sampled is None or freeform_input(sampled.arguments) != freeform_input(call.arguments):
        return call
    return replace(call, arguments=sampled.arguments)
