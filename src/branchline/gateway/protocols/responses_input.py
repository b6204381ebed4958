"""Items of the Responses protocol, read into the messages that Chat Completions would give.

What is one assistant message elsewhere is a sequence of items here: reasoning, a message, tool calls. Such a
sequence becomes one message again, so a conversation is the same in every protocol. An item's id names its
response, which is a call of the session's tree; so items that come back are grouped and looked up by id.
Items that only a vendor's own servers could handle (web search, a code interpreter) are left out and counted
as not applied.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
from msgspec.structs import replace

from branchline.core.call import RAW_PROMPT_DIGEST, Call
from branchline.core.errors import MessageError
from branchline.core.message import Media, Message, ToolCall, WireShape, freeform_arguments, freeform_input
from branchline.core.reader import prefix_error, read_message, read_text_field, replace_surrogates
from branchline.gateway.protocols.openai_tools import (
    OfferedTools,
    qualified_tool_name,
    read_openai_tools,
)
from branchline.gateway.protocols.vendor_tools import OPENAI_TOOLS, TOOLS_BY_ITEM_TYPE, drop_empty
from branchline.runtime.sampling import JsonObject
from branchline.tree.tree import Node, Tree

RESPONSE_ID_PREFIX = "resp_"
_ITEM_ID = re.compile(r"([a-z]+)_(.+)_([0-9]{1,6})")
_ITEM_PREFIXES = frozenset({"msg", "rs", "fc", "ctc", *(tool.id_prefix for tool in OPENAI_TOOLS.values())})
_GENERATED_ID = re.compile(r"[0-9a-f]+")
"""The rest of a response id that no client has named."""
_REASONING_PREFIX = "branchline:"
_ROLES = ("user", "assistant", "system", "developer")
ItemKind = Literal["reasoning", "message", "call"]


# -- ids and encrypted reasoning ---------------------------------------------------------------------


def item_id(prefix: str, call_id: str, number: int) -> str:
    """The id of a response's item: prefix, response id without `resp_`, number."""
    return f"{prefix}_{call_id.removeprefix(RESPONSE_ID_PREFIX)}_{number}"


@dataclass(frozen=True)
class ResponseHistory:
    """The answers of a session by response id."""

    tree: Tree

    @cached_property
    def _calls_by_id(self) -> dict[str, Call]:
        return {call.id: call for call in self.tree.calls}

    def parse_item_id(self, value: str) -> tuple[str, str, int]:
        """Prefix, response id and number of an item made here; ("", "", 0) for any other id."""
        found = _ITEM_ID.fullmatch(value)
        if found is None or found[1] not in _ITEM_PREFIXES:
            return "", "", 0
        prefix, name, number = found[1], found[2], int(found[3])
        for response_id in (RESPONSE_ID_PREFIX + name, name):
            if response_id in self._calls_by_id:
                return prefix, response_id, number
        # An item of another session is recognised by the form of its id.
        return (prefix, RESPONSE_ID_PREFIX + name, number) if _GENERATED_ID.fullmatch(name) else ("", "", 0)

    def output_node(self, response_id: str) -> Node | None:
        """The node of a response; None if it is not one of this session."""
        call = self._calls_by_id.get(response_id)
        if call is None or call.prompt_config_digest == RAW_PROMPT_DIGEST:
            return None
        return self.tree.nodes[call.outputs[0]]

    def messages_through(self, response_id: object) -> list[Message]:
        """The conversation up to and including a response, without its instructions."""
        node = self.output_node(response_id) if isinstance(response_id, str) else None
        if node is None:
            raise MessageError("previous_response_id", response_id, "the id of a response of this session")
        messages = [entry.message for entry in node.path()]
        return messages[1:] if self.tree.call_of(node).has_instructions else messages


