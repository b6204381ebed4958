"""Canonical form of tool-call arguments, so that arguments re-serialised by a client still compare equal.

Two argument texts mean the same call iff their canonical bytes are equal. Key order, spacing, escapes and
number spelling (`1.0` for `1`, as JavaScript writes it) are ignored; types count, so `1` is not `true`.
"""

from __future__ import annotations

import ast
import json
import math
import threading
import warnings
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgspec

_MAX_LITERAL_CHARS = 100_000
# Every request repeats all earlier calls, so most short texts have been read before.
_CACHE_ENTRIES = 4096
_MAX_CACHED_CHARS = 1024


class Notation(IntEnum):
    """How an argument text was written; decides which equivalence an echo used."""

    JSON = 0
    EMPTY = 1
    """An empty text, which every client reads as `{}`."""
    PYTHON = 2
    """A Python literal (`{'a': False}`); tried only if the text is not JSON."""
    TEXT = 3
    """Free text, compared character by character."""


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
