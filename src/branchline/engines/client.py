"""The HTTP/1.1 client of the engines: a connection pool, and responses that are read while they arrive.

Data is read from the socket as soon as it arrives, so a consumer that wakes up finds all of it, and data that
arrived before a response was closed or lost is not lost with it. Closing a connection is what aborts a
request at its server. Every failure is an EngineError with the server's address and its own message.
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

# A request with such a response fails on every server, so it is not sent to another one.
INVALID_REQUEST_STATUSES = frozenset({400, 413, 422})
TOO_MANY_REQUESTS = 429
# A control endpoint with such a response does not exist, or is not open to us.
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
# Messages of servers that have no error code for a prompt that is too long.
_CONTEXT_LENGTH_MESSAGE = re.compile(r"maximum context length|model's context length")
# Proxies drop idle connections without closing them, so an old one is not used again.
MAX_KEEPALIVE_CONNECTIONS, KEEPALIVE_EXPIRY_S = 256, 30.0


@dataclass(frozen=True)
class ServerConfig:
    """The address of a server, and its timeouts."""

    url: str
    api_key: str = field(default="", repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 600.0
    """Between two reads of a response. The first includes the server's queue and the whole prefill."""

    def __post_init__(self) -> None:
        try:
            is_valid = urlsplit(self.url).scheme in ("http", "https") and urlsplit(self.url).hostname
            _ = urlsplit(self.url).port
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InputError(f"url: got {self.url!r}, expected http://HOST:PORT")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("api_key: has characters that no header can carry, expected printable ASCII")

    @property
    def base_url(self) -> str:
        """The URL without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def host_port(self) -> str:
        """Host and port, without the credentials that the URL may contain."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def authorization(self) -> str:
        """The value of the `authorization` header; "" for none."""
        if self.api_key:
            return f"Bearer {self.api_key}"
        user, at, _ = urlsplit(self.url).netloc.rpartition("@")
        return f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if at else ""


