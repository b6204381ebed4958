"""Values that cross between other people's code and a state: plain data, and nobody else's to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.core.json_fields import replace_surrogates_deep


def to_plain_data(value: Any, name: str) -> Any:
    """A copy that JSON can hold: numbers of numpy and torch, sets, dates, dataclasses become plain values.

    >>> to_plain_data({"seen": {3}, 1: (0.5, None)}, "extras")
    {'seen': [3], '1': [0.5, None]}
    """
    try:
        data = replace_surrogates_deep(msgspec.to_builtins(value, str_keys=True, enc_hook=encode_hook))
        # What is left to refuse: numbers that no encoding has room for.
        msgspec.msgpack.encode(data)
    except (InputError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{name}: {error}, expected values that JSON can hold") from error
    return data


def encode_hook(value: object) -> object:
    """What msgspec does not know itself, for its encoders."""
    if isinstance(value, Mapping):
        return dict(value)
    as_list = getattr(value, "tolist", None)
    if as_list is None:
        raise InputError(f"got a {type(value).__name__}")
    return as_list()


def copy_containers(value: Any) -> Any:
    """A value whose dicts, lists and sets nobody else holds, at any depth; all else is what it was.

    Samples of one task begin with the same arguments, and what one trajectory does to its own is no other's
    business. Anything that is no data, a connection say, is meant to be shared.
    """
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)([copy_containers(item) for item in value])
    return value


def check_finite(value: Any, name: str) -> float | None:
    """A number that can be trained on, or None."""
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {value}, expected a finite number")
    return number
