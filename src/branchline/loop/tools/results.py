"""What a plain function returns, as a tool result: text as it is, data as JSON, pictures as media.

Bytes are media and are known by how they begin; bytes that begin otherwise are refused, because a guess
would show the model something else than the tool meant.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from branchline.core.message import Media, MediaKind
from branchline.loop.tools.base import ToolResult

_MAGIC_BYTES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
)


def to_tool_result(value: Any) -> ToolResult:
    """A tool result from whatever a function returned.

    >>> to_tool_result({"price": 3}).text
    '{"price":3}'
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, list | tuple) and any(isinstance(item, Media | bytes) for item in value):
        return _mixed_result(value)
    if isinstance(value, Media | bytes):
        return _mixed_result((value,))
    return ToolResult(_text(value))


def media_from_bytes(payload: bytes, mime: str = "") -> Media:
    """Media from bytes; the type is read from how they begin where it is not given."""
    mime = mime or _detect_mime(payload)
    return Media(_media_kind(mime), xxhash.xxh3_128_hexdigest(payload), payload, mime=mime)


def _mixed_result(items: list[Any] | tuple[Any, ...]) -> ToolResult:
    media = tuple(
        item if isinstance(item, Media) else media_from_bytes(item)
        for item in items
        if isinstance(item, Media | bytes)
    )
    texts = [_text(item) for item in items if not isinstance(item, Media | bytes)]
    return ToolResult("\n".join(texts), media)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json_encoder.encode(value).decode()


def _encode_hook(value: object) -> object:
    """Numbers and arrays of numpy and torch; whatever else is no data is refused."""
    plain = getattr(value, "tolist", None)
    if plain is None:
        raise TypeError(
            f"the tool returned {type(value).__name__}, expected a text, values that JSON can hold, or media"
        )
    return plain()


_json_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)


def _detect_mime(payload: bytes) -> str:
    for place, beginning, mime in _MAGIC_BYTES:
        if payload.startswith(beginning, place):
            return mime
    raise TypeError(f"bytes that begin {payload[:8]!r}: expected a PNG, JPEG, GIF, WebP, MP4 or WebM")


def _media_kind(mime: str) -> MediaKind:
    kind = mime.partition("/")[0]
    return kind if kind in ("image", "video", "audio") else "file"  # type: ignore[return-value]
