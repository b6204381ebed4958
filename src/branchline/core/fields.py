"""Fields of raw JSON objects, read so that a refusal names where it stood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchline.core.errors import InputError, MessageError


def inside(where: str, error: MessageError) -> MessageError:
    """The error as seen from further out."""
    field = error.field
    dot = "." if where and field else ""
    return MessageError(where + dot + field, error.value, error.expected)


def text_field(raw: Mapping[str, Any], name: str) -> str:
    """A string, or nothing where it is null or absent."""
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(name, value, "a string or null")
    return clean(value)


def clean_values(value: Any) -> Any:
    """A JSON value in which every text is clean."""
    try:
        return _clean_values(value)
    except RecursionError:
        raise InputError("got a JSON value, expected one that is not nested so deep") from None


def _clean_values(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {
            clean(key) if isinstance(key, str) else key: _clean_values(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean_values(item) for item in value]
    return value


def clean(text: str) -> str:
    """Text that UTF-8 can carry: JSON may hold half a surrogate pair, which no tokenizer and no file can."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
