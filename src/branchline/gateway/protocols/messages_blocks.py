"""Content blocks of Anthropic's Messages ⇄ canonical messages.

A turn becomes the same messages that Chat Completions would give: each tool result is a message of its own,
before the rest of the user's turn; thinking becomes the reasoning and tool use the tool calls of an assistant
message. A block of any other type (tools that ran on other servers, future types) gives the text in it, or
nothing, and is never refused. What is written here is read back as the same message: arguments that are not
an object are wrapped and unwrapped, and a signature of thinking names the response that it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from branchline.core.errors import MessageError
from branchline.core.message import Media, Message, Notation, Role, ToolCall
from branchline.core.reader import prefix_error, read_media_part, read_text_field, replace_surrogates

Block = dict[str, Any]
ContentPart = str | Media

ROLES: tuple[Role, ...] = ("user", "assistant", "system")
"""`system` inside the conversation is sent by Claude Code between turns; it keeps its position."""
BILLING_PREFIX = "x-anthropic-billing-header:"
"""The start of lines in Claude Code's system prompt that are for billing and may change with every call."""
RAW_ARGUMENTS_KEY = "__raw_arguments__"
"""The only key of an input that wraps arguments which are not a JSON object."""

_SIGNATURE_PREFIX = "branchline."


# -- turns -------------------------------------------------------------------------------------------


def read_system(raw: object) -> list[Message]:
    """The system message, [] if there is none, without the lines for billing."""
    content = [] if raw is None else _read_content(raw, "system", _read_block)
    parts = [_strip_billing_lines(part) if isinstance(part, str) else part for part in content]
    parts = [part for part in parts if part]
    return [_message("system", parts)] if parts else []


def _strip_billing_lines(text: str) -> str:
    while text.startswith(BILLING_PREFIX):
        _, _, text = text.partition("\n")
    return text


def read_conversation(raw: object) -> list[Message]:
    """The messages of the conversation.

    >>> result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    >>> [message.role for message in read_conversation([{"role": "user", "content": [result, "and now?"]}])]
    ['tool', 'user']
    """
    if not isinstance(raw, list) or not raw:
        raise MessageError("messages", raw, "a non-empty list of messages")
    messages: list[Message] = []
    for index, turn in enumerate(raw):
        try:
            messages += _read_turn(turn)
        except MessageError as error:
            raise prefix_error(f"messages[{index}]", error) from None
    return messages


def _read_turn(raw: object) -> list[Message]:
    if not isinstance(raw, dict):
        raise MessageError("", raw, "an object")
    role, content = raw.get("role"), raw.get("content")
    if role not in ROLES:
        raise MessageError("role", role, "one of " + ", ".join(ROLES))
    if isinstance(content, str):
        return [Message(role, replace_surrogates(content))]
    return [_read_assistant(content)] if role == "assistant" else _read_user_or_system(role, content)


def _read_assistant(content: object) -> Message:
    thinking: list[str] = []
    response_ids: list[str] = []
    calls: list[ToolCall] = []

    def read(block: Block) -> list[ContentPart]:
        if block["type"] == "tool_use":
            calls.append(_read_tool_use(block))
        elif block["type"] == "thinking":
            thinking.append(read_text_field(block, "thinking"))
            response_ids.append(signed_response_id(read_text_field(block, "signature"), thinking[-1]))
        else:
            return _read_block(block)
        return []

    parts = _read_content(content, "content", read)
    return _message(
        "assistant",
        parts,
        reasoning_content="".join(thinking),
        tool_calls=tuple(calls),
        id=next(filter(None, response_ids), ""),
    )


def _read_user_or_system(role: Role, content: object) -> list[Message]:
    """Tool results come first: templates expect them right after their calls."""
    results: list[Message] = []

    def read(block: Block) -> list[ContentPart]:
        if block["type"] != "tool_result":
            return _read_block(block)
        results.append(_read_tool_result(block))
        return []

    parts = _read_content(content, "content", read)
    return results if results and not parts else [*results, _message(role, parts)]


def _message(role: Role, parts: Sequence[ContentPart], **more: Any) -> Message:
    text = "".join([part for part in parts if isinstance(part, str)])
    if len(parts) < 2 and not any(isinstance(part, Media) for part in parts):
        parts = ()
    return Message(role, text, parts=tuple(parts), **more)


# -- blocks ------------------------------------------------------------------------------------------


def _read_content(
    content: object, name: str, read: Callable[[Block], list[ContentPart]]
) -> list[ContentPart]:
    """The parts in a text or a list of blocks."""
    if isinstance(content, str):
        return [replace_surrogates(content)] if content else []
    if not isinstance(content, list):
        raise MessageError(name, content, "a string or a list of content blocks")
    parts: list[ContentPart] = []
    for index, block in enumerate(content):
        try:
            parts += read(_as_block(block))
        except MessageError as error:
            raise prefix_error(f"{name}[{index}]", error) from None
    return parts


def _as_block(block: object) -> Block:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, dict):
        raise MessageError("", block, "a content block (an object with a type)")
    if not isinstance(block.get("type"), str):
        raise MessageError("type", block.get("type"), "the name of a block's type")
    return block


