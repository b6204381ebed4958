"""Decodes a request body's fields but leaves its list of messages as bytes for `MessageCache`.

An agent sends its whole history with every call, the same bytes except at the end. At 131k tokens, decoding
only new messages takes a quarter of the time of decoding all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from branchline.core.reader import decode_json


class BodyReader:
    """Reads bodies of one protocol: the items and `raw_fields` stay bytes, `fields` are decoded.

    >>> body = BodyReader("messages", ["model"]).read(b'{"model": "m", "messages": [{"role": "user"}]}')
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
        """The body as a mapping. One of another shape is decoded completely: its error then names a field."""
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
