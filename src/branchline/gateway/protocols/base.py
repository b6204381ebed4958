"""What a wire protocol is: a body in, a call's events out. Each is one file that maps and does nothing else.

    read(body, caller) → Ask          the canonical request, or a refusal that names the field
    whole(ask, done, codec) → JSON    the answer at once
    stream(ask, call_id, codec)       the answer as it arrives: `said` …, then `end`, or `failed`
    error(status, message, field)     the protocol's own envelope

The final event of a stream is made from `Done`, so it cannot leave before the call is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import MessageError
from branchline.engines.base import SamplingParams
from branchline.gateway.answers import Said
from branchline.gateway.bodies import decode_json
from branchline.gateway.calls import Asked, Done
from branchline.gateway.live import LiveSession

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
MOST_CHOICES = 128
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    live: LiveSession
    agent: str = ""
    retry: int = 0
    spawned_by: str = ""
    default_max_tokens: int = 4096


@dataclass(frozen=True)
class Ask:
    """A request, read."""

    asked: Asked
    model: str
    stream: bool = False


@dataclass(frozen=True)
class CompletionAsk(Ask):
    """What OpenAI's two older protocols let a client ask of an answer."""

    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


A = TypeVar("A", bound=Ask)


class Stream(Protocol):
    """A streamed answer: each call gives the bytes that leave now."""

    def said(self, said: Said) -> bytes: ...
    def end(self, done: Done) -> bytes: ...
    def failed(self, status: int, message: str, field: str | None) -> bytes: ...


@dataclass(frozen=True)
class Wire(Generic[A]):
    """One protocol, as a value."""

    name: str
    id_prefix: str
    """What its response ids begin with."""
    read: Callable[[object, Caller], A]
    whole: Callable[[A, Done, Codec], dict[str, Any]]
    stream: Callable[[A, str, Codec], Stream]
    error: Callable[[int, str, str | None], dict[str, Any]]
    decode: Callable[[bytes], object] = decode_json
    """The body's bytes as what `read` takes."""
    count: Callable[[int], dict[str, Any]] | None = None
    """Where it is given, nothing is sampled: what the prompt's number of tokens is answered with."""


def sse(data: object, event: str = "") -> bytes:
    """One server-sent event."""
    name = b"event: " + event.encode() + b"\n" if event else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


# -- reading fields ----------------------------------------------------------------------------------


def wishes(body: object, caller: Caller) -> dict[str, Any]:
    """A body's fields: the session's sampling goes before the client's, its defaults behind."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    options = caller.live.options
    given = {name: value for name, value in body.items() if value is not None}
    return {**options.sampling_defaults, **given, **options.sampling}


def sampling_params(
    given: Fields, max_tokens_name: str, caller: Caller, *, stop_name: str = "stop"
) -> SamplingParams:
    """How to sample; every protocol calls these fields the same, but for two."""
    plain = SamplingParams()
    wanted = given.get("response_format")
    grammar = None if not wanted or wanted == {"type": "text"} else wanted
    if grammar is not None and not isinstance(grammar, dict):
        raise MessageError("response_format", grammar, "an object")
    return SamplingParams(
        max_tokens=whole_number(given, max_tokens_name, caller.default_max_tokens, 1, 2**31),
        temperature=number(given, "temperature", plain.temperature, 0, 100),
        top_p=number(given, "top_p", plain.top_p, 0, 1),
        top_k=max(0, whole_number(given, "top_k", plain.top_k, -1, 2**31)),
        min_p=number(given, "min_p", plain.min_p, 0, 1),
        presence_penalty=number(given, "presence_penalty", plain.presence_penalty, -2, 2),
        frequency_penalty=number(given, "frequency_penalty", plain.frequency_penalty, -2, 2),
        repetition_penalty=number(given, "repetition_penalty", plain.repetition_penalty, 0.01, 100),
        seed=whole_number(given, "seed", 0, -(2**63), 2**63) if "seed" in given else None,
        stop=texts(given, stop_name),
        grammar=grammar,
    )


def given_sampling(given: Fields, max_tokens_name: str) -> dict[str, Any]:
    """What was asked for in so many words, for an upstream that has its own defaults."""
    named = {name: given[name] for name in SAMPLING if name in given}
    return {**named, "max_tokens": given[max_tokens_name]} if max_tokens_name in given else named


def number(given: Fields, name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise MessageError(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def whole_number(given: Fields, name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MessageError(name, value, f"a whole number from {least} to {most}")
    return value


def flag(given: Fields, name: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise MessageError(name, value, "true or false")
    return value


def wants_usage(given: Fields) -> bool:
    """Whether a stream is to end with its usage."""
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise MessageError("stream_options", options, "an object")
    return flag(options, "include_usage")


def texts(given: Fields, name: str) -> tuple[str, ...]:
    value = given.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError(name, value, "a string or a list of strings")
    return tuple(text for text in value if text)


def model_name(given: Fields) -> str:
    """Any name is accepted; rules may look at it."""
    return str(given.get("model") or "branchline")