def _read_block(block: Block) -> list[ContentPart]:
    return _read_document(block) if block["type"] == "document" else _read_leaf_block(block)


def _read_text_or_image(block: Block) -> list[ContentPart]:
    if block["type"] == "image":
        _read_source(block)
        return [read_media_part(block, "image")]
    if not isinstance(block.get("text"), str):
        raise MessageError("text", block.get("text"), "a string")
    return [replace_surrogates(block["text"])]


def _read_source(block: Block) -> Block:
    source = block.get("source")
    if not isinstance(source, dict):
        raise MessageError("source", source, "an object with data, a url or a file_id")
    return source


def _read_document(block: Block) -> list[ContentPart]:
    """A document's text after its title and context; a document that is not text stays a file."""
    source = _read_source(block)
    if source.get("type") == "text":
        body: list[ContentPart] = [read_text_field(source, "data")]
    elif source.get("type") == "content":
        try:
            # Texts and images only: documents are not nested.
            body = _read_content(source.get("content"), "content", _read_leaf_block)
        except MessageError as error:
            raise prefix_error("source", error) from None
    else:
        body = [read_media_part(block, "file")]
    head = [text for name in ("title", "context") if (text := read_text_field(block, name))]
    return ["\n".join([*head, ""]), *body] if head else body


def _read_leaf_block(block: Block) -> list[ContentPart]:
    return _read_text_or_image(block) if block["type"] in ("text", "image") else _fallback_text(block)


def _fallback_text(block: Block) -> list[ContentPart]:
    """The texts in a block of a type that canonical messages do not have."""
    content = block.get("content")
    inner = [block, *content] if isinstance(content, list) else [block, {"text": content}]
    texts = [item.get("text") for item in inner if isinstance(item, dict)]
    return [replace_surrogates(text) for text in texts if isinstance(text, str)]


# -- tools -------------------------------------------------------------------------------------------


def _read_tool_use(block: Block) -> ToolCall:
    name, value = block.get("name"), block.get("input")
    if not isinstance(name, str) or not name:
        raise MessageError("name", name, "a non-empty string")
    if value is not None and not isinstance(value, dict):
        raise MessageError("input", value, "an object")
    arguments = value.get(RAW_ARGUMENTS_KEY) if value and len(value) == 1 else None
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(value or {}, separators=(",", ":"), ensure_ascii=False)
        except RecursionError:
            raise MessageError("input", "an object", "an object that is nested less deeply") from None
    return ToolCall(replace_surrogates(name), replace_surrogates(arguments), read_text_field(block, "id"))


def _read_tool_result(block: Block) -> Message:
    content = block.get("content")
    parts = [] if content is None else _read_content(content, "content", _read_block)
    # Canonical results have no error flag, so an error without content gets a text.
    if not parts and block.get("is_error") is True:
        parts = ["error"]
    return _message("tool", parts, tool_call_id=read_text_field(block, "tool_use_id"))


def input_json(call: ToolCall) -> str:
    """A call's arguments as a JSON object, which the protocol requires; unchanged if they are one.

    >>> input_json(ToolCall("look", '{"at": 1}')), input_json(ToolCall("look", "north"))
    ('{"at": 1}', '{"__raw_arguments__":"north"}')
    """
    text = (
        call.arguments
        if call.notation == Notation.JSON
        else call.canonical_arguments.decode("utf-8", "replace")
    )
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if isinstance(value, dict) and list(value) != [RAW_ARGUMENTS_KEY]:
        return text
    return msgspec.json.encode({RAW_ARGUMENTS_KEY: call.arguments}).decode()


def tool_use_block(call: ToolCall, arguments: str = "{}") -> Block:
    """A tool use block; a streamed one starts with an empty input."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(arguments.encode())}


# -- thinking ----------------------------------------------------------------------------------------


def sign_thinking(call_id: str, thinking: str) -> str:
    """A signature that names the response of a thinking block and detects changes of its text."""
    return f"{_SIGNATURE_PREFIX}{call_id}.{xxhash.xxh3_64_hexdigest(f'{call_id}.{thinking}'.encode())}"


def signed_response_id(signature: str, thinking: str) -> str:
    """The response that a thinking block belongs to; "" if the signature is not ours or the text changed.

    >>> signature = sign_thinking("msg_1", "hm")
    >>> signed_response_id(signature, "hm"), signed_response_id(signature, "aha")
    ('msg_1', '')
    """
    call_id = signature.rpartition(".")[0].removeprefix(_SIGNATURE_PREFIX)
    return call_id if signature == sign_thinking(call_id, thinking) else ""


def write_blocks(message: Message, call_id: str) -> list[Block]:
    """An answer as content blocks."""
    blocks: list[Block] = []
    if message.reasoning_content:
        signature = sign_thinking(call_id, message.reasoning_content)
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": signature})
    if text := message.content + message.refusal:
        # A refusal has no block type of its own: the stop reason marks it.
        blocks.append({"type": "text", "text": text})
    return blocks + [tool_use_block(call, input_json(call)) for call in message.tool_calls]
