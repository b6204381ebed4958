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
from branchline.core.message import Media, Message, ToolCall, WireShape, freeform_arguments, freeform_input
from branchline.core.reader import prefix_error, read_message, read_text_field, replace_surrogates
from branchline.gateway.protocols.openai_tools import (
    ToolAlias,
    model_tool_name,
    read_openai_tools,
)
from branchline.gateway.protocols.responses_history import ResponseHistory
from branchline.gateway.protocols.vendor_tools import TOOLS_BY_ITEM_TYPE, drop_empty
from branchline.runtime.sampling import JsonObject

_REASONING_PREFIX = "branchline:"
_ROLES = ("user", "assistant", "system", "developer")
ItemKind = Literal["reasoning", "message", "call"]


# -- reasoning, there and back -----------------------------------------------------------------------


def encode_reasoning(reasoning: str) -> str:
    """Reasoning for clients that send back nothing else. It is no secret: it was theirs to read."""
    return _REASONING_PREFIX + base64.b64encode(reasoning.encode()).decode()


def decode_reasoning(sealed: str) -> str:
    """What was sealed; nothing where somebody else sealed it.

    >>> decode_reasoning(encode_reasoning("hm")), decode_reasoning("gAAAAABo")
    ('hm', '')
    """
    if not sealed.startswith(_REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_REASONING_PREFIX), validate=True).decode()
    except ValueError:
        return ""


# -- items -------------------------------------------------------------------------------------------


@dataclass
class _AssistantItems:
    """One assistant message while its items are read."""

    id: str = ""
    last_kind: ItemKind | None = None
    parts: list[str | Media] = field(default_factory=list)
    reasoning_content: str = ""
    refusal: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def accepts(self, kind: ItemKind, response_id: str) -> bool:
        """Whether an item belongs to it: ids decide, else what an answer can look like."""
        if self.id and response_id:
            return self.id == response_id
        if kind == "reasoning":
            return not (self.parts or self.tool_calls)
        # Two messages in a row are two, as they are in Chat Completions.
        return kind == "call" or self.last_kind != "message"

    @property
    def message(self) -> Message:
        text = "".join([part for part in self.parts if isinstance(part, str)])
        has_media = any(isinstance(part, Media) for part in self.parts)
        return Message(
            "assistant",
            text,
            reasoning_content=self.reasoning_content,
            tool_calls=tuple(self.tool_calls),
            refusal=self.refusal,
            parts=tuple(self.parts) if has_media else (),
            id=self.id,
        )


