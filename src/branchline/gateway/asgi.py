"""One HTTP request on plain ASGI: reading it, answering it, and errors as HTTP statuses.

Nothing here depends on a particular server. This is the only file that maps errors to statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from branchline.core.errors import (
    BranchlineError,
    CodecError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineInputError,
    InputError,
    JournalError,
    MessageError,
    SessionError,
)
from branchline.core.reader import decode_json
from branchline.gateway.protocols.base import CONTEXT_LENGTH_EXCEEDED, ErrorInfo

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

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


class ClientDisconnectedError(Exception):
    """The client closed its connection before the response was complete."""


class BodyTooLargeError(MessageError):
    """A request body that exceeds the limit."""

    def __init__(self, size: str, max_bytes: int) -> None:
        super().__init__("body", size, f"at most {max_bytes} bytes")


def error_info(error: BranchlineError) -> ErrorInfo:
    """An error as HTTP: status, message, field, code, headers."""
    headers: dict[str, str] = {}
    code: str | None = None
    if isinstance(error, SessionError):
        status, code = _STATUS_BY_KIND[error.kind], error.kind
        # SDKs retry a 409 unless this header forbids it.
        headers = {"retry-after": "1"} if error.kind == "busy" else {"x-should-retry": "false"}
    elif isinstance(error, BodyTooLargeError):
        status = 413
    elif isinstance(error, InputError | CodecError | EngineInputError):
        status = 400
        code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, ContextLengthError) else None
    elif isinstance(error, JournalError):
        status = 503
    elif isinstance(error, EngineBusyError):
        status = 429
        headers = {"retry-after": error.retry_after} if error.retry_after else {}
    else:
        status = 502 if isinstance(error, EngineError) else 500
    param = error.field if isinstance(error, MessageError) else None
    return ErrorInfo(status, str(error), param, code, headers)


def bearer_key(headers: Mapping[str, str]) -> str:
    """The request's key: a bearer token, else the header of Anthropic's clients, else ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """The request's body. A body whose content-length exceeds the limit is refused unread."""
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
            return b"".join(parts)


def parse_body(data: bytes, decode: Callable[[bytes], object] = decode_json) -> Any:
    """The decoded body; raises MessageError if it is not JSON."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError("body", data[:60], f"JSON ({error})") from error


class AsgiRequest:
    """A request and its response: one JSON body, or a stream of events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self._raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.is_streaming = False
        """Whether the response has started as a stream; errors then become events of it."""
        self.is_complete = False
        """Whether the whole response was sent; a disconnect after that cancels nothing."""
        self.extra_headers: list[tuple[bytes, bytes]] = []
        """Headers of the response, whether it succeeds or fails."""

    @cached_property
    def headers(self) -> Mapping[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._raw_headers}

    @property
    def api_key(self) -> str:
        return bearer_key(self.headers)

    async def read_body(self, max_bytes: int) -> bytes:
        return await read_body(self._receive, self.headers, max_bytes)

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

    async def run_until_disconnect(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> T:
        """The result of `work`. A client that disconnects cancels it: raises ClientDisconnectedError.

        The current task is in `tasks` meanwhile, so that the owner of that set can cancel it too.
        """
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        is_working, is_gone = True, False

        def cancel(watch: asyncio.Task[None]) -> None:
            nonlocal is_gone
            if is_working and not self.is_complete and not watch.cancelled():
                # A watch that failed also means that the connection is gone.
                watch.exception()
                is_gone = task.cancel()

        watch = asyncio.ensure_future(self._wait_for_disconnect())
        watch.add_done_callback(cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if not is_gone:
                raise
            raise ClientDisconnectedError from None
        finally:
            is_working = False
            if is_gone:
                task.uncancel()
            watch.cancel()
            tasks.discard(task)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
