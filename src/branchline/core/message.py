"""The canonical message: one type for the messages of every wire protocol.

A message's `key` is a hash of its meaning; messages with different keys are different messages. The key of an
assistant message omits what clients are known to change (reasoning, the order of parallel calls, surrounding
whitespace, a name); for equal keys, `core.echo` names each difference or reports an edit. Ids of responses
and tool calls are never part of a key.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any, Literal

import msgspec
import xxhash
from msgspec.structs import force_setattr

from branchline.core.arguments import Notation, canonical_arguments

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool", "function")

MediaKind = Literal["image", "video", "audio", "file"]


class WireShape(IntFlag):
    """Details of the wire form that carry no meaning; an echo may differ in them."""

    PLAIN = 0
    NULL_CONTENT = 1
    ABSENT_CONTENT = 2
    PART_LIST = 4
    NULL_CALLS = 8
    EMPTY_CALLS = 16


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An image, video, audio or file: a digest that identifies it, and its payload or URL."""

    kind: MediaKind
    digest: str
    payload: bytes = b""
    """The bytes; empty if the client sent a link."""
    url: str = ""
    mime: str = ""
    detail: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool: its name and its arguments, as text and in canonical form."""

    name: str
    arguments: str = ""
    id: str = ""
    kind: str = "function"
    canonical_arguments: bytes = b""
    """Always computed from `arguments`, also on copies and replay."""
    notation: int = 0

    def __post_init__(self) -> None:
        canonical, notation = canonical_arguments(self.arguments)
        force_setattr(self, "canonical_arguments", canonical)
        force_setattr(self, "notation", int(notation))

    @property
    def is_json(self) -> bool:
        return self.notation in (Notation.JSON, Notation.EMPTY)


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, independent of the wire protocol.

    >>> Message("user", "hi").key == Message("user", "hi", id="msg_1").key
    True
    """

    role: Role
    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    refusal: str = ""
    name: str = ""
    tool_call_id: str = ""
    """The wire id of the tool call that this message is the result of."""
    parts: tuple[str | Media, ...] = ()
    """The content parts in order, if there is more than one text; `content` holds their texts joined."""
    id: str = ""
    """The wire id of the message or response, if the protocol has one."""
    wire_shape: int = 0
    key: bytes = b""
    """A 128-bit hash of the meaning; always computed from the fields above, also on copies and replay."""

    def __post_init__(self) -> None:
        force_setattr(self, "key", _message_key(self))

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.tool_calls or self.reasoning_content or self.refusal or self.parts)


# A message with only a role and a text is hashed in one pass over the text; others are serialized first.
_TEXT_ONLY_SEEDS = {role: index for index, role in enumerate(ROLES)}
_STRUCTURED_SEED = 64


def _message_key(message: Message) -> bytes:
    role, text, reasoning, name = message.role, message.content, message.reasoning_content, message.name
    if role == "assistant":
        # Frameworks drop or add these; the echo matcher names each difference.
        text, reasoning, name = text.strip(), "", ""
    elif role == "tool":
        # Results pair with their calls by position and id, never by name.
        name = ""
    media = message.media if message.parts else ()
    if not (message.tool_calls or reasoning or name or message.refusal or media):
        return xxhash.xxh3_128_digest(_utf8(text), _TEXT_ONLY_SEEDS[role])
    calls = [(_utf8(call.name), call.canonical_arguments) for call in message.tool_calls]
    if role == "assistant":
        calls.sort()
    content = _content_key(message.parts) if media else _utf8(text)
    fields = (role, content, _utf8(reasoning), calls, _utf8(message.refusal), _utf8(name))
    return xxhash.xxh3_128_digest(_encode(fields), _STRUCTURED_SEED)


def _content_key(parts: tuple[str | Media, ...]) -> list[Any]:
    """Returns texts and media in order; how a text is split into parts does not count."""
    content: list[Any] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            content += (_utf8(text), (part.kind, _utf8(part.digest), _utf8(part.detail)))
            text = ""
    content.append(_utf8(text))
    return content


_encode = msgspec.msgpack.Encoder().encode


def _utf8(text: str) -> bytes:
    # JSON can hold lone surrogates; they must neither raise nor all map to one key.
    return text.encode("utf-8", "surrogatepass")


def is_same_message(one: Message, other: Message) -> bool:
    """Whether two context messages are equal, including reasoning, order of calls and whitespace."""
    if one.key != other.key:
        return False
    # Only an assistant's key omits fields.
    return one.role != "assistant" or (
        one.content == other.content
        and one.reasoning_content == other.reasoning_content
        and one.name == other.name
        and (
            one.tool_calls == other.tool_calls
            or [(call.name, call.canonical_arguments) for call in one.tool_calls]
            == [(call.name, call.canonical_arguments) for call in other.tool_calls]
        )
    )
