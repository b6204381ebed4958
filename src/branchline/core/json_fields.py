"""Reading fields of raw JSON objects, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from branchline.core.errors import InputError, MessageError


def prefix_error(prefix: str, error: MessageError) -> MessageError:
    """Returns the error with `prefix` before its field name."""
    field = error.field
    dot = "." if prefix and field else ""
    return MessageError(prefix + dot + field, error.value, error.expected)


def read_text_field(raw: Mapping[str, Any], name: str) -> str:
    """Returns a string field, or "" if it is null or absent."""
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(name, value, "a string or null")
    return value if value.isascii() else replace_surrogates(value)


def replace_surrogates_deep(value: Any) -> Any:
    """Returns a JSON value with `replace_surrogates` applied to every text."""
    try:
        return _replace_surrogates_deep(value)
    except RecursionError:
        raise InputError("got a JSON value that is nested too deep, expected less nesting") from None


def _replace_surrogates_deep(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {
            replace_surrogates(key) if isinstance(key, str) else key: _replace_surrogates_deep(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_surrogates_deep(item) for item in value]
    return value


def replace_surrogates(text: str) -> str:
    """Returns text that UTF-8 can encode: JSON may hold half a surrogate pair, which tokenizers reject."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_json(data: bytes | msgspec.Raw) -> Any:
    """Decodes JSON. Half a surrogate pair, which JavaScript writes when it cuts a text, is replaced."""
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
    raise ValueError(f"{name} is not JSON")
