"""One HTTP/1.1 client, as small as engines need it: kept connections, and answers as they arrive.

Bytes leave the socket when they come, whether somebody waits for them or not. So a reader that wakes finds
all that has arrived, and a reply that is cut from outside loses nothing of it. Closing a connection is what
aborts a request at its server. Every failure is an EngineError that says where and in whose words.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import re
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from branchline.core.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineInputError,
    InputError,
)
from branchline.engines.connection import HttpConnection, ResponseBuffer
from branchline.engines.sse import SseParser

# The server's way of saying that this request can never be answered, here or elsewhere.
INVALID_REQUEST_STATUSES = frozenset({400, 413, 422})
TOO_MANY_REQUESTS = 429
# How servers that have no code for it say that a prompt does not fit.
_CONTEXT_LENGTH_MESSAGE = re.compile(r"maximum context length|model's context length")
# A control endpoint that this server does not have, or does not open to us.
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
# What is kept for the next request. Who stands between may forget a silent connection without a word.
MAX_KEEPALIVE_CONNECTIONS, KEEPALIVE_EXPIRY_S = 256, 30.0


@dataclass(frozen=True)
class ServerConfig:
    """Where an engine listens, and how long to wait for it."""

    url: str
    api_key: str = field(default="", repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 600.0
    """Between two pieces of a stream; the first waits for the server's queue and the whole prefill."""

    def __post_init__(self) -> None:
        try:
            is_place = urlsplit(self.url).scheme in ("http", "https") and urlsplit(self.url).hostname
            _ = urlsplit(self.url).port
        except ValueError:
            is_place = False
        if not is_place:
            raise InputError(f"url: got {self.url!r}, expected http://HOST:PORT")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("api_key: has characters that no header can carry, expected printable ASCII")

    @property
    def base_url(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def host_port(self) -> str:
        """Host and port: the address as a name, without what might be secret in it."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def authorization(self) -> str:
        """What to say in an `authorization` header; "" for nothing."""
        if self.api_key:
            return f"Bearer {self.api_key}"
        user, at, _ = urlsplit(self.url).netloc.rpartition("@")
        return f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if at else ""


class HttpClient:
    """Requests to one server."""

    def __init__(self, server: ServerConfig, base_url: str) -> None:
        self.host_port = server.host_port
        self._config = server
        base = urlsplit(base_url)
        self._prefix = base.path.rstrip("/")
        self._tls_context = (
            _tls_context(*map(os.environ.get, _TLS_VARIABLES)) if base.scheme == "https" else None
        )
        self._host, self._port = base.hostname or "", base.port or (443 if self._tls_context else 80)
        headers = [f"host: {server.host_port}", "content-type: application/json", "user-agent: branchline"]
        if server.authorization:
            headers.append(f"authorization: {server.authorization}")
        self._headers = "\r\n".join(headers)
        self._idle: deque[HttpConnection] = deque()
        """Waiting for a next request, the one that has waited longest first."""
        self._connections: set[HttpConnection] = set()
        self._is_closed = False

    async def get_json(self, path: str) -> Any:
        """The JSON that a path answers, or None for an empty body."""
        content = await self._read_content("GET", path)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.host_port}{path}: not JSON: {content[:200]!r}") from error

    async def post_control(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Asks for something beside generations; False where the server has no such thing."""
        try:
            await self._read_content("POST", path, msgspec.json.encode(body or {}), timeout_s)
        except _UnsupportedEndpointError:
            return False
        return True

    def post(self, path: str, body: bytes) -> HttpResponse:
        """A response that can be streamed; the request is sent when it is first read."""
        return self.request("POST", path, body)

    def request(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Any request, with headers of its own."""
        return HttpResponse(self, self._encode_request(method, path, body, headers or {}))

    async def close(self) -> None:
        """Closes every connection; what still runs ends with an error."""
        self._is_closed = True
        await asyncio.gather(*[connection.close() for connection in self._connections])

    async def acquire_connection(self, *, force_new: bool = False) -> HttpConnection:
        """One that is kept, or a new one."""
        if self._is_closed:
            raise EngineError(f"{self.host_port}: closed by us")
        while self._idle and not force_new:
            kept = self._idle.pop()
            if kept.is_open and not self._is_expired(kept):
                return kept
            kept.abort()
        timeout_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(
                        self.release_connection, self._discard_connection, self._config.read_timeout_s
                    ),
                    self._host,
                    self._port,
                    ssl=self._tls_context,
                )
        except OSError as error:
            words = str(error) or f"nothing came for {timeout_s:g} s"
            raise EngineError(f"{self.host_port}: cannot connect: {words}") from error
        self._connections.add(connection)
        return connection

    def release_connection(self, connection: HttpConnection) -> None:
        """Takes back a connection whose answer has ended."""
        if self._is_closed:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while len(self._idle) > MAX_KEEPALIVE_CONNECTIONS or self._is_expired(self._idle[0]):
            self._idle.popleft().abort()

    def _is_expired(self, connection: HttpConnection) -> bool:
        return asyncio.get_running_loop().time() - connection.idle_since > KEEPALIVE_EXPIRY_S

    def _discard_connection(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)

    def _encode_request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", self._headers]
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise InputError(f"{name}: got {value!r}, expected printable ASCII, as headers carry it")
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        return "\r\n".join(lines).encode() + body

    async def _read_content(
        self, method: str, path: str, body: bytes = b"", timeout_s: float | None = None
    ) -> bytes:
        reply = self.request(method, path, body)
        try:
            async with asyncio.timeout(timeout_s):
                status, content = await reply.read()
        except TimeoutError as error:
            raise EngineError(f"{self.host_port}{path}: no answer within {timeout_s:g} s") from error
        finally:
            await reply.close()
        if status in UNSUPPORTED_STATUSES:
            raise _UnsupportedEndpointError(f"{self.host_port}{path}: status {status}")
        if status // 100 != 2:
            raise error_from_response(self.host_port, status, content)
        return content


class HttpResponse:
    """The answer to one request, as it arrives. What has arrived can be read even after a cut or a break."""

    def __init__(self, client: HttpClient, request: bytes) -> None:
        self._client = client
        self._request = request
        self._buffer = ResponseBuffer()
        self._connection: HttpConnection | None = None
        self._sse_parser = SseParser()
        self._events_at = float("-inf")
        """When events were last returned."""
        self.is_aborted = False

    @property
    def is_ended(self) -> bool:
        """Nothing more will arrive; what has may still be there to be read."""
        return self._buffer.is_ended

    @property
    def retry_after(self) -> str:
        """When to come again, where a refusal says so."""
        return self._buffer.retry_after

    async def read_status(self) -> int:
        """Of an answer that has begun; 0 where none came."""
        await self._wait_for_data()
        return self._buffer.status

    async def next_events(self, interval_s: float = 0.0) -> list[bytes]:
        """The data of all events that arrived since the last call, at least one; [] at the end or after a
        close. Returns no sooner than `interval_s` after the last call returned, unless the response ends.

        Raises EngineError where the answer is a refusal, and behind the last event of one that broke.
        """
        while True:
            await self._wait_for_data(self._events_at + interval_s)
            if events := self.events_nowait():
                self._events_at = asyncio.get_running_loop().time()
                return events
            if self._buffer.is_ended:
                return [] if self.is_aborted else self._final_events()

    def events_nowait(self) -> list[bytes]:
        """The events that can be had without waiting."""
        return self._sse_parser.feed(self._buffer.read_nowait()) if self._buffer.is_success else []

    async def read(self) -> tuple[int, bytes]:
        """The status, and all that was said."""
        await self._wait_for_data()
        await self._buffer.wait_end()
        if self._buffer.error:
            raise self._connection_error()
        return self._buffer.status, self._buffer.read_nowait()

    async def close(self) -> None:
        """Closes the connection of an answer that has not ended; returns when it is closed."""
        if not self._buffer.is_ended:
            self.is_aborted = True
            self._buffer.feed_eof()
            if self._connection is not None:
                await self._connection.close()

    def _final_events(self) -> list[bytes]:
        inbox = self._buffer
        if inbox.status and not inbox.is_success:
            raise error_from_response(
                self._client.host_port, inbox.status, inbox.read_nowait(), inbox.retry_after
            )
        if inbox.error:
            raise self._connection_error()
        return self._sse_parser.flush()

    def _connection_error(self) -> EngineError:
        return EngineError(f"{self._client.host_port}: {self._buffer.error}")

    async def _wait_for_data(self, not_before: float = 0.0) -> None:
        if self._connection is None and not self._buffer.is_ended:
            await self._send(force_new=False)
        await self._buffer.wait(not_before)
        if self._buffer.is_stale:
            # Its server closed a kept connection while the request was on its way: it saw nothing of it.
            self._buffer, self._connection = ResponseBuffer(), None
            await self._send(force_new=True)
            await self._buffer.wait()

    async def _send(self, *, force_new: bool) -> None:
        connection = await self._client.acquire_connection(force_new=force_new)
        if self.is_aborted:
            self._client.release_connection(connection)
        else:
            self._connection = connection
            connection.send_request(self._request, self._buffer)


# What a TLS context depends on beside the system.
_TLS_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@functools.cache
def _tls_context(*_certificates: str | None) -> ssl.SSLContext:
    """One for all clients: the system's certificates take 20 ms and a MiB to read."""
    return ssl.create_default_context()


class _UnsupportedEndpointError(EngineError):
    """An endpoint that is not there for us."""


def error_from_response(place: str, status: int, body: bytes, retry_after: str = "") -> EngineError:
    """The error for an answer that is none, in the server's own words."""
    try:
        given = msgspec.json.decode(body)
    except msgspec.DecodeError:
        given = None
    words = _error_message(given) or body.decode(errors="replace").strip()[:500] or "no reason given"
    told = f"{place}: status {status}: {words}"
    if status == TOO_MANY_REQUESTS:
        return EngineBusyError(told, retry_after)
    is_refused = status in INVALID_REQUEST_STATUSES
    if _error_code(given) == "context_length_exceeded" or (
        is_refused and _CONTEXT_LENGTH_MESSAGE.search(words)
    ):
        return ContextLengthError(told)
    return EngineInputError(told) if is_refused else EngineError(told)


def error_from_event(place: str, event: bytes) -> EngineError:
    """The error that a stream ended with: `{"error": {"message": …, "code": 400}}` and its variants."""
    code = _error_code(msgspec.json.decode(event))
    return error_from_response(place, code if isinstance(code, int) else 500, event)


def _error_code(given: Any) -> Any:
    error = given.get("error") if isinstance(given, dict) else None
    place = error if isinstance(error, dict) else given
    return place.get("code") if isinstance(place, dict) else None


def _error_message(given: Any) -> str:
    while isinstance(given, dict):
        given = next((given[key] for key in ("error", "message", "detail") if given.get(key)), "")
    return given if isinstance(given, str) else str(given or "")
