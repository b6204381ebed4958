"""Reads sampling parameters from the fields of a request body.

The session's `sampling` overrides the fields of a request; its `sampling_defaults` apply to missing ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchline.core.errors import MessageError
from branchline.core.reader import prefix_error
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
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
NO_LIMIT = 2**62
"""The `max_tokens` of a request without one: the answer may fill the engine's context."""
FALLBACK_MAX_TOKENS = 4096
"""The limit of an answer if neither the request has one nor the engine's context is known."""
JsonObject = Mapping[str, Any]


def merge_sampling(body: object, options: SessionOptions) -> dict[str, Any]:
    """Returns the fields of a body that are not null, merged with the session's sampling."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    return {**options.sampling_defaults, **fields, **options.sampling}


def check_session_sampling(options: SessionOptions) -> None:
    """Raises MessageError if a session's sampling has a value that its calls would be refused for."""
    for name in ("sampling", "sampling_defaults"):
        fields = getattr(options, name)
        try:
            read_sampling_params(fields, "max_tokens")
            read_int(fields, "n", 1, 1, 2**31)
            read_strings(fields, "stop")
        except MessageError as error:
            raise prefix_error(name, error) from None


def read_sampling_params(
    fields: JsonObject,
    max_tokens_name: str,
    default_max_tokens: int | None = None,
    max_tokens_limit: int | None = None,
) -> SamplingParams:
    """Reads the fields that have the same name in every protocol.

    `max_tokens_name` is the protocol's name for the limit; `max_tokens_limit` caps it, whatever its origin.
    """
    grammar = fields.get("response_format")
    if not grammar or grammar == {"type": "text"}:
        grammar = None
    elif not isinstance(grammar, dict):
        raise MessageError("response_format", grammar, "an object")
    max_tokens = NO_LIMIT if default_max_tokens is None else default_max_tokens
    if max_tokens_name in fields:
        max_tokens = read_int(fields, max_tokens_name, 0, 1, 2**31)
    params: dict[str, Any] = {
        name: _read_number(fields, name, *range) for name, range in _RANGES.items() if name in fields
    }
    if "top_k" in fields:
        params["top_k"] = max(0, read_int(fields, "top_k", 0, -1, 2**31))
    if "seed" in fields:
        params["seed"] = read_int(fields, "seed", 0, -(2**63), 2**63)
    return SamplingParams(
        max_tokens=max_tokens if max_tokens_limit is None else min(max_tokens, max_tokens_limit),
        grammar=grammar,
        **params,
    )


def explicit_sampling(fields: JsonObject, max_tokens_name: str) -> dict[str, Any]:
    """Returns the sampling fields that are set, for an upstream that has defaults of its own."""
    explicit = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    if max_tokens_name in fields:
        explicit["max_tokens"] = fields[max_tokens_name]
    return explicit


def _read_number(fields: JsonObject, name: str, minimum: float, maximum: float) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise MessageError(name, value, f"a number from {minimum:g} to {maximum:g}")
    return float(value)


def read_int(fields: JsonObject, name: str, default: int, minimum: int, maximum: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise MessageError(name, value, f"a whole number from {minimum} to {maximum}")
    return value


def read_bool(fields: JsonObject, name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise MessageError(name, value, "true or false")
    return value


def read_strings(fields: JsonObject, name: str) -> tuple[str, ...]:
    value = fields.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError(name, value, "a string or a list of strings")
    return tuple(text for text in value if text)
