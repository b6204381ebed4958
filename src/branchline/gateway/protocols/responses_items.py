"""Items of the Responses protocol, read into the messages that Chat Completions would give.

What is one assistant message elsewhere is a run of items here: reasoning, a message, calls of tools. A run
is put together again, so that a conversation means the same over every protocol. Items that only a vendor's
own servers could act on (web search, a code interpreter) are passed over.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from branchline.core.errors import MessageError
from branchline.core.fields import clean, inside, text_field
from branchline.core.message import Form, Media, Message, ToolCall
from branchline.core.reader import read_message
from branchline.gateway.protocols.base import Fields
from branchline.gateway.protocols.responses_past import Past
from branchline.gateway.protocols.tools import Alias, as_input, free_text, offered_name, read_tools
from branchline.gateway.protocols.vendor_tools import BY_ITEM, given

_SEAL = "branchline:"
_ROLES = ("user", "assistant", "system", "developer")
Kind = Literal["reasoning", "message", "call"]


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
        _, response_id, _ = self._past.parse_id(given_id)
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
        written = self._written(item)
        if written is None or free_text(written) != text:
            written = as_input(text)
        self._call(item, written)

    def _vendor_call(self, item: Fields) -> None:
        """A call of a vendor's own tool, which has an item of its own."""
        name, tool = BY_ITEM[item["type"]]
        value = item.get(tool.place)
        if not isinstance(value, dict):
            raise MessageError(tool.place, value, "an object")
        written = self._written(item)
        if written is None or given(tool.write(written)) != given(value):
            written = _json(tool.read(value), tool.place)
        self._call(item, written, name)

    def _written(self, item: Fields) -> str | None:
        """The arguments of a call as the model wrote them. They need not have been what its tool takes, so an
        item may be all that could be made of them, and only the record knows how they were put."""
        _, response_id, number = self._past.parse_id(text_field(item, "id"))
        answer = self._past.answer(response_id)
        calls = () if answer is None else answer.message.calls
        return calls[number].arguments if number < len(calls) else None

    def _call(self, item: Fields, arguments: str, offered: str = "") -> None:
        if not offered:
            name = text_field(item, "name")
            if not name:
                raise MessageError("name", item.get("name"), "a non-empty string")
            offered = offered_name(text_field(item, "namespace"), name)
        call = ToolCall(offered, arguments, text_field(item, "call_id"))
        self._reply("call", text_field(item, "id")).calls.append(call)

    def _output(self, item: Fields) -> None:
        # A local shell's output has the call's id as its own.
        answers = text_field(item, "call_id") or text_field(item, "id")
        try:
            read = read_message({"role": "tool", "tool_call_id": answers, "content": _result(item)}, "")
        except MessageError as error:
            place = error.field.replace("content", "output", 1)
            raise MessageError(place, error.value, error.expected) from None
        self._close()
        self._messages.append(_plain(read))

    def _item_reference(self, item: Fields) -> None:
        name = text_field(item, "id")
        prefix, response_id, number = self._past.parse_id(name)
        answer = self._past.answer(response_id)
        if answer is None:
            raise MessageError("id", name, "the id of an item that this session was sent")
        said = answer.message
        if prefix == "rs":
            self._reply("reasoning", name).reasoning += "" if number else said.reasoning
        elif prefix == "msg":
            # The text of an answer that went on behind a call is all under its first number, and a refusal
            # has the number behind it.
            reply, has_text = self._reply("message", name), bool(said.text)
            reply.parts += () if number else (said.text,)
            reply.refusal += said.refusal if number == has_text else ""
        else:
            self._reply("call", name).calls += said.calls[number : number + 1]

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
    **dict.fromkeys(BY_ITEM, ItemReader._vendor_call),
    **dict.fromkeys([f"{item}_output" for item in BY_ITEM], ItemReader._output),
    "item_reference": ItemReader._item_reference,
    "agent_message": ItemReader._agent_message,
    "additional_tools": ItemReader._additional_tools,
}


def _plain(message: Message) -> Message:
    """A list of parts is this protocol's own way to write a text, and nothing to be tolerated."""
    return replace(message, form=int(Form.PLAIN)) if message.form else message


def _result(item: Fields) -> object:
    """What came of a call. A shell tells of each command; a patch may say no more than whether it went in."""
    output = item.get("output")
    if item["type"] == "shell_call_output":
        return _json(output, "output")
    if output is None and item["type"] == "apply_patch_call_output":
        return text_field(item, "status")
    return output


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
