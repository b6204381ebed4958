"""Request bodies, read once: what a session has read before is known by its bytes and not read again.

An agent sends its whole history with every call, the same bytes but for the end. A body's items (its
messages) are left as bytes, found by their hash, and only new ones are decoded. At 131k tokens that is a
quarter of the time of decoding and reading everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash
from msgspec import Raw

from branchline.core.errors import MessageError
from branchline.core.json_fields import replace_surrogates_deep

T = TypeVar("T")
_digest = xxhash.xxh3_128_digest
_FIELD_SEED = 1
"""Keeps a field apart from an item of the same bytes."""


def decode_json(data: bytes | Raw) -> Any:
    """A JSON value. Half an emoji, which JavaScript writes where it cuts a text, is no reason to refuse; but
    from here on every text is one that UTF-8 can carry."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        text = bytes(data)
        if b"\\ud" not in text.lower():
            raise
        try:
            return replace_surrogates_deep(json.loads(text, parse_constant=_reject_constant))
        except ValueError:
            raise error from None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class BodyReader:
    """Reads bodies of one protocol: `items` and what is `kept` stay bytes, the other fields are decoded.

    >>> body = BodyReader("messages", ["model"]).read_items(b'{"model": "m", "messages": [{"role": "user"}]}')
    >>> body["model"], bytes(body["messages"][0])
    ('m', b'{"role": "user"}')
    """

    def __init__(self, items_field: str, fields: Sequence[str], raw_fields: Sequence[str] = ()) -> None:
        self._items_field = items_field
        self._fields = tuple(fields)
        self._raw_fields = tuple(raw_fields)
        shape = msgspec.defstruct(
            "Body",
            [
                (items_field, list[Raw] | None, None),
                *((name, Raw, msgspec.field(default=Raw())) for name in (*fields, *raw_fields)),
            ],
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(shape)

    def read(self, data: bytes) -> object:
        """The body as a mapping. One of another shape is decoded whole, for somebody to refuse it by name."""
        try:
            found = self._decoder.decode(data)
        except msgspec.DecodeError:
            return decode_json(data)
        body: dict[str, Any] = {
            name: decode_json(raw) for name in self._fields if (raw := getattr(found, name))
        }
        body.update((name, raw) for name in self._raw_fields if (raw := getattr(found, name)))
        body[self._items_field] = getattr(found, self._items_field)
        return body


def _decode_raw(raw: Raw) -> Any:
    """What was left as bytes is looked at late, and may turn out to be no JSON then."""
    try:
        return decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError("body", bytes(raw)[:60], f"JSON ({error})") from error


class MessageCache:
    """What a session has read, by the bytes it came as."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}
        self.new_bytes = 0
        """Of the last reading: how much was not known."""

    def read_items(self, items: Sequence[Any], parse: Callable[[object, int], T]) -> list[T]:
        """Each item as `parse` reads it, which must look at nothing but the item; the place is for errors."""
        known, self.new_bytes = self._values, 0
        found: list[T] = []
        for place, item in enumerate(items):
            if type(item) is not Raw:
                found.append(parse(item, place))
                continue
            digest = _digest(item)
            value = known.get(digest)
            if value is None:
                value = parse(_decode_raw(item), place)
                known[digest] = value
                self.new_bytes += len(memoryview(item))
            found.append(value)
        return found

    def read_field(self, given: object, parse: Callable[[object], T]) -> T:
        """One field of a body as `parse` reads it."""
        if type(given) is not Raw:
            return parse(given)
        digest = _digest(given, _FIELD_SEED)
        if digest not in self._values:
            self._values[digest] = parse(_decode_raw(given))
        found: T = self._values[digest]
        return found

    def clear(self) -> None:
        self._values.clear()
