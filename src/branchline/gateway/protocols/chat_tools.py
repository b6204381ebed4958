"""Tools in Chat Completions and the calls of them, there and back.

Custom tools are functions to the model and custom to the client; `functions`, of old, are tools by another
name, and a client that knows them only is answered one call at a time, under theirs. What a client sends
back means what the model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from branchline.core.call import ToolList
from branchline.core.call import read_tools as read_objects
from branchline.core.errors import MessageError
from branchline.core.message import Message, ToolCall, freeform_arguments, freeform_input
from branchline.core.reader import read_message
from branchline.gateway.protocols.openai_tools import (
    ToolAlias,
    read_openai_tools,
)
from branchline.runtime.message_cache import MessageCache
from branchline.runtime.sampling import JsonObject
from branchline.tree.tree import Tree

_CUSTOM = "custom"


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request, as the model is shown them, and how the client wants to hear of them."""

    tools: ToolList = field(default_factory=ToolList)
    aliases: Mapping[str, ToolAlias] = field(default_factory=dict)
    """Those that the client calls otherwise than the model does."""
    is_legacy: bool = False
    """It has `functions`, and knows nothing of tools."""

    def to_wire(self, calls: Sequence[ToolCall], first: int | None = None) -> dict[str, Any]:
        """Calls as fields of a message; in a stream they are numbered from `first` on."""
        if self.is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        told = []
        for number, call in enumerate(calls, first or 0):
            one = {"id": call.id, **self._call_body(call)}
            told.append(one if first is None else {"index": number, **one})
        return {"tool_calls": told}

    def _call_body(self, call: ToolCall) -> dict[str, Any]:
        alias = self.aliases.get(call.name, ToolAlias(call.name))
        if alias.is_freeform:
            return {"type": _CUSTOM, _CUSTOM: {"name": alias.name, "input": freeform_input(call.arguments)}}
        return {"type": "function", "function": {"name": alias.name, "arguments": call.arguments}}

    def finish_reason(self, finish: str) -> str:
        """Why an answer ended, in the client's word."""
        return "function_call" if self.is_legacy and finish == "tool_calls" else finish


def read_tool_set(body: JsonObject, given: JsonObject, memory: MessageCache) -> ToolSet:
    """What a body offers; `given` are its fields with the session's own."""
    if body.get("tools") is None and body.get("functions") is not None:
        functions = read_objects(body["functions"], "functions")
        shaped = [{"type": "function", "function": function} for function in functions]
        offer = ToolSet(ToolList(read_openai_tools(shaped, "functions")[0]), is_legacy=True)
        choice = "function_call"
    else:
        offer, choice = memory.read_field(body.get("tools"), _parse_tool_set), "tool_choice"
    return ToolSet(is_legacy=offer.is_legacy) if _is_choice_none(given, choice) else offer


def _parse_tool_set(raw: object) -> ToolSet:
    tools, aliases = read_openai_tools(list(read_objects(raw)))
    return ToolSet(ToolList(tools), aliases)


def _is_choice_none(given: JsonObject, name: str) -> bool:
    choice = given.get(name, "auto")
    if choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise MessageError(name, choice, "none, auto, required or a tool's name in an object")
    return bool(choice == "none")


# -- what comes back ---------------------------------------------------------------------------------


def read_chat_message(raw: object, place: int) -> Message:
    """A message; the input of a custom tool becomes the argument that a model is asked for."""
    message = read_message(raw, "messages", place)
    if not _has_custom_call(message):
        return message
    calls = [
        replace(call, arguments=freeform_arguments(call.arguments)) if call.kind == _CUSTOM else call
        for call in message.tool_calls
    ]
    return replace(message, calls=tuple(calls))


def restore_arguments(message: Message, tree: Tree) -> Message:
    """With the inputs of custom tools as the model wrote them. It need not have written an input; what the
    client was told then is all that could be made of it, and only the record knows how it was put."""
    if not _has_custom_call(message):
        return message
    return replace(message, calls=tuple([_restore_call_arguments(call, tree) for call in message.tool_calls]))


def _restore_call_arguments(call: ToolCall, tree: Tree) -> ToolCall:
    sampled = tree.find_sampled_tool_call(call.id) if call.kind == _CUSTOM else None
    if sampled is None or freeform_input(sampled.arguments) != freeform_input(call.arguments):
        return call
    return replace(call, arguments=sampled.arguments)


def _has_custom_call(message: Message) -> bool:
    return any(call.kind == _CUSTOM for call in message.tool_calls)