class ItemReader:
    """Reads the items of one request."""

    def __init__(self, past: ResponseHistory) -> None:
        self._history = past
        self._messages: list[Message] = []
        self._open_reply: _AssistantItems | None = None
        self.tools: list[dict[str, Any]] = []
        """Tools that came as an item."""
        self.aliases: dict[str, ToolAlias] = {}

    def read(self, items: object) -> list[Message]:
        """The messages that a request's `input` stands for."""
        if isinstance(items, str):
            return [Message("user", replace_surrogates(items))]
        if not isinstance(items, list):
            raise MessageError("input", items, "a string or a list of items")
        for index, item in enumerate(items):
            try:
                self._read_item(item)
            except MessageError as error:
                raise prefix_error(f"input[{index}]", error) from None
        self._close_reply()
        return self._messages

    def _read_item(self, item: object) -> None:
        if not isinstance(item, dict):
            raise MessageError("", item, "an item (an object)")
        kind = item.get("type")
        if kind is None and ("role" in item or "id" in item):
            # The two that may leave it out.
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise MessageError("type", kind, "the type of an item, or a role")
        take = _ITEM_READERS.get(kind)
        if take is not None:
            take(self, item)

    def _reply_for_item(self, kind: ItemKind, given_id: str) -> _AssistantItems:
        """The answer that an item is part of."""
        _, response_id, _ = self._history.parse_item_id(given_id)
        reply = self._open_reply
        if reply is None or not reply.accepts(kind, response_id):
            self._close_reply()
            reply = self._open_reply = _AssistantItems()
        reply.id = reply.id or response_id
        reply.last_kind = kind
        return reply

    def _close_reply(self) -> None:
        if self._open_reply is not None:
            self._messages.append(self._open_reply.message)
            self._open_reply = None

    def _message(self, item: JsonObject) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise MessageError("role", role, "one of " + ", ".join(_ROLES))
        read = read_message({"role": role, "content": item.get("content")}, "")
        if role != "assistant":
            self._close_reply()
            self._messages.append(_with_plain_shape(read))
            return
        reply = self._reply_for_item("message", read_text_field(item, "id"))
        reply.parts += read.parts or (read.content,)
        reply.reasoning_content += read.reasoning_content
        reply.refusal += read.refusal

    def _reasoning(self, item: JsonObject) -> None:
        sealed = read_text_field(item, "encrypted_content")
        text = _join_texts(item, "content") or decode_reasoning(sealed) or _join_texts(item, "summary")
        self._reply_for_item("reasoning", read_text_field(item, "id")).reasoning_content += text

    def _function_call(self, item: JsonObject) -> None:
        arguments = item.get("arguments")
        if arguments is None:
            arguments = ""
        elif isinstance(arguments, dict):
            arguments = _to_json(arguments, "arguments")
        elif not isinstance(arguments, str):
            raise MessageError("arguments", arguments, "a string of JSON")
        self._add_call(item, replace_surrogates(arguments))

    def _custom_tool_call(self, item: JsonObject) -> None:
        text = read_text_field(item, "input")
        written = self._sampled_arguments(item)
        if written is None or freeform_input(written) != text:
            written = freeform_arguments(text)
        self._add_call(item, written)

    def _vendor_call(self, item: JsonObject) -> None:
        """A call of a vendor's own tool, which has an item of its own."""
        name, tool = TOOLS_BY_ITEM_TYPE[item["type"]]
        value = item.get(tool.arguments_field)
        if not isinstance(value, dict):
            raise MessageError(tool.arguments_field, value, "an object")
        written = self._sampled_arguments(item)
        if written is None or drop_empty(tool.to_item(written)) != drop_empty(value):
            written = _to_json(tool.from_item(value), tool.arguments_field)
        self._add_call(item, written, name)

    def _sampled_arguments(self, item: JsonObject) -> str | None:
        """The arguments of a call as the model wrote them. They need not have been what its tool takes, so an
        item may be all that could be made of them, and only the record knows how they were put."""
        _, response_id, number = self._history.parse_item_id(read_text_field(item, "id"))
        answer = self._history.output_node(response_id)
        calls = () if answer is None else answer.message.tool_calls
        return calls[number].arguments if number < len(calls) else None

    def _add_call(self, item: JsonObject, arguments: str, offered: str = "") -> None:
        if not offered:
            name = read_text_field(item, "name")
            if not name:
                raise MessageError("name", item.get("name"), "a non-empty string")
            offered = model_tool_name(read_text_field(item, "namespace"), name)
        call = ToolCall(offered, arguments, read_text_field(item, "call_id"))
        self._reply_for_item("call", read_text_field(item, "id")).tool_calls.append(call)

    def _tool_output(self, item: JsonObject) -> None:
        # A local shell's output has the call's id as its own.
        answers = read_text_field(item, "call_id") or read_text_field(item, "id")
        try:
            read = read_message(
                {"role": "tool", "tool_call_id": answers, "content": _tool_result_content(item)}, ""
            )
        except MessageError as error:
            place = error.field.replace("content", "output", 1)
            raise MessageError(place, error.value, error.expected) from None
        self._close_reply()
        self._messages.append(_with_plain_shape(read))

    def _item_reference(self, item: JsonObject) -> None:
        name = read_text_field(item, "id")
        prefix, response_id, number = self._history.parse_item_id(name)
        answer = self._history.output_node(response_id)
        if answer is None:
            raise MessageError("id", name, "the id of an item that this session was sent")
        said = answer.message
        if prefix == "rs":
            self._reply_for_item("reasoning", name).reasoning_content += (
                "" if number else said.reasoning_content
            )
        elif prefix == "msg":
            # The text of an answer that went on behind a call is all under its first number, and a refusal
            # has the number behind it.
            reply, has_text = self._reply_for_item("message", name), bool(said.content)
            reply.parts += () if number else (said.content,)
            reply.refusal += said.refusal if number == has_text else ""
        else:
            self._reply_for_item("call", name).tool_calls += said.tool_calls[number : number + 1]

    def _agent_message(self, item: JsonObject) -> None:
        """What one agent tells another. Whoever wrote it wrote it here, so its sealed part is plain text."""
        content = item.get("content")
        if isinstance(content, list):
            content = [_decode_encrypted_part(part) for part in content]
        read = read_message({"role": "user", "content": content}, "")
        self._close_reply()
        self._messages.append(_with_plain_shape(read))

    def _additional_tools(self, item: JsonObject) -> None:
        tools, aliases = read_openai_tools(item.get("tools"))
        self.tools += tools
        self.aliases |= aliases


_ITEM_READERS: dict[str, Callable[[ItemReader, JsonObject], None]] = {
    "message": ItemReader._message,
    "reasoning": ItemReader._reasoning,
    "function_call": ItemReader._function_call,
    "function_call_output": ItemReader._tool_output,
    "custom_tool_call": ItemReader._custom_tool_call,
    "custom_tool_call_output": ItemReader._tool_output,
    **dict.fromkeys(TOOLS_BY_ITEM_TYPE, ItemReader._vendor_call),
    **dict.fromkeys([f"{item}_output" for item in TOOLS_BY_ITEM_TYPE], ItemReader._tool_output),
    "item_reference": ItemReader._item_reference,
    "agent_message": ItemReader._agent_message,
    "additional_tools": ItemReader._additional_tools,
}


def _with_plain_shape(message: Message) -> Message:
    """A list of parts is this protocol's own way to write a text, and nothing to be tolerated."""
    return replace(message, form=int(WireShape.PLAIN)) if message.wire_shape else message


def _tool_result_content(item: JsonObject) -> object:
    """What came of a call. A shell tells of each command; a patch may say no more than whether it went in."""
    output = item.get("output")
    if item["type"] == "shell_call_output":
        return _to_json(output, "output")
    if output is None and item["type"] == "apply_patch_call_output":
        return read_text_field(item, "status")
    return output


def _decode_encrypted_part(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") != "encrypted_content":
        return part
    return {"type": "text", "text": read_text_field(part, "encrypted_content")}


def _join_texts(item: JsonObject, name: str) -> str:
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
    return replace_surrogates("".join(found))


def _to_json(value: object, name: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None