class HttpClient:
    """Sends requests to one server and keeps its connections."""

    def __init__(self, server: ServerConfig, base_url: str) -> None:
        self.host_port = server.host_port
        self._config = server
        base = urlsplit(base_url)
        self._path_prefix = base.path.rstrip("/")
        self._tls_context = _tls_context(*map(os.environ.get, _TLS_ENV)) if base.scheme == "https" else None
        self._host, self._port = base.hostname or "", base.port or (443 if self._tls_context else 80)
        headers = [f"host: {server.host_port}", "content-type: application/json", "user-agent: branchline"]
        if server.authorization:
            headers.append(f"authorization: {server.authorization}")
        self._headers = "\r\n".join(headers)
        self._connections: set[HttpConnection] = set()
        self._idle: deque[HttpConnection] = deque()
        """Connections that can be used again, the longest unused first."""
        self._is_closed = False

    def request(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Returns the response; the request is sent when the response is first read."""
        lines = [f"{method} {self._path_prefix}{path} HTTP/1.1", self._headers]
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()):
                raise InputError(f"{name}: got {value!r}, expected printable ASCII, as headers carry it")
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        return HttpResponse(self, "\r\n".join(lines).encode() + body)

    async def get_json(self, path: str) -> Any:
        """Returns the decoded JSON of a GET, or None for an empty body."""
        status, content = await self._exchange("GET", path)
        self._raise_for_status(status, content)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.host_port}{path}: not JSON: {content[:200]!r}") from error

    async def post_control(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Posts to a control endpoint; returns False if the server does not have it."""
        status, content = await self._exchange("POST", path, msgspec.json.encode(body or {}), timeout_s)
        if status in UNSUPPORTED_STATUSES:
            return False
        self._raise_for_status(status, content)
        return True

    async def close(self) -> None:
        """Closes every connection; running requests fail."""
        self._is_closed = True
        connections = list(self._connections)
        for connection in connections:
            self._discard(connection)
        await asyncio.gather(*[connection.wait_closed() for connection in connections])

    async def acquire_connection(self, *, force_new: bool = False) -> HttpConnection:
        """Returns the idle connection that was used last, or a new one."""
        if self._is_closed:
            raise EngineError(f"{self.host_port}: closed by the client")
        while self._idle and not force_new:
            connection = self._idle.pop()
            if connection.is_open and not self._is_expired(connection):
                return connection
            self._discard(connection)
        timeout_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(self._config.read_timeout_s),
                    self._host,
                    self._port,
                    ssl=self._tls_context,
                )
        except OSError as error:
            reason = str(error) or f"no connection within {timeout_s:g} s"
            raise EngineError(f"{self.host_port}: cannot connect: {reason}") from error
        self._connections.add(connection)
        return connection

    def release_connection(self, connection: HttpConnection) -> None:
        """Takes back a connection whose response has ended."""
        if self._is_closed or not connection.is_open:
            self._discard(connection)
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while len(self._idle) > MAX_KEEPALIVE_CONNECTIONS or self._is_expired(self._idle[0]):
            self._discard(self._idle.popleft())

    def _is_expired(self, connection: HttpConnection) -> bool:
        return asyncio.get_running_loop().time() - connection.idle_since > KEEPALIVE_EXPIRY_S

    def _discard(self, connection: HttpConnection) -> None:
        connection.abort()
        self._connections.discard(connection)

    async def _exchange(
        self, method: str, path: str, body: bytes = b"", timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        response = self.request(method, path, body)
        try:
            async with asyncio.timeout(timeout_s):
                return await response.read()
        except TimeoutError as error:
            raise EngineError(f"{self.host_port}{path}: no response within {timeout_s:g} s") from error
        finally:
            await response.close()

    def _raise_for_status(self, status: int, content: bytes) -> None:
        if status // 100 != 2:
            raise error_from_response(self.host_port, status, content)


class HttpResponse:
    """The response to one request. Data that arrived before it was closed or lost can still be read."""

    def __init__(self, client: HttpClient, request: bytes) -> None:
        self._client = client
        self._request = request
        self._buffer = ResponseBuffer()
        self._connection: HttpConnection | None = None
        self._sse_parser = SseParser()
        self.is_aborted = False

    @property
    def is_ended(self) -> bool:
        """Nothing more will arrive; the buffer may still hold data."""
        return self._buffer.is_ended

    @property
    def retry_after(self) -> str:
        """The Retry-After header; "" if there is none."""
        return self._buffer.retry_after

    async def read_status(self) -> int:
        """Returns the status when the response has begun; 0 if it failed before that."""
        await self._wait_for_data()
        return self._buffer.status

    async def next_events(self, not_before: float = 0.0) -> list[bytes]:
        """Returns the data of all server-sent events that arrived since the last call, at least one; [] after
        the end or a close. Returns no sooner than the loop time `not_before`, unless the response ends.

        Raises EngineError for an error status, and after the last event of a response that was lost.
        """
        while True:
            await self._wait_for_data(not_before)
            if events := self.events_nowait():
                return events
            if self._buffer.is_ended:
                return [] if self.is_aborted else self._final_events()

    def events_nowait(self) -> list[bytes]:
        """Returns the data of the events that have arrived, without waiting."""
        return self._sse_parser.feed(self._buffer.read_nowait()) if self._buffer.is_success else []

    async def read(self) -> tuple[int, bytes]:
        """Returns the status and the complete body."""
        await self._wait_for_data()
        await self._buffer.wait_end()
        if self._buffer.error:
            raise self._connection_error()
        return self._buffer.status, self._buffer.read_nowait()

    async def close(self) -> None:
        """Returns the connection to the pool, or closes it if the response has not ended."""
        connection, self._connection = self._connection, None
        if not self._buffer.is_ended:
            self.is_aborted = True
            self._buffer.feed_eof()
        if connection is not None:
            if self.is_aborted:
                connection.abort()
            self._client.release_connection(connection)
            if self.is_aborted:
                await connection.wait_closed()

    async def _wait_for_data(self, not_before: float = 0.0) -> None:
        if self._connection is None and not self._buffer.is_ended:
            await self._send()
        await self._buffer.wait(not_before)
        if self._buffer.is_stale and self._connection is not None:
            self._client.release_connection(self._connection)
            self._buffer, self._connection = ResponseBuffer(), None
            await self._send(force_new=True)
            await self._buffer.wait()

    async def _send(self, *, force_new: bool = False) -> None:
        connection = await self._client.acquire_connection(force_new=force_new)
        if self.is_aborted:
            self._client.release_connection(connection)
        else:
            self._connection = connection
            connection.send_request(self._request, self._buffer)

    def _final_events(self) -> list[bytes]:
        buffer = self._buffer
        if buffer.status and not buffer.is_success:
            content = buffer.read_nowait()
            raise error_from_response(self._client.host_port, buffer.status, content, buffer.retry_after)
        if buffer.error:
            raise self._connection_error()
        return self._sse_parser.feed(b"\n\n")  # The last event may lack its empty line.

    def _connection_error(self) -> EngineError:
        return EngineError(f"{self._client.host_port}: {self._buffer.error}")


class SseParser:
    """Extracts the `data` of server-sent events; any split of the bytes gives the same events.

    `[DONE]` is dropped: it says no more than the end of the response does.

    >>> parser = SseParser()
    >>> parser.feed(b'data: {"a": 1}\\n\\n: keep-alive\\n\\ndata: {"a"')
    [b'{"a": 1}']
    >>> parser.feed(b": 2}\\r\\n\\r\\ndata: [DONE]\\n\\n")
    [b'{"a": 2}']
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data_lines: list[bytes] = []
        """The `data` lines of the event that has begun."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of every event that this piece completes."""
        is_at_start = not (self._partial_line or self._data_lines)
        if is_at_start and piece.startswith(b"data: {") and piece.endswith(b"}\n\n"):
            # The usual case: one or more complete events of one line each.
            event = piece[6:-2]
            if b"\n" not in event:
                return [event]
            events = event.split(b"\n\ndata: ")
            if not any(b"\n" in event or b"\r" in event or event == b"[DONE]" for event in events):
                return events
        text = self._partial_line + piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *lines, self._partial_line = text.split(b"\n")
        data, events = self._data_lines, []
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif data and not line:
                event = b"\n".join(data)
                data.clear()
                if event != b"[DONE]":
                    events.append(event)
        return events


_TLS_ENV = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@functools.cache
def _tls_context(*_certificates: str | None) -> ssl.SSLContext:
    """Shared by all clients with the same certificate variables: reading the system's certificates takes
    20 ms and 1 MiB."""
    return ssl.create_default_context()


def error_from_response(server: str, status: int, body: bytes, retry_after: str = "") -> EngineError:
    """Returns the error for a response without success, with the server's own message."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = None
    reason = _error_message(content) or body.decode(errors="replace").strip()[:500] or "no reason given"
    message = f"{server}: status {status}: {reason}"
    if status == TOO_MANY_REQUESTS:
        return EngineBusyError(message, retry_after)
    is_invalid = status in INVALID_REQUEST_STATUSES
    is_too_long = is_invalid and _CONTEXT_LENGTH_MESSAGE.search(reason)
    if is_too_long or _error_code(content) == "context_length_exceeded":
        return ContextLengthError(message)
    return EngineInputError(message) if is_invalid else EngineError(message)


def error_from_event(server: str, event: bytes) -> EngineError:
    """Returns the error of a stream's error event: `{"error": {"message": …, "code": 400}}` and variants."""
    code = _error_code(msgspec.json.decode(event))
    return error_from_response(server, code if isinstance(code, int) else 500, event)


def _error_code(content: Any) -> Any:
    error = content.get("error") if isinstance(content, dict) else None
    fields = error if isinstance(error, dict) else content
    return fields.get("code") if isinstance(fields, dict) else None


def _error_message(content: Any) -> str:
    while isinstance(content, dict):
        content = next((content[key] for key in ("error", "message", "detail") if content.get(key)), "")
    return content if isinstance(content, str) else str(content or "")
