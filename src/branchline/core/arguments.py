"""Tool-call arguments reduced to what they mean, so that a client may re-serialise them.

Two argument texts are the same call iff their canonical bytes are equal: key order, spacing, escapes and
number spelling (`1.0` for `1`, as JavaScript writes it) do not count; types do, so `1` is not `true`.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from enum import IntEnum
from typing import Any

import msgspec

_EXACT_INTEGERS = 2**53
_LITERAL_LIMIT = 100_000


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
    if not text or text.isspace():
        return b"{}", Notation.EMPTY
    try:
        return _canonical_json(_load(text)), Notation.JSON
    except (ValueError, RecursionError):
        pass
    try:
        return _canonical_json(_load_literal(text)), Notation.PYTHON
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return b"text:" + text.encode("utf-8", "surrogatepass"), Notation.TEXT


def canonical_json(value: Any) -> bytes:
    """The canonical bytes of any JSON value (tool lists, template arguments)."""
    return _canonical_json(value)


def _load(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        # What msgspec refuses and clients still send: lone surrogates, huge integers.
        return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _load_literal(text: str) -> Any:
    if len(text) > _LITERAL_LIMIT:
        raise ValueError("too long for a literal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        value = ast.literal_eval(text.strip())
    if not isinstance(value, dict | list):
        raise ValueError("not a structure")
    return value


def _canonical_json(value: Any) -> bytes:
    plain = _plain(value)
    try:
        return msgspec.json.encode(plain, order="sorted")
    except (TypeError, UnicodeEncodeError, OverflowError):
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    """The value with integral floats as integers; JSON knows one kind of number."""
    if isinstance(value, dict):
        return {_plain_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not JSON")
        if value.is_integer() and abs(value) < _EXACT_INTEGERS:
            return int(value)
        return value
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{type(key).__name__} is not a JSON key")
    return key
