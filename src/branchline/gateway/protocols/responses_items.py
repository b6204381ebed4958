"""Items of the Responses protocol, read into the messages that Chat Completions would give.

What is one assistant message elsewhere is a run of items here: reasoning, a message, calls of tools. A run
is put together again, so that a conversation means the same over every protocol. Items that only a vendor's
own servers could act on (web search, a hosted shell) are passed over.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from branchline.core.call import RAW_FRAME, Call
from branchline.core.errors import MessageError
from branchline.core.fields import clean, inside, text_field
from branchline.core.message import Form, Media, Message, ToolCall
from branchline.core.reader import read_message
from branchline.gateway.protocols.base import Fields
from branchline.gateway.protocols.responses_tools import Alias, free_text, offered_name, read_tools
from branchline.tree.node import Node
from branchline.tree.tree import Tree

ID_PREFIX = "resp_"
INSTRUCTIONS = "instructions"
"""The id of the message that `instructions` become: a response that goes on from another leaves it out.
The same words sent both as instructions and as an item of one session are what they were first."""
_ITEM_ID = re.compile(r"(msg|rs|fc|ctc)_([0-9a-f]+)_([0-9]{1,6})")
_SEAL = "branchline:"
_ROLES = ("user", "assistant", "system", "developer")
Kind = Literal["reasoning", "message", "call"]


# -- what this session has said before ---------------------------------------------------------------


def item_id(prefix: str, call_id: str, number: int) -> str:
    """The id of an item of a response: it names the response, so what comes back can be put together."""
    return f"{prefix}_{call_id.removeprefix(ID_PREFIX)}_{number}"


def _parse_id(given: str) -> tuple[str, str, int]:
    """The prefix, the response and the number of an id of ours; empty where it is somebody else's."""
    found = _ITEM_ID.fullmatch(given)
    return (found[1], ID_PREFIX + found[2], int(found[3])) if found else ("", "", 0)


@dataclass(frozen=True)
class Past:
    """The answers of a session, by response id."""

    tree: Tree

    @cached_property
    def _calls(self) -> dict[str, Call]:
        return {call.id: call for call in self.tree.calls}

    def answer(self, response_id: str) -> Node | None:
        """Where a response ended, if it is one of this session's."""
        call = self._calls.get(response_id)
        return None if call is None or call.frame == RAW_FRAME else self.tree.nodes[call.outputs[0]]

    def conversation(self, response_id: object) -> list[Message]:
        """All that was said up to a response and in it, without its instructions."""
        node = self.answer(response_id) if isinstance(response_id, str) else None
        if node is None:
            raise MessageError("previous_response_id", response_id, "the id of a response of this session")
        messages = [entry.message for entry in node.path()]
        return messages[1:] if messages[0].id == INSTRUCTIONS else messages


# -- reasoning, there and back -----------------------------------------------------------------------


