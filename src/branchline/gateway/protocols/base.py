"""What a wire protocol is: a body in, a call's events out. Each is one file that maps and does nothing else.

    read(body, caller) → Ask          the canonical request, or a refusal that names the field
    whole(ask, done, codec) → JSON    the answer at once
    stream(ask, call_id, codec)       the answer as it arrives: `said` …, then `end`, or `failed`
    error(status, message, field, code)  the protocol's own envelope

The final event of a stream is made from `Done`, so it cannot leave before the call is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import MessageError
from branchline.core.reader import decode_json, prefix_error, replace_surrogates
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import JsonObject, read_bool

MAX_CHOICES = 128
_UNICODE_LINE_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
"""No ends of lines to an event stream, but to many a client that reads one; JSON can do without them."""


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

    @property
    def stream(self) -> bool:
        return self.call_request.stream


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


def read_model_name(given: JsonObject) -> str:
    """Any name is accepted; rules may look at it."""
    return replace_surrogates(str(given.get("model") or "branchline"))
