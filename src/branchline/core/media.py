"""Reads and writes content parts that hold an image, audio, a video or a file.

The digest identifies the bytes, whatever their encoding on the wire; a link is identified by its URL.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import xxhash

from branchline.core.errors import MessageError
from branchline.core.json_fields import prefix_error, read_text_field, replace_surrogates
from branchline.core.message import Media, MediaKind

MEDIA_PART_KINDS: dict[str, MediaKind] = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "audio_url": "audio",
    "audio": "audio",
    "input_audio": "audio",
    "file": "file",
    "input_file": "file",
}
"""Content part types that hold media, and their kind."""
_DATA_FIELDS = ("data", "file_data", "input_audio")
_LINK_FIELDS = ("url", "file_id", "path")


def read_media_part(part: Mapping[str, Any], part_type: str) -> Media:
    """Reads the media of a content part."""
    kind = MEDIA_PART_KINDS[part_type]
    # The data is beside the type, or in a nested object.
    names = (part_type, f"{kind}_url", kind)
    nested = next((name for name in (*names, "source") if isinstance(part.get(name), dict)), "")
    try:
        return _read_media(part[nested] if nested else part, kind, names)
    except MessageError as error:
        raise prefix_error(nested, error) from None


def _read_media(body: Mapping[str, Any], kind: MediaKind, names: Sequence[str]) -> Media:
    for name in (*_DATA_FIELDS, *_LINK_FIELDS, *names):
        source = body.get(name)
        if isinstance(source, str) and source:
            source = replace_surrogates(source)
            break
    else:
        raise MessageError("", body, f"{kind} data: a url, a data url, or base64 data")
    detail = read_text_field(body, "detail")
    mime = (
        read_text_field(body, "mime_type")
        or read_text_field(body, "media_type")
        or read_text_field(body, "format")
    )
    if source.startswith("data:"):
        mime, payload = _read_data_url(source, name)
    elif name in _DATA_FIELDS and "://" not in source:
        payload = _decode_base64(source, name)
        mime = mime if "/" in mime or not mime else f"{kind}/{mime}"
    else:
        return Media(kind, digest="url:" + source, url=source, mime=mime, detail=detail)
    return Media(kind, xxhash.xxh3_128_hexdigest(payload), payload, mime=mime, detail=detail)


def _read_data_url(url: str, name: str) -> tuple[str, bytes]:
    head, comma, data = url[len("data:") :].partition(",")
    mime, *options = head.split(";")
    plain = unquote_to_bytes(data.encode("utf-8", "surrogatepass"))
    if not comma or not plain:
        raise MessageError(name, url, "a data url with data after a comma")
    return mime, _decode_base64(plain, name) if "base64" in options else plain


def _decode_base64(text: str | bytes, name: str) -> bytes:
    """Decodes base64 with or without line breaks and padding, in the standard or the URL-safe alphabet."""
    data = b"".join((text.encode("utf-8", "replace") if isinstance(text, str) else text).split())
    data = data.rstrip(b"=").translate(_URL_SAFE_TO_STANDARD)
    try:
        payload = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error:
        payload = b""
    if not payload:
        raise MessageError(name, text, "base64 data")
    return payload


_URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


def write_part(part: str | Media) -> dict[str, Any]:
    """Returns a content part in Chat Completions form."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    source = part.url
    if not source:
        mime = part.mime.partition(",")[0].partition(";")[0] or "application/octet-stream"
        source = f"data:{mime};base64,{base64.b64encode(part.payload).decode()}"
    kind, name = f"{part.kind}_url", "url"
    if part.kind == "file":
        kind, name = "file", "file_id" if part.url else "file_data"
    body = {name: source, "detail": part.detail} if part.detail else {name: source}
    return {"type": kind, kind: body}
