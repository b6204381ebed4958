"""A wire protocol: request bodies in, events of a call out. Each protocol only translates.

    read_request(body, context) → ParsedRequest   the canonical request, or an error that names the field
    build_response(parsed, result, codec)         the complete response as JSON
    stream_encoder(parsed, call_id, codec)        the response as events: deltas, then the end or an error
    error_body(info)                              the protocol's error envelope

The final event of a stream is made from `CallResult`, so it cannot be sent before the call is in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from branchline.chat.base import Codec
from branchline.core.errors import MessageError
from branchline.core.reader import decode_json, prefix_error
from branchline.runtime.answer import AnswerDelta
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import JsonObject, read_bool

MAX_CHOICES = 128
_USAGE_IN_EACH_CHUNK = ("continuous_usage_stats", "chunk_include_usage")
_STREAM_OPTIONS = ("include_usage", "include_obfuscation", *_USAGE_IN_EACH_CHUNK)
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long; agents compact their history only when they see it."""
_UNICODE_LINE_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
"""Not line ends in an event stream, but many clients split on them; in JSON they can be escaped."""


@dataclass(frozen=True)
class RequestContext:
    """What a protocol knows of a request besides its body."""

    managed: ManagedSession
    model: str
    """Any name is accepted; routing rules may match it."""
    agent: str = ""
    retry_count: int = 0
    spawned_by: str = ""
    default_max_tokens: int | None = None
    """Limit of an answer if the request sets none; None: the room that the prompt leaves."""
    max_tokens_limit: int | None = None
    """A limit that the session's own sampling cannot raise; None: no such limit."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request in canonical form."""

    call_request: CallRequest
    model: str


@dataclass(frozen=True)
class CompletionRequest(ParsedRequest):
    """Response options that Chat Completions and text completions share."""

    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: bool = False
    """List alternatives per token; engines report only the sampled token, so it is the only one listed."""
    return_token_ids: bool = False


@dataclass(frozen=True)
class ErrorInfo:
    """An error as HTTP."""

    status: int
    message: str
    param: str | None = None
    """The field of the request that caused it."""
    code: str | None = None
    """The code by which programs recognise it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    type: str | None = None
    """The error's type as an upstream named it; None: it follows from the status."""


ProtocolRequest = TypeVar("ProtocolRequest", bound=ParsedRequest)


class StreamEncoder(Protocol):
    """Encodes a streamed response; each method returns the bytes to send now."""

    def encode_delta(self, delta: AnswerDelta) -> bytes: ...
    def encode_ping(self) -> bytes:
        """An event without content: clients disconnect from a silent stream."""
        ...

    def encode_end(self, result: CallResult) -> bytes: ...
    def encode_error(self, info: ErrorInfo) -> bytes: ...


@dataclass(frozen=True)
class WireProtocol(Generic[ProtocolRequest]):
    """One protocol as a value."""

    name: str
    id_prefix: str
    """The prefix of its response ids."""
    read_request: Callable[[object, RequestContext], ProtocolRequest]
    build_response: Callable[[ProtocolRequest, CallResult, Codec], dict[str, Any]]
    stream_encoder: Callable[[ProtocolRequest, str, Codec], StreamEncoder]
    error_body: Callable[[ErrorInfo], dict[str, Any]]
    decode_body: Callable[[bytes], object] = decode_json
    """Decodes the body's bytes for `read_request`."""
    count_response: Callable[[int], dict[str, Any]] | None = None
    """The response to a request that only counts the tokens of its prompt; None: no such endpoint."""
    in_stream_errors: frozenset[str] = frozenset()
    """Codes of errors that its clients expect inside the stream even if it has not started."""
    request_id_header: bytes = b"x-request-id"
    """The response header in which its clients look for the call's id."""


def sse_event(data: object, event: str = "") -> bytes:
    """One server-sent event.

    >>> sse_event({"text": chr(0x2028)})
    b'data: {"text":"\\\\u2028"}\\n\\n'
    """
    encoded = msgspec.json.encode(data)
    if not encoded.isascii():
        for character, escape in _UNICODE_LINE_SEPARATORS:
            encoded = encoded.replace(character, escape)
    name = b"event: " + event.encode() + b"\n" if event else b""
    return name + b"data: " + encoded + b"\n\n"


def read_include_usage(fields: JsonObject) -> tuple[bool, tuple[str, ...]]:
    """Whether a stream shall end with its usage, and the other wishes in `stream_options` that nobody
    follows."""
    raw = fields.get("stream_options") or {}
    if not isinstance(raw, dict):
        raise MessageError("stream_options", raw, "an object")
    options = {name: value for name, value in raw.items() if value is not None}
    try:
        for name in options:
            if name not in _STREAM_OPTIONS:
                raise MessageError(name, options[name], "one of " + ", ".join(_STREAM_OPTIONS))
        flags = {name: read_bool(options, name) for name in options}
    except MessageError as error:
        raise prefix_error("stream_options", error) from None
    not_applied = [f"stream_options.{name}" for name in _USAGE_IN_EACH_CHUNK if flags.get(name)]
    return flags.get("include_usage", False), tuple(not_applied)
