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

from branchline.core.errors import MessageError
from branchline.core.message import Message, ToolCall
from branchline.core.reader import ToolList, read_message
from branchline.core.reader import read_tools as read_objects
from branchline.gateway.bodies import Memory
from branchline.gateway.protocols.base import Fields
from branchline.gateway.protocols.tools import Alias, as_input, free_text, read_tools
from branchline.tree.tree import Tree

_CUSTOM = "custom"


@dataclass(frozen=True)
class Offer:
    """The tools of a request, as the model is shown them, and how the client wants to hear of them."""

    tools: ToolList = field(default_factory=ToolList)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Those that the client calls otherwise than the model does."""
    is_legacy: bool = False
    """It has `functions`, and knows nothing of tools."""

    def told(self, calls: Sequence[ToolCall], first: int | None = None) -> dict[str, Any]:
        """Calls as fields of a message; in a stream they are numbered from `first` on."""
        if self.is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        told = []
        for number, call in enumerate(calls, first or 0):
            one = {"id": call.id, **self._body(call)}
            told.append(one if first is None else {"index": number, **one})
        return {"tool_calls": told}

    def _body(self, call: ToolCall) -> dict[str, Any]:
        alias = self.aliases.get(call.name, Alias(call.name))
        if alias.is_freeform:
            return {"type": _CUSTOM, _CUSTOM: {"name": alias.name, "input": free_text(call.arguments)}}
        return {"type": "function", "function": {"name": alias.name, "arguments": call.arguments}}

    def finish(self, finish: str) -> str:
        """Why an answer ended, in the client's word."""
        return "function_call" if self.is_legacy and finish == "tool_calls" else finish


def read_offer(body: Fields, given: Fields, memory: Memory) -> Offer:
    """What a body offers; `given` are its fields with the session's own."""
    if body.get("tools") is None and body.get("functions") is not None:
        functions = read_objects(body["functions"], "functions")
        shaped = [{"type": "function", "function": function} for function in functions]
        offer = Offer(ToolList(read_tools(shaped, "functions")[0]), is_legacy=True)
        choice = "function_call"
    else:
        offer, choice = memory.value(body.get("tools"), _offer), "tool_choice"
    return Offer(is_legacy=offer.is_legacy) if _is_none(given, choice) else offer


def _offer(raw: object) -> Offer:
    tools, aliases = read_tools(list(read_objects(raw)))
    return Offer(ToolList(tools), aliases)


def _is_none(given: Fields, name: str) -> bool:
    choice = given.get(name, "auto")
    if choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise MessageError(name, choice, "none, auto, required or a tool's name in an object")
    return bool(choice == "none")


# -- what comes back ---------------------------------------------------------------------------------


def read_turn(raw: object, place: int) -> Message:
    """A message; the input of a custom tool becomes the argument that a model is asked for."""
    message = read_message(raw, "messages", place)
    if not _has_custom(message):
        return message
    calls = [
        replace(call, arguments=as_input(call.arguments)) if call.kind == _CUSTOM else call
        for call in message.calls
    ]
    return replace(message, calls=tuple(calls))


def as_written(message: Message, tree: Tree) -> Message:
    """With the inputs of custom tools as the model wrote them. It need not have written an input; what the
    client was told then is all that could be made of it, and only the record knows how it was put."""
    if not _has_custom(message):
        return message
    return replace(message, calls=tuple([_call_as_written(call, tree) for call in message.calls]))


def _call_as_written(call: ToolCall, tree: Tree) -> ToolCall:
    sampled = tree.sampled_call(call.id) if call.kind == _CUSTOM else None
    if sampled is None or free_text(sampled.arguments) != free_text(call.arguments):
        return call
    return replace(call, arguments=sampled.arguments)


def _has_custom(message: Message) -> bool:
    return any(call.kind == _CUSTOM for call in message.calls)
