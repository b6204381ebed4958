"""A cache of the messages that a session has parsed, by the hash of their JSON bytes.

An agent sends its whole history with every call. Messages whose bytes are known are not decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import xxhash
from msgspec import Raw

from branchline.core.errors import MessageError
from branchline.core.reader import decode_json

T = TypeVar("T")
_digest = xxhash.xxh3_128_digest
_FIELD_SEED = 1
"""Keeps the digest of a field apart from that of an item with the same bytes."""


def _decode_raw(raw: Raw) -> Any:
    """Decodes bytes that were not checked before, so they may be invalid JSON."""
    try:
        return decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError("body", bytes(raw)[:60], f"JSON ({error})") from error


class MessageCache:
    """Parsed values of one session by the digest of their bytes."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}

    def read_items(self, items: Sequence[Any], parse: Callable[[object, int], T]) -> list[T]:
        """Parses each item with `parse(item, index)` and caches those that are raw bytes.

        The index is for errors: the parsed value must depend on the item only.
        """
        values: list[T] = []
        for index, item in enumerate(items):
            if type(item) is not Raw:
                values.append(parse(item, index))
                continue
            digest = _digest(item)
            value = self._values.get(digest)
            if value is None:
                value = self._values[digest] = parse(_decode_raw(item), index)
            values.append(value)
        return values

    def read_field(self, raw: object, parse: Callable[[object], T]) -> T:
        """Parses one field of a body; cached if it is raw bytes."""
        if type(raw) is not Raw:
            return parse(raw)
        digest = _digest(raw, _FIELD_SEED)
        if digest not in self._values:
            self._values[digest] = parse(_decode_raw(raw))
        value: T = self._values[digest]
        return value

    def clear(self) -> None:
        self._values.clear()
