"""One HTTP request on plain ASGI: reading it, answering it whole or as a stream, errors as HTTP statuses.

Nothing here depends on a particular server. This is the only file that maps errors to statuses.

Clients disconnect from a silent stream. A tool call is sent when it is complete, and a prompt may wait in a
queue; meanwhile no bytes would be sent. So one task per stream sends a keepalive if nothing was sent for a
while. A lock keeps keepalives and events from overlapping and their numbers in order.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec

from branchline.core.errors import (
    BranchlineError,
    CodecError,
    CompactionError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineInputError,
    ExportError,
    InputError,
    JournalError,
    MessageError,
    MissingExtraError,
    SessionError,
)
from branchline.gateway.protocols.base import CONTEXT_LENGTH_EXCEEDED, ErrorInfo, StreamEncoder
from branchline.runtime.call_record import CallEvent, CallResult

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON_HEADER = (b"content-type", b"application/json")
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_STATUS_BY_KIND = {
    "unknown": 404,
    "closed": 409,
    "out_of_calls": 409,
    "out_of_tokens": 409,
    "exists": 409,
    "conflict": 409,
    "forbidden": 403,
    "no_key": 401,
    "busy": 429,
}


_ADDRESS = re.compile(
    r"https?://[^\s'\"]*[^\s'\":,;.)]"  # a URL
    r"|(?:\w+@)?(?:\[[\da-fA-F:]+\]|[\w.-]*[a-zA-Z\d]):\d{2,5}\b(?:/[^\s:'\"]*)?"  # kind@host:port/path
)
_PATH = re.compile(r"(?<![\w/.])/[\w.@+-]+(?:/[\w.@+-]+)+")
_REPEATED = re.compile(r"^.*the engine: ")
"""What precedes the last engine that is named: the replicas of which it is one."""


class ClientDisconnectedError(Exception):
    """The client closed its connection before the response was complete."""


class BodyTooLargeError(MessageError):
    """A request body that exceeds the limit."""

    def __init__(self, size: str, max_bytes: int) -> None:
        super().__init__("body", size, f"at most {max_bytes} bytes")


def to_error_info(error: BranchlineError) -> ErrorInfo:
    """An error as HTTP: status, message, field, code, headers."""
    headers: dict[str, str] = {}
    code: str | None = None
    relayed = error.upstream_response if isinstance(error, EngineError) else None
    if relayed is not None:
        code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, ContextLengthError) else relayed.code
        return ErrorInfo(relayed.status, relayed.message, relayed.param, code, relayed.headers, relayed.type)
    if isinstance(error, SessionError):
        status, code = _STATUS_BY_KIND[error.kind], error.kind
        # SDKs retry a 409 unless this header forbids it.
        headers = {"retry-after": "1"} if error.kind == "busy" else {"x-should-retry": "false"}
    elif isinstance(error, BodyTooLargeError):
        status = 413
    elif isinstance(error, InputError | CodecError | EngineInputError | MissingExtraError):
        status = 400
        code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, ContextLengthError) else None
    elif isinstance(error, ExportError):
        status = 409
    elif isinstance(error, JournalError):
        status = 503
    elif isinstance(error, CompactionError):
        # The same conversation would fail again.
        status, code, headers = 500, "compaction_failed", {"x-should-retry": "false"}
    elif isinstance(error, EngineBusyError):
        status = 503 if error.is_overloaded else 429
        # A 503 without Retry-After is one of the journal.
        retry_after = error.retry_after or ("1" if error.is_overloaded else "")
        headers = {"retry-after": retry_after} if retry_after else {}
    else:
        status = 502 if isinstance(error, EngineError) else 500
    param = error.field or None if isinstance(error, MessageError | EngineInputError) else None
    return ErrorInfo(status, str(error), param, code, headers)


def to_agent_error_info(error: BranchlineError) -> ErrorInfo:
    """An error for an agent: without addresses of engines and paths of files, which the log has.

    >>> to_agent_error_info(EngineError("vllm@gpu-7:8000: status 500: see /var/log/vllm.log")).message
    'status 500: see (path)'
    """
    info = to_error_info(error)
    if not isinstance(error, EngineError | JournalError):
        return info
    before, status, reason = info.message.partition("status ")
    if status and info.status < 500:
        return replace(info, message=status + reason)  # what the server says about the request
    text = status + reason if status else before
    text = _PATH.sub("(path)", _ADDRESS.sub("the engine", text))
    return replace(info, message=_REPEATED.sub("the engine: ", text))


def find_addresses(text: str) -> list[str]:
    """The addresses and paths in an error, which agents do not get."""
    return _ADDRESS.findall(text) + _PATH.findall(text)


def bearer_key(headers: Mapping[str, str]) -> str:
    """The request's key: a bearer token, else the header of Anthropic's clients, else ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def identify_agent(headers: Mapping[str, str]) -> tuple[str, str]:
    """The agent that sent a request and the agent that started that one; "" if no header names them.

    Branchline's own headers can name any agent. For known clients only sub-agents are named: a client's first
    agent is the session's default agent under any name, so that it stays the same agent after a restart. A
    parent is passed on under the client's name for it; the tree resolves the first agent by exclusion.

    >>> identify_agent({"x-session-id": "s2", "x-parent-session-id": "s1"})
    ('s2', 's1')
    """
    for agent_header, parent_header in (
        ("x-branchline-agent", "x-branchline-parent-agent"),
        ("x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    ):
        agent, parent = headers.get(agent_header, ""), headers.get(parent_header, "")
        if agent or parent:
            return agent, parent
    # Codex: a sub-agent's thread id differs from the session id.
    thread, session = headers.get("thread-id", ""), headers.get("session-id", "")
    if session and thread not in ("", session):
        return thread, headers.get("x-codex-parent-thread-id", "")
    # OpenCode: a sub-agent's session has a parent; the user's own has none.
    parent = headers.get("x-parent-session-id", "")
    return (headers.get("x-session-id", ""), parent) if parent else ("", "")


async def read_body_parts(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> list[bytes]:
    """The request's body as it arrived: joining a large one takes tens of milliseconds, so it is not done in
    the event loop. A body whose content-length exceeds the limit is refused unread."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise BodyTooLargeError(f"{length[:20]} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(f"{size} bytes and more", max_bytes)
        if not message.get("more_body", False):
            return parts


class AsgiRequest:
    """A request and its response: one JSON body, or a stream of events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.query = scope.get("query_string", b"").decode("latin-1")
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.is_streaming = False
        """Whether the response has started as a stream; errors then become events of it."""
        self.is_complete = False
        """Whether the whole response was sent; a disconnect after that cancels nothing."""
        self.extra_headers: list[tuple[bytes, bytes]] = []
        """Headers of the response, whether it succeeds or fails."""

    async def send_json(
        self, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends the complete response."""
        data = msgspec.json.encode(body)
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(data)).encode())
        start = [_JSON_HEADER, length, *self.extra_headers, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": start})
        await self._send({"type": "http.response.body", "body": data})
        self.is_complete = True

    async def send_chunk(self, data: bytes, *, last: bool = False) -> None:
        """Sends the next bytes of a stream of events."""
        if not self.is_streaming:
            start = [*_SSE_HEADERS, *self.extra_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": start})
            # Set after the send: if that is cancelled, an error response is still possible.
            self.is_streaming = True
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.is_complete = last

    @contextmanager
    def cancelled_on_disconnect(self, tasks: set[asyncio.Task[Any]]) -> Iterator[None]:
        """Cancels the block if the client disconnects: raises ClientDisconnectedError.

        The current task is in `tasks` meanwhile, so that the owner of that set can cancel it too.
        """
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            with suppress(Exception):  # a receive that fails also means that the connection is gone
                while (await self.receive())["type"] != "http.disconnect":
                    pass
            if not self.is_complete:
                is_gone = task.cancel()

        tasks.add(task)
        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not is_gone:
                raise
            raise ClientDisconnectedError from None
        finally:
            if is_gone:
                task.uncancel()
            watching.cancel()
            tasks.discard(task)


class StreamWriter:
    """Sends one streamed answer; at most `keepalive_s` pass without a byte.

    writer = StreamWriter(http, encoder, 10.0)
    try:
        async for event in run_call(...):
            await writer.write(event)
    finally:
        writer.keepalive_task.cancel()
    """

    def __init__(self, http: AsgiRequest, encoder: StreamEncoder, keepalive_s: float) -> None:
        self._http = http
        self._encoder = encoder
        # A send right after a check is noticed by the next check but one.
        self._check_every_s = keepalive_s / 2
        self._lock = asyncio.Lock()
        """Held from the encoding of an event until it is sent."""
        self._is_silent = True
        """Whether nothing was sent since the last check."""
        self.keepalive_task = asyncio.create_task(self._send_keepalives())
        """To be cancelled when the stream ends. Not awaited: the call must end with its last event, before
        its client can act on that."""

    async def write(self, event: CallEvent) -> None:
        """Sends an event; the result of the call ends the stream."""
        async with self._lock:
            if isinstance(event, CallResult):
                self.keepalive_task.cancel()
                await self._http.send_chunk(self._encoder.encode_end(event), last=True)
            elif data := self._encoder.encode_delta(event):
                await self._http.send_chunk(data)
                self._is_silent = False

    async def write_error(self, info: ErrorInfo) -> None:
        """Ends the stream with an error."""
        async with self._lock:
            self.keepalive_task.cancel()
            await self._http.send_chunk(self._encoder.encode_error(info), last=True)

    async def _send_keepalives(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            if self._is_silent and not self._lock.locked():
                async with self._lock:
                    with suppress(OSError):  # the client has disconnected, which cancels the call
                        await self._http.send_chunk(self._encoder.encode_ping())
                self._is_silent = False
            else:
                self._is_silent = True
