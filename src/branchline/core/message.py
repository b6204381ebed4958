"""The canonical message: one type for the messages of every wire protocol.

A message's `key` is a hash of its meaning; messages with different keys are different messages. The key of an
assistant message omits what clients are known to change (reasoning, the order of parallel calls, surrounding
whitespace, a name); for equal keys, `tree.match` names each difference or reports an edit. Ids of responses
and tool calls are never part of a key.

Arguments of tool calls have a canonical form, so that arguments re-serialised by a client still compare
equal. Two argument texts mean the same call iff their canonical bytes are equal. Key order, spacing, escapes
and number spelling (`1.0` for `1`, as JavaScript writes it) are ignored; types count, so `1` is not `true`.
"""

from __future__ import annotations

import ast
import json
import math
import threading
import warnings
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any, Literal

import msgspec
import xxhash
from msgspec.structs import force_setattr

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


class Notation(IntEnum):
    """How an argument text was written; decides which equivalence an echo used."""

    JSON = 0
    EMPTY = 1
    """An empty text, which every client reads as `{}`."""
    PYTHON = 2
    """A Python literal (`{'a': False}`); tried only if the text is not JSON."""
    TEXT = 3
    """Free text, compared character by character."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool: its name and its arguments, as text and in canonical form."""

    name: str
    arguments: str = ""
    id: str = ""
    kind: str = "function"
    canonical_arguments: bytes = b""
    """Always computed from `arguments`, also on copies and replay."""
    notation: int = 0
    extra_fields: str = ""
    """Further fields that an upstream gave the call and needs back, as a JSON object; empty if none."""

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
    extra_fields: str = ""
    """Further fields that an upstream gave the message and needs back, as a JSON object; empty if none."""

    def __post_init__(self) -> None:
        role, text, reasoning, name = self.role, self.content, self.reasoning_content, self.name
        if role == "assistant":
            # Frameworks drop or add these; the echo matcher names each difference.
            text, reasoning, name = text.strip(), "", ""
        elif role == "tool":
            # Results pair with their calls by position and id, never by name.
            name = ""
        media = self.media if self.parts else ()
        if not (self.tool_calls or reasoning or name or self.refusal or media):
            # JSON can hold lone surrogates; they must neither raise nor all map to one key.
            key = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"), _TEXT_ONLY_SEEDS[role])
        else:
            calls = [(call.name, call.canonical_arguments) for call in self.tool_calls]
            if role == "assistant":
                calls.sort()
            content = _content_key(self.parts) if media else text
            fields = (role, content, reasoning, calls, self.refusal, name)
            try:
                data = _encode(fields)
            except UnicodeEncodeError:  # lone surrogates, which repr() escapes
                data = repr(fields).encode()
            key = xxhash.xxh3_128_digest(data, _STRUCTURED_SEED)
        force_setattr(self, "key", key)

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.tool_calls or self.reasoning_content or self.refusal or self.parts)


# A message with only a role and a text is hashed in one pass over the text; others are serialized first.
_TEXT_ONLY_SEEDS = {role: index for index, role in enumerate(ROLES)}
_STRUCTURED_SEED = 64


def _content_key(parts: tuple[str | Media, ...]) -> list[Any]:
    """Returns texts and media in order; how a text is split into parts does not count."""
    content: list[Any] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            content += (text, (part.kind, part.digest, part.detail))
            text = ""
    content.append(text)
    return content


_encode = msgspec.msgpack.Encoder().encode


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


# -- arguments of tool calls --------------------------------------------------------------------------

_MAX_LITERAL_CHARS = 100_000
# Every request repeats all earlier calls, so most short texts have been read before.
_CACHE_ENTRIES = 4096
_MAX_CACHED_CHARS = 1024


def canonical_arguments(text: str) -> tuple[bytes, Notation]:
    """Returns the canonical bytes of an argument text and its notation. Never raises.

    >>> canonical_arguments('{"b": 1.0, "a": true}')
    (b'{"a":true,"b":1}', <Notation.JSON: 0>)
    """
    try:
        return _canonicalize_cached(text) if len(text) <= _MAX_CACHED_CHARS else _canonicalize(text)
    except RecursionError:
        # Caught outside the cache: the error depends on the caller's stack depth, not on the text.
        return _canonical_text(text)


def canonical_json(value: Any) -> bytes:
    """Returns the canonical bytes of any JSON value (tool lists, template arguments).

    Raises TypeError or ValueError for a value that is not JSON, RecursionError for one nested too deep.
    """
    return _encode_canonical(_to_json_types(value))


def _canonicalize(text: str) -> tuple[bytes, Notation]:
    if not text or text.isspace():
        return b"{}", Notation.EMPTY
    try:
        return _encode_canonical(_parse_json(text)), Notation.JSON
    except ValueError:
        pass
    try:
        return _encode_canonical(_to_json_types(_parse_python_literal(text))), Notation.PYTHON
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return _canonical_text(text)


_canonicalize_cached = lru_cache(_CACHE_ENTRIES)(_canonicalize)


def _canonical_text(text: str) -> tuple[bytes, Notation]:
    return b"text:" + text.encode("utf-8", "surrogatepass"), Notation.TEXT


def _normalize_number(value: float | str) -> float | int:
    """Returns an integral float as an int: JSON has one number type, so `2.0` is `2`."""
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    return int(value) if value.is_integer() else value


_decode = msgspec.json.Decoder(float_hook=_normalize_number).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def _parse_json(text: str) -> Any:
    try:
        return _decode(text)
    except ValueError:
        # msgspec rejects lone surrogates, which clients do send.
        return json.loads(text, parse_float=_normalize_number, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Warning filters are process-wide: two threads that set and restore them concurrently would corrupt them.
_warnings_lock = threading.Lock()


def _parse_python_literal(text: str) -> Any:
    if len(text) > _MAX_LITERAL_CHARS:
        raise ValueError("too long for a literal")
    # Invalid escapes make the parser warn; warnings configured as errors must not change the result.
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = ast.literal_eval(text.strip())
    if not isinstance(value, dict | list):
        raise ValueError("not a dict or list")
    return value


def _encode_canonical(plain: Any) -> bytes:
    try:
        return _encode_sorted(plain)
    except UnicodeEncodeError:
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _to_json_types(value: Any) -> Any:
    """Returns the value in JSON types, with integral floats as integers."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{type(key).__name__} is not a JSON key")
        return {
            key: item if type(item) in _JSON_SCALARS else _to_json_types(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [item if type(item) in _JSON_SCALARS else _to_json_types(item) for item in value]
    if isinstance(value, float):
        return _normalize_number(value)
    if value is None or isinstance(value, int | str):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")


# Tool lists are converted on every request; these types need no conversion.
_JSON_SCALARS = frozenset((str, int, bool, type(None)))


def freeform_arguments(text: str) -> str:
    """Returns the JSON arguments that carry the input of a freeform tool.

    >>> freeform_arguments("a patch")
    '{"input":"a patch"}'
    """
    return msgspec.json.encode({"input": text}).decode()


def freeform_input(arguments: str) -> str:
    """Returns the input of a freeform tool from its JSON arguments; any other text is returned unchanged.

    >>> freeform_input('{"input": "a patch"}'), freeform_input('{"patch": 1}')
    ('a patch', '{"patch": 1}')
    """
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
