"""What a wire protocol is: a body in, a call's events out. Each is one file that maps and does nothing else.

    read(body, caller) → Ask          the canonical request, or a refusal that names the field
    whole(ask, done, codec) → JSON    the answer at once
    stream(ask, call_id, codec)       the answer as it arrives: `said` …, then `end`, or `failed`
    error(status, message, field, code)  the protocol's own envelope

The final event of a stream is made from `Done`, so it cannot leave before the call is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import MessageError
from branchline.core.json_fields import prefix_error, replace_surrogates
from branchline.engines.base import SamplingParams
from branchline.gateway.config import NO_LIMIT
from branchline.gateway.request_bodies import decode_json
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_lifecycle import CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession

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
MAX_CHOICES = 128
MAX_TOKENS_HEADER = "x-branchline-max-tokens"
"""A client's `max_tokens` once more, where it is a limit that a session's own sampling must not lift."""
_UNICODE_LINE_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
"""No ends of lines to an event stream, but to many a client that reads one; JSON can do without them."""
JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class RequestContext:
    """Who asks."""

    managed: ManagedSession
    agent: str = ""
    retry: int = 0
    spawned_by: str = ""
    default_max_tokens: int | None = None
    """How long an answer may be where nobody says; None: as long as there is room."""
    max_tokens_limit: int | None = None
    """How long it may be whatever the session's own sampling says; None: as the session says."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read."""

    call_request: CallRequest
    model: str
    stream: bool = False


@dataclass(frozen=True)
class CompletionRequest(ParsedRequest):
    """What OpenAI's two older protocols let a client ask of an answer."""

    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    """With each token the likeliest ones: of which only the sampled one is known."""
    return_token_ids: bool = False


A = TypeVar("A", bound=ParsedRequest)


class StreamEncoder(Protocol):
    """A streamed answer: each call gives the bytes that leave now."""

    def encode_delta(self, said: AnswerDelta) -> bytes: ...
    def encode_ping(self) -> bytes:
        """What says nothing but that the answer is still on its way: clients hang up on a silent stream."""
        ...

    def encode_end(self, done: CallResult) -> bytes: ...
    def encode_error(self, status: int, message: str, field_name: str | None, code: str | None) -> bytes: ...


class ErrorEnvelope(Protocol):
    """Writes an error as a protocol has it."""

    def __call__(
        self, status: int, message: str, field_name: str | None = None, code: str | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class WireProtocol(Generic[A]):
    """One protocol, as a value."""

    name: str
    id_prefix: str
    """What its response ids begin with."""
    read_request: Callable[[object, RequestContext], A]
    build_response: Callable[[A, CallResult, Codec], dict[str, Any]]
    stream_encoder: Callable[[A, str, Codec], StreamEncoder]
    error_body: ErrorEnvelope
    decode_body: Callable[[bytes], object] = decode_json
    """The body's bytes as what `read` takes."""
    count_response: Callable[[int], dict[str, Any]] | None = None
    """Where it is given, nothing is sampled: what the prompt's number of tokens is answered with."""
    in_stream_errors: frozenset[str] = frozenset()
    """Errors, by their codes, that clients of a stream look for in it even where it has not begun."""
    request_id_header: bytes = b"x-request-id"
    """The header in which its clients look for the id of a call."""


def sse_event(data: object, event: str = "") -> bytes:
    """One server-sent event.

    >>> sse_event({"text": chr(0x2028)})
    b'data: {"text":"\\\\u2028"}\\n\\n'
    """
    name = b"event: " + event.encode() + b"\n" if event else b""
    return name + b"data: " + encode_single_line(data) + b"\n\n"


def encode_single_line(data: object) -> bytes:
    """JSON on one line, by anybody's idea of a line."""
    written = msgspec.json.encode(data)
    # They begin with one of two bytes, and looking for a byte is cheaper than replacing several.
    if not written.isascii() and (0xC2 in written or 0xE2 in written):
        for character, escape in _UNICODE_LINE_SEPARATORS:
            written = written.replace(character, escape)
    return written


# -- reading fields ----------------------------------------------------------------------------------


def merge_sampling(body: object, caller: RequestContext) -> dict[str, Any]:
    """A body's fields: the session's sampling goes before the client's, its defaults behind."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    options = caller.managed.options
    given = {name: value for name, value in body.items() if value is not None}
    return {**options.sampling_defaults, **given, **options.sampling}


def read_sampling_params(
    given: JsonObject, max_tokens_name: str, caller: RequestContext, *, stop_field: str = "stop"
) -> SamplingParams:
    """How to sample; every protocol calls these fields the same, but for two."""
    plain = SamplingParams()
    wanted = given.get("response_format")
    grammar = None if not wanted or wanted == {"type": "text"} else wanted
    if grammar is not None and not isinstance(grammar, dict):
        raise MessageError("response_format", grammar, "an object")
    return SamplingParams(
        max_tokens=_read_max_tokens(given, max_tokens_name, caller),
        temperature=read_number(given, "temperature", plain.temperature, 0, 100),
        top_p=read_number(given, "top_p", plain.top_p, 0, 1),
        top_k=max(0, read_int(given, "top_k", plain.top_k, -1, 2**31)),
        min_p=read_number(given, "min_p", plain.min_p, 0, 1),
        presence_penalty=read_number(given, "presence_penalty", plain.presence_penalty, -2, 2),
        frequency_penalty=read_number(given, "frequency_penalty", plain.frequency_penalty, -2, 2),
        repetition_penalty=read_number(given, "repetition_penalty", plain.repetition_penalty, 0.01, 100),
        seed=read_int(given, "seed", 0, -(2**63), 2**63) if "seed" in given else None,
        stop=read_strings(given, stop_field),
        grammar=grammar,
    )


def _read_max_tokens(given: JsonObject, name: str, caller: RequestContext) -> int:
    most = NO_LIMIT if caller.default_max_tokens is None else caller.default_max_tokens
    if name in given:
        most = read_int(given, name, 0, 1, 2**31)
    return most if caller.max_tokens_limit is None else min(most, caller.max_tokens_limit)


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


def read_include_usage(given: JsonObject) -> bool:
    """Whether a stream is to end with its usage."""
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise MessageError("stream_options", options, "an object")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return read_bool(given, "include_usage")
    except MessageError as error:
        raise prefix_error("stream_options", error) from None


def read_strings(given: JsonObject, name: str) -> tuple[str, ...]:
    value = given.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError(name, value, "a string or a list of strings")
    return tuple(text for text in value if text)


def read_model_name(given: JsonObject) -> str:
    """Any name is accepted; rules may look at it."""
    return replace_surrogates(str(given.get("model") or "branchline"))
