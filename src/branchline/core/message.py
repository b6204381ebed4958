"""The canonical message: one shape for what every wire protocol calls a message.

A message's `key` says what it means. Two messages of equal key are candidates for being the same message;
an assistant's key leaves out what clients are known to change on the way (reasoning, the order of parallel
calls, surrounding whitespace, a name), and `core.echo` then names each difference or calls it an edit. Ids of
responses and tool calls are never part of a key.
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
    """How a message was written on the wire where that carries no meaning; an echo may differ in it."""

    PLAIN = 0
    NULL_CONTENT = 1
    ABSENT_CONTENT = 2
    PART_LIST = 4
    NULL_CALLS = 8
    EMPTY_CALLS = 16


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An image, video, sound or file: a digest that identifies it and a payload that travels along."""

    kind: MediaKind
    digest: str
    payload: bytes = b""
    """The bytes, where the client sent them; empty where it sent a link."""
    url: str = ""
    mime: str = ""
    detail: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool: its name and its arguments, as text and as meaning."""

    name: str
    arguments: str = ""
    id: str = ""
    kind: str = "function"
    canonical_arguments: bytes = b""
    """Canonical arguments; always made from `arguments`, on copies and replay too."""
    notation: int = 0

    def __post_init__(self) -> None:
        meaning, notation = canonical_arguments(self.arguments)
        force_setattr(self, "canonical_arguments", meaning)
        force_setattr(self, "notation", int(notation))

    @property
    def is_json(self) -> bool:
        return self.notation in (Notation.JSON, Notation.EMPTY)


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, free of any protocol's spelling.

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
    """The tool call this message is the result of, by its id on the wire."""
    parts: tuple[str | Media, ...] = ()
    """Content in order, where it is more than one text; `text` holds its texts joined."""
    id: str = ""
    """The message's or response's id on the wire, where the protocol has one."""
    wire_shape: int = 0
    key: bytes = b""
    """128 bits of meaning; always made from the fields above, on copies and replay too."""

    def __post_init__(self) -> None:
        force_setattr(self, "key", _message_key(self))

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.tool_calls or self.reasoning_content or self.refusal or self.parts)


# The plain case, a role and a text, is hashed in one pass over the text; everything else is framed first.
_TEXT_ONLY_SEEDS = {role: index for index, role in enumerate(ROLES)}
_STRUCTURED_SEED = 64


def _message_key(message: Message) -> bytes:
    role, text, reasoning, name = message.role, message.content, message.reasoning_content, message.name
    if role == "assistant":
        # What frameworks drop or add on the way back; the echo matcher names each.
        text, reasoning, name = text.strip(), "", ""
    elif role == "tool":
        # Results are paired with their calls by position and id; the name on them is decoration.
        name = ""
    media = message.media if message.parts else ()
    if not (message.tool_calls or reasoning or name or message.refusal or media):
        return xxhash.xxh3_128_digest(_utf8(text), _TEXT_ONLY_SEEDS[role])
    calls = [(_utf8(call.name), call.canonical_arguments) for call in message.tool_calls]
    if role == "assistant":
        calls.sort()
    content = _content_key(message.parts) if media else _utf8(text)
    framed = (role, content, _utf8(reasoning), calls, _utf8(message.refusal), _utf8(name))
    return xxhash.xxh3_128_digest(_encode(framed), _STRUCTURED_SEED)


def _content_key(parts: tuple[str | Media, ...]) -> list[Any]:
    """Media in their places between the texts; where one text was cut into several does not count."""
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
    # JSON can carry lone surrogates; they must neither raise nor collapse into one key.
    return text.encode("utf-8", "surrogatepass")


def is_same_message(one: Message, other: Message) -> bool:
    """Whether two context messages are the same, reasoning, order and whitespace included."""
    if one.key != other.key:
        return False
    # Only an assistant's key leaves things out.
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
