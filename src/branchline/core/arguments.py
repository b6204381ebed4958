"""Tool-call arguments reduced to what they mean, so that a client may re-serialise them.

Two argument texts are the same call iff their canonical bytes are equal: key order, spacing, escapes and
number spelling (`1.0` for `1`, as JavaScript writes it) do not count; types do, so `1` is not `true`.
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
# Every request sends all earlier calls again, so most short texts have been read before.
_CACHE_ENTRIES = 4096
_MAX_CACHED_CHARS = 1024


class Notation(IntEnum):
    """How an argument text was written; it says which equivalence an echo used."""

    JSON = 0
    EMPTY = 1
    """Nothing at all, which every client reads as `{}`."""
    PYTHON = 2
    """A Python literal (`{'a': False}`), looked at only where JSON fails."""
    TEXT = 3
    """Free text: compared letter by letter."""


def canonical_arguments(text: str) -> tuple[bytes, Notation]:
    """The meaning of an argument text, and the notation it was found in.

    >>> canonical_arguments('{"b": 1.0, "a": true}')
    (b'{"a":true,"b":1}', <Notation.JSON: 0>)
    """
    try:
        return _canonicalize_cached(text) if len(text) <= _MAX_CACHED_CHARS else _canonicalize(text)
    except RecursionError:
        # Caught out here, so that it is never remembered: it tells of the caller's stack, not of the text.
        return _canonical_text(text)


def canonical_json(value: Any) -> bytes:
    """The canonical bytes of any JSON value (tool lists, template arguments).

    What is no JSON raises TypeError or ValueError, what is nested too deep RecursionError.
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
    """A number that is not spelled as an integer; JSON has one kind of number, so `2.0` is `2`."""
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
        # What msgspec refuses and clients still send: lone surrogates.
        return json.loads(text, parse_float=_normalize_number, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Warning filters belong to the process: two threads that set and restore them at once would mix them up.
_warnings_lock = threading.Lock()


def _parse_python_literal(text: str) -> Any:
    if len(text) > _MAX_LITERAL_CHARS:
        raise ValueError("too long for a literal")
    # Odd escapes make the parser warn, and how a process treats warnings must not decide what a text means.
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = ast.literal_eval(text.strip())
    if not isinstance(value, dict | list):
        raise ValueError("not a structure")
    return value


def _encode_canonical(plain: Any) -> bytes:
    try:
        return _encode_sorted(plain)
    except UnicodeEncodeError:
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _to_json_types(value: Any) -> Any:
    """The value in JSON's own types, with integral floats as integers."""
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


# Tool lists are walked on every request: what needs no change is not even asked twice.
_JSON_SCALARS = frozenset((str, int, bool, type(None)))


def freeform_arguments(text: str) -> str:
    """The arguments that mean an input of a freeform tool.

    >>> freeform_arguments("a patch")
    '{"input":"a patch"}'
    """
    return msgspec.json.encode({"input": text}).decode()


def freeform_input(arguments: str) -> str:
    """The input of a freeform tool out of the arguments a model wrote; what is nothing of the kind stays.

    >>> freeform_input('{"input": "a patch"}'), freeform_input('{"patch": 1}')
    ('a patch', '{"patch": 1}')
    """
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