def seal(reasoning: str) -> str:
    """Reasoning for clients that send back nothing else. It is no secret: it was theirs to read."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str:
    """What was sealed; nothing where somebody else sealed it.

    >>> unseal(seal("hm")), unseal("gAAAAABo")
    ('hm', '')
    """
    if not sealed.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


# -- items -------------------------------------------------------------------------------------------


@dataclass
class _Reply:
    """One assistant message while its items are read."""

    id: str = ""
    last: Kind | None = None
    parts: list[str | Media] = field(default_factory=list)
    reasoning: str = ""
    refusal: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def goes_on(self, kind: Kind, response_id: str) -> bool:
        """Whether an item belongs to it: ids decide, else what an answer can look like."""
        if self.id and response_id:
            return self.id == response_id
        if kind == "reasoning":
            return not (self.parts or self.calls)
        # Two messages in a row are two, as they are in Chat Completions.
        return kind == "call" or self.last != "message"

    @property
    def message(self) -> Message:
        text = "".join([part for part in self.parts if isinstance(part, str)])
        has_media = any(isinstance(part, Media) for part in self.parts)
        return Message(
            "assistant",
            text,
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            refusal=self.refusal,
            parts=tuple(self.parts) if has_media else (),
            id=self.id,
        )


class ItemReader:
    """Reads the items of one request."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self._messages: list[Message] = []
        self._open: _Reply | None = None
        self.tools: list[dict[str, Any]] = []
        """Tools that came as an item."""
        self.aliases: dict[str, Alias] = {}

    def read(self, items: object) -> list[Message]:
        """The messages that a request's `input` stands for."""
        if isinstance(items, str):
            return [Message("user", clean(items))]
        if not isinstance(items, list):
            raise MessageError("input", items, "a string or a list of items")
        for index, item in enumerate(items):
            try:
                self._take(item)
            except MessageError as error:
                raise inside(f"input[{index}]", error) from None
        self._close()
        return self._messages

    def _take(self, item: object) -> None:
        if not isinstance(item, dict):
            raise MessageError("", item, "an item (an object)")
        kind = item.get("type")
        if kind is None and ("role" in item or "id" in item):
            # The two that may leave it out.
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise MessageError("type", kind, "the type of an item, or a role")
        take = _READERS.get(kind)
        if take is not None:
            take(self, item)

    def _reply(self, kind: Kind, given_id: str) -> _Reply:
        """The answer that an item is part of."""
        _, response_id, _ = _parse_id(given_id)
        reply = self._open
        if reply is None or not reply.goes_on(kind, response_id):
            self._close()
            reply = self._open = _Reply()
        reply.id = reply.id or response_id
        reply.last = kind
        return reply

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append(self._open.message)
            self._open = None

    def _message(self, item: Fields) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise MessageError("role", role, "one of " + ", ".join(_ROLES))
        read = read_message({"role": role, "content": item.get("content")}, "")
        if role != "assistant":
            self._close()
            self._messages.append(_plain(read))
            return
        reply = self._reply("message", text_field(item, "id"))
        reply.parts += read.parts or (read.text,)
        reply.reasoning += read.reasoning
        reply.refusal += read.refusal

    def _reasoning(self, item: Fields) -> None:
        sealed = text_field(item, "encrypted_content")
        text = _texts(item, "content") or unseal(sealed) or _texts(item, "summary")
        self._reply("reasoning", text_field(item, "id")).reasoning += text

    def _function_call(self, item: Fields) -> None:
        arguments = item.get("arguments")
        if arguments is None:
            arguments = ""
        elif isinstance(arguments, dict):
            arguments = _json(arguments, "arguments")
        elif not isinstance(arguments, str):
            raise MessageError("arguments", arguments, "a string of JSON")
        self._call(item, clean(arguments))

    def _custom_tool_call(self, item: Fields) -> None:
        text = text_field(item, "input")
        prefix, response_id, number = _parse_id(text_field(item, "id"))
        arguments = _json({"input": text}, "input")
        answer = self._past.answer(response_id) if prefix == "ctc" else None
        if answer is not None and number < len(answer.message.calls):
            # What the model wrote need not have been an input; then only the record knows how it was put.
            written = answer.message.calls[number].arguments
            arguments = written if free_text(written) == text else arguments
        self._call(item, arguments)

    def _call(self, item: Fields, arguments: str) -> None:
        name = text_field(item, "name")
        if not name:
            raise MessageError("name", item.get("name"), "a non-empty string")
        offered = offered_name(text_field(item, "namespace"), name)
        call = ToolCall(offered, arguments, text_field(item, "call_id"))
        self._reply("call", text_field(item, "id")).calls.append(call)

    def _output(self, item: Fields) -> None:
        answers = text_field(item, "call_id")
        try:
            read = read_message({"role": "tool", "tool_call_id": answers, "content": item.get("output")}, "")
        except MessageError as error:
            place = error.field.replace("content", "output", 1)
            raise MessageError(place, error.value, error.expected) from None
        self._close()
        self._messages.append(_plain(read))

    def _item_reference(self, item: Fields) -> None:
        given = text_field(item, "id")
        prefix, response_id, number = _parse_id(given)
        answer = self._past.answer(response_id)
        if answer is None:
            raise MessageError("id", given, "the id of an item that this session was sent")
        said = answer.message
        if prefix in ("fc", "ctc"):
            self._reply("call", given).calls += said.calls[number : number + 1]
        elif prefix == "rs":
            self._reply("reasoning", given).reasoning += "" if number else said.reasoning
        else:
            # The text of an answer that went on behind a call is all under its first number.
            self._reply("message", given).parts += () if number else (said.text,)

    def _agent_message(self, item: Fields) -> None:
        """What one agent tells another. Whoever wrote it wrote it here, so its sealed part is plain text."""
        content = item.get("content")
        if isinstance(content, list):
            content = [_unsealed(part) for part in content]
        read = read_message({"role": "user", "content": content}, "")
        self._close()
        self._messages.append(_plain(read))

    def _additional_tools(self, item: Fields) -> None:
        tools, aliases = read_tools(item.get("tools"))
        self.tools += tools
        self.aliases |= aliases


_READERS: dict[str, Callable[[ItemReader, Fields], None]] = {
    "message": ItemReader._message,
    "reasoning": ItemReader._reasoning,
    "function_call": ItemReader._function_call,
    "function_call_output": ItemReader._output,
    "custom_tool_call": ItemReader._custom_tool_call,
    "custom_tool_call_output": ItemReader._output,
    "item_reference": ItemReader._item_reference,
    "agent_message": ItemReader._agent_message,
    "additional_tools": ItemReader._additional_tools,
}


def _plain(message: Message) -> Message:
    """A list of parts is this protocol's own way to write a text, and nothing to be tolerated."""
    return replace(message, form=int(Form.PLAIN)) if message.form else message


def _unsealed(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "encrypted_content":
        return part
    return {"type": "text", "text": text_field(part, "encrypted_content")}


def _texts(item: Fields, name: str) -> str:
    """Texts in a list, joined."""
    entries = item.get(name) or []
    if not isinstance(entries, list):
        raise MessageError(name, entries, "a list of texts or null")
    found: list[str] = []
    for place, entry in enumerate(entries):
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise MessageError(f"{name}[{place}].text", text, "a string")
        found.append(text)
    return clean("".join(found))


def _json(value: object, name: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None
