"""Messages that a session has read before, found by the hash of their bytes and not decoded again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash
from msgspec import Raw

from branchline.core.errors import MessageError
from branchline.core.json_fields import decode_json

T = TypeVar("T")
_digest = xxhash.xxh3_128_digest
_FIELD_SEED = 1
"""Keeps a field apart from an item of the same bytes."""


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

    def read_items(self, items: Sequence[Any], parse: Callable[[object, int], T]) -> list[T]:
        """Each item as `parse` reads it, which must look at nothing but the item; the place is for errors."""
        known = self._values
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
