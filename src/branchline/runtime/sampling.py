"""Reads sampling parameters from the fields of a request body.

The session's own `sampling` overrides what a client sends, its `sampling_defaults` fill the gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchline.core.errors import MessageError
from branchline.engines.base import SamplingParams
from branchline.runtime.managed_session import SessionOptions

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
NO_LIMIT = 2**62
"""As a limit of an answer: nobody has said one, so it is the room that the prompt leaves."""
FALLBACK_MAX_TOKENS = 4096
"""How long an answer may be where nobody says, and the engine does not say how much it can hold."""
JsonObject = Mapping[str, Any]


def merge_sampling(body: object, options: SessionOptions) -> dict[str, Any]:
    """A body's fields: the session's sampling goes before the client's, its defaults behind."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    return {**options.sampling_defaults, **given, **options.sampling}


def read_sampling_params(
    given: JsonObject,
    max_tokens_name: str,
    *,
    default_max_tokens: int | None = None,
    max_tokens_limit: int | None = None,
) -> SamplingParams:
    """How to sample; every protocol calls these fields the same, but for two."""
    plain = SamplingParams()
    wanted = given.get("response_format")
    grammar = None if not wanted or wanted == {"type": "text"} else wanted
    if grammar is not None and not isinstance(grammar, dict):
        raise MessageError("response_format", grammar, "an object")
    return SamplingParams(
        max_tokens=_read_max_tokens(given, max_tokens_name, default_max_tokens, max_tokens_limit),
        temperature=read_number(given, "temperature", plain.temperature, 0, 100),
        top_p=read_number(given, "top_p", plain.top_p, 0, 1),
        top_k=max(0, read_int(given, "top_k", plain.top_k, -1, 2**31)),
        min_p=read_number(given, "min_p", plain.min_p, 0, 1),
        presence_penalty=read_number(given, "presence_penalty", plain.presence_penalty, -2, 2),
        frequency_penalty=read_number(given, "frequency_penalty", plain.frequency_penalty, -2, 2),
        repetition_penalty=read_number(given, "repetition_penalty", plain.repetition_penalty, 0.01, 100),
        seed=read_int(given, "seed", 0, -(2**63), 2**63) if "seed" in given else None,
        grammar=grammar,
    )


def _read_max_tokens(given: JsonObject, name: str, default: int | None, limit: int | None) -> int:
    most = NO_LIMIT if default is None else default
    if name in given:
        most = read_int(given, name, 0, 1, 2**31)
    return most if limit is None else min(most, limit)


def explicit_sampling(given: JsonObject, max_tokens_name: str) -> dict[str, Any]:
    """What was asked for in so many words, for an upstream that has its own defaults."""
    named = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    return {**named, "max_tokens": given[max_tokens_name]} if max_tokens_name in given else named


def read_number(given: JsonObject, name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise MessageError(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def read_int(given: JsonObject, name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MessageError(name, value, f"a whole number from {least} to {most}")
    return value


def read_bool(given: JsonObject, name: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise MessageError(name, value, "true or false")
    return value


def read_strings(given: JsonObject, name: str) -> tuple[str, ...]:
    value = given.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError(name, value, "a string or a list of strings")
    return tuple(text for text in value if text)