def encode_reasoning(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send back nothing else. It is not secret."""
    return _REASONING_PREFIX + base64.b64encode(reasoning.encode()).decode()


def decode_reasoning(encrypted: str) -> str:
    """The reasoning in `encrypted_content`; "" if it was not made here.

    >>> decode_reasoning(encode_reasoning("hm")), decode_reasoning("gAAAAABo")
    ('hm', '')
    """
    if not encrypted.startswith(_REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(encrypted.removeprefix(_REASONING_PREFIX), validate=True).decode()
    except ValueError:
        return ""


# -- items -------------------------------------------------------------------------------------------


@dataclass
class _AssistantItems:
    """The items of one assistant message."""

    id: str = ""
    last_kind: ItemKind | None = None
    parts: list[str | Media] = field(default_factory=list)
    reasoning_content: str = ""
    refusal: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def accepts(self, kind: ItemKind, response_id: str) -> bool:
        """Whether an item belongs to this message: by response id, else by the order of items."""
        if self.id and response_id:
            return self.id == response_id
        if kind == "reasoning":
            return not (self.parts or self.tool_calls)
        # Two message items in a row are two messages, as in Chat Completions.
        return kind == "call" or self.last_kind != "message"

    @property
    def message(self) -> Message:
        has_media = any(isinstance(part, Media) for part in self.parts)
        return Message(
            "assistant",
            "".join([part for part in self.parts if isinstance(part, str)]),
            reasoning_content=self.reasoning_content,
            tool_calls=tuple(self.tool_calls),
            refusal=self.refusal,
            parts=tuple(self.parts) if has_media else (),
            id=self.id,
        )


class ItemReader:
    """Reads the items of one request."""

    def __init__(self, history: ResponseHistory) -> None:
        self._history = history
        self._messages: list[Message] = []
        self._open_reply: _AssistantItems | None = None
        self.offered = OfferedTools()
        """Tools that were sent as an item."""
        self.not_applied: set[str] = set()
        """The items that only a vendor's own servers could handle."""

    def read(self, items: object) -> list[Message]:
        """The messages of a request's `input`."""
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
            # These two may omit their type.
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise MessageError("type", kind, "the type of an item, or a role")
        read = _ITEM_READERS.get(kind)
        if read is not None:
            read(self, item)
        elif kind in _VENDOR_ITEMS:
            self.not_applied.add(f"input.{kind}")
        else:
            raise MessageError("type", kind, "the type of an item")

    def _reply_for_item(self, kind: ItemKind, id: str) -> _AssistantItems:
        """The assistant message that an item belongs to; starts a new one if needed."""
        _, response_id, _ = self._history.parse_item_id(id)
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

    def _add_message(self, message: Message) -> None:
        """Adds a message that is no reply. Part lists are normal in this protocol, not a shape to record."""
        self._close_reply()
        is_plain = not message.wire_shape
        self._messages.append(message if is_plain else replace(message, wire_shape=int(WireShape.PLAIN)))

    def _message(self, item: JsonObject) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise MessageError("role", role, "one of " + ", ".join(_ROLES))
        message = read_message({"role": role, "content": item.get("content")}, "")
        if role != "assistant":
            self._add_message(message)
            return
        reply = self._reply_for_item("message", read_text_field(item, "id"))
        reply.parts += message.parts or (message.content,)
        reply.reasoning_content += message.reasoning_content
        reply.refusal += message.refusal

    def _reasoning(self, item: JsonObject) -> None:
        encrypted = read_text_field(item, "encrypted_content")
        text = _join_texts(item, "content") or decode_reasoning(encrypted) or _join_texts(item, "summary")
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
        arguments = self._sampled_arguments(item)
        if arguments is None or freeform_input(arguments) != text:
            arguments = freeform_arguments(text)
        self._add_call(item, arguments)

    def _vendor_call(self, item: JsonObject) -> None:
        """A call of a vendor's own tool, which has its own item type."""
        name, tool = TOOLS_BY_ITEM_TYPE[item["type"]]
        value = item.get(tool.arguments_field)
        if not isinstance(value, dict):
            raise MessageError(tool.arguments_field, value, "an object")
        arguments = self._sampled_arguments(item)
        if arguments is None or drop_empty(tool.to_item(arguments)) != drop_empty(value):
            arguments = _to_json(tool.from_item(value), tool.arguments_field)
        self._add_call(item, arguments, name)

    def _sampled_arguments(self, item: JsonObject) -> str | None:
        """The arguments of a call as the model wrote them; None if the tree does not have the call.

        An item cannot represent every text that a model may write as arguments; the tree has that text.
        """
        _, response_id, number = self._history.parse_item_id(read_text_field(item, "id"))
        node = self._history.output_node(response_id)
        calls = () if node is None else node.message.tool_calls
        return calls[number].arguments if number < len(calls) else None

    def _add_call(self, item: JsonObject, arguments: str, tool_name: str = "") -> None:
        if not tool_name:
            name = read_text_field(item, "name")
            if not name:
                raise MessageError("name", item.get("name"), "a non-empty string")
            tool_name = qualified_tool_name(read_text_field(item, "namespace"), name)
        call = ToolCall(tool_name, arguments, read_text_field(item, "call_id"))
        self._reply_for_item("call", read_text_field(item, "id")).tool_calls.append(call)

    def _tool_output(self, item: JsonObject) -> None:
        # The output of a local shell has the call's id as its own.
        call_id = read_text_field(item, "call_id") or read_text_field(item, "id")
        fields = {"role": "tool", "tool_call_id": call_id, "content": _tool_result_content(item)}
        try:
            message = read_message(fields, "")
        except MessageError as error:
            path = error.field.replace("content", "output", 1)
            raise MessageError(path, error.value, error.expected) from None
        self._add_message(message)

    def _item_reference(self, item: JsonObject) -> None:
        id = read_text_field(item, "id")
        prefix, response_id, number = self._history.parse_item_id(id)
        node = self._history.output_node(response_id)
        if node is None:
            raise MessageError("id", id, "the id of an item of this session")
        message = node.message
        if prefix == "rs":
            reply = self._reply_for_item("reasoning", id)
            reply.reasoning_content += "" if number else message.reasoning_content
        elif prefix == "msg":
            # All text of an answer has number 0, also text after a tool call; a refusal has the next number.
            reply = self._reply_for_item("message", id)
            reply.parts += () if number else (message.content,)
            reply.refusal += message.refusal if number == bool(message.content) else ""
        else:
            self._reply_for_item("call", id).tool_calls += message.tool_calls[number : number + 1]

    def _agent_message(self, item: JsonObject) -> None:
        """A message between agents. A model here wrote it, so its encrypted part is plain text."""
        content = item.get("content")
        if isinstance(content, list):
            content = [_decode_encrypted_part(part) for part in content]
        self._add_message(read_message({"role": "user", "content": content}, ""))

    def _additional_tools(self, item: JsonObject) -> None:
        self.offered.add(read_openai_tools(item.get("tools")))


_VENDOR_ITEMS = frozenset(
    {
        *("code_interpreter_call", "computer_call", "computer_call_output", "file_search_call"),
        *("image_generation_call", "web_search_call", "tool_search_call", "tool_search_output"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
        *("compaction", "compaction_summary", "compaction_trigger", "context_compaction"),
        *("configuration_update", "program", "program_output", "ghost_snapshot", "other"),
    }
)
"""Items that are left out of the conversation and counted: only a vendor's own servers could handle them."""
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


def _tool_result_content(item: JsonObject) -> object:
    """The result of a call. A shell reports each command; a patch may report only its status."""
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
    entries = item.get(name) or []
    if not isinstance(entries, list):
        raise MessageError(name, entries, "a list of texts or null")
    texts: list[str] = []
    for index, entry in enumerate(entries):
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise MessageError(f"{name}[{index}].text", text, "a string")
        texts.append(text)
    return replace_surrogates("".join(texts))


def _to_json(value: object, name: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise MessageError(name, "…", "JSON that is nested less deeply") from None
