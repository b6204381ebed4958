"""The HTTP/1.1 client of the engines: a connection pool, and responses that are read while they arrive.

A connection feeds its response as data arrives, whether or not a consumer waits, and returns to the pool when
the response is complete. So a consumer that wakes up finds everything that has arrived, and data that arrived
before a response was closed or lost can still be read. Closing a connection is what aborts a request at its
server. Every failure is an EngineError with the server's address and its own message.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from branchline.core.errors import EngineError, EngineUnavailableError, InputError
from branchline.core.extras import requires_extra
from branchline.engines.error_responses import error_from_response
from branchline.engines.server_config import ServerConfig as ServerConfig

with requires_extra():
    import httptools

# A control endpoint with such a response does not exist, or is not open to us.
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
# Shorter than uvicorn's 5 s: a request that meets the close of its connection may or may not be read.
MAX_KEEPALIVE_CONNECTIONS, KEEPALIVE_EXPIRY_S = 256, 4.0


class HttpClient:
    """Sends requests to one server and keeps its connections."""

    def __init__(self, server: ServerConfig, base_url: str) -> None:
        self.host_port = server.host_port
        self.config = server
        base = urlsplit(base_url)
        self._path_prefix = base.path.rstrip("/")
        self._tls_context = _tls_context(*map(os.environ.get, _TLS_ENV)) if base.scheme == "https" else None
        self._host, self._port = base.hostname or "", base.port or (443 if self._tls_context else 80)
        headers = [f"host: {server.host_port}", "content-type: application/json", "user-agent: branchline"]
        if server.authorization:
            headers.append(f"authorization: {server.authorization}")
        self._headers = "\r\n".join(headers)
        self.connections: set[HttpConnection] = set()
        """All whose socket is open."""
        self._idle: deque[HttpConnection] = deque()
        """Connections that can be used again, the longest unused first."""
        self._is_closed = False

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        is_generation: bool = False,
    ) -> HttpResponse:
        """Returns the response; the request is sent when the response is first read."""
        lines = [f"{method} {self._path_prefix}{path} HTTP/1.1", self._headers]
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()):
                raise InputError(f"{name}: got {value!r}, expected printable ASCII, as headers carry it")
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        return HttpResponse(self, "\r\n".join(lines).encode() + body, is_generation)

    async def get_json(self, path: str) -> Any:
        """Returns the decoded JSON of a GET, or None for an empty body."""
        _, content = await self._exchange("GET", path)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.host_port}{path}: not JSON: {content[:200]!r}") from error

    async def post_control(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Posts to a control endpoint; returns False if the server does not have it."""
        encoded = msgspec.json.encode(body or {})
        status, _ = await self._exchange("POST", path, encoded, timeout_s, UNSUPPORTED_STATUSES)
        return status not in UNSUPPORTED_STATUSES

    async def close(self) -> None:
        """Closes every connection; running requests fail."""
        self._is_closed = True
        connections = list(self.connections)
        for connection in connections:
            connection.abort()
        await asyncio.gather(*[connection.wait_closed() for connection in connections])

    async def acquire_connection(self, *, force_new: bool = False) -> HttpConnection:
        """Returns the idle connection that was used last, or a new one."""
        if self._is_closed:
            raise EngineError(f"{self.host_port}: closed by the client")
        loop = asyncio.get_running_loop()
        while self._idle and not force_new:
            connection = self._idle.pop()
            is_expired = loop.time() - connection.idle_since > KEEPALIVE_EXPIRY_S
            if not (is_expired or connection.transport.is_closing()):
                return connection
            connection.abort()
        timeout_s = self.config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(self), self._host, self._port, ssl=self._tls_context
                )
        except OSError as error:
            reason = str(error) or f"no connection within {timeout_s:g} s"
            raise EngineUnavailableError(f"{self.host_port}: cannot connect: {reason}") from error
        self.connections.add(connection)
        return connection

    def release_connection(self, connection: HttpConnection) -> None:
        """Takes back an open connection that has no running request."""
        if self._is_closed:
            connection.abort()
            return
        connection.idle_since = now = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while (
            len(self._idle) > MAX_KEEPALIVE_CONNECTIONS or now - self._idle[0].idle_since > KEEPALIVE_EXPIRY_S
        ):
            self._idle.popleft().abort()

    async def _exchange(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        timeout_s: float | None = None,
        accepted: frozenset[int] = frozenset(),
    ) -> tuple[int, bytes]:
        """Returns status and body. Raises EngineError for an error status that is not in `accepted`."""
        response = self.request(method, path, body)
        try:
            async with asyncio.timeout(timeout_s):
                status, content = await response.read()
        except TimeoutError as error:
            message = f"{self.host_port}{path}: no response within {timeout_s:g} s"
            raise EngineUnavailableError(message, timed_out=True) from error
        finally:
            await response.close()
        if status // 100 != 2 and status not in accepted:
            raise error_from_response(self.host_port, status, content)
        return status, content


class HttpResponse:
    """The response to one request: its connection feeds it, its consumer reads it."""

    def __init__(self, client: HttpClient, request: bytes, is_generation: bool) -> None:
        self.request = request
        self.is_generation = is_generation
        self.timeouts_s = client.config.first_token_timeout_s, client.config.token_timeout_s
        """Until the first data of the body, and between two pieces of it."""
        if not is_generation:
            self.timeouts_s = client.config.read_timeout_s, client.config.read_timeout_s
        self.has_begun = self.timed_out = False
        self.status = 0
        """0 until the headers have arrived."""
        self.headers: dict[str, str] = {}
        """The headers, by lower-case name."""
        self.pieces: list[bytes] = []
        """The received and not yet read data."""
        self.is_ended = False
        """No more data will arrive."""
        self.is_aborted = False
        """It was closed before it had ended."""
        self.error = ""
        """Why the response ended before it was complete; "" if it is complete."""
        self.connection: HttpConnection | None = None
        """The connection of the running request."""
        self.is_resent = False
        """A reused connection was closed before the server answered; a new one is used instead."""
        self.wakes_on_data = True
        self._client = client
        self._sse_parser = SseParser()
        self._waiter: asyncio.Future[None] | None = None

    async def read_status(self) -> int:
        """Returns the status when the response has begun; 0 if it failed before that."""
        await self.wait()
        return self.status

    async def next_events(self, not_before: float = 0.0) -> list[bytes]:
        """Returns the data of all server-sent events that arrived since the last call, at least one; [] after
        the end or a close. Returns no sooner than the loop time `not_before`, unless the response ends.

        Raises EngineError for an error status, and after the last event of a response that was lost.
        """
        while True:
            await self.wait(not_before)
            if events := self.events_nowait():
                return events
            if self.is_ended:
                break
        if self.is_aborted:
            return []
        if self.status and self.status // 100 != 2:
            content = self.read_nowait()
            raise error_from_response(
                self._client.host_port, self.status, content, self.headers.get("retry-after", "")
            )
        if self.error:
            raise EngineUnavailableError(f"{self._client.host_port}: {self.error}", timed_out=self.timed_out)
        return self._sse_parser.feed(b"\n\n")  # The last event may lack its empty line.

    def events_nowait(self) -> list[bytes]:
        """Returns the data of the events that have arrived, without waiting."""
        return self._sse_parser.feed(self.read_nowait()) if self.status // 100 == 2 else []

    async def read(self) -> tuple[int, bytes]:
        """Returns the status and the complete body."""
        await self.wait(until_end=True)
        if self.error:
            raise EngineUnavailableError(f"{self._client.host_port}: {self.error}", timed_out=self.timed_out)
        return self.status, self.read_nowait()

    def read_nowait(self) -> bytes:
        """Removes and returns the data that has arrived."""
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data

    async def close(self) -> None:
        """Closes the connection if the response has not ended."""
        if self.is_ended:
            return
        self.is_aborted = True
        connection = self.connection
        if connection is None:
            self.is_ended = True
        else:
            connection.abort()
            await connection.wait_closed()

    async def wait(self, not_before: float = 0.0, *, until_end: bool = False) -> None:
        """Sends the request if it was not sent. Returns when data of a successful response has arrived and
        the loop's clock has reached `not_before`, or when the response has ended."""
        loop = asyncio.get_running_loop()
        while not self.is_ended:
            if self.connection is None:
                connection = await self._client.acquire_connection(force_new=self.is_resent)
                if self.is_aborted:  # Closed meanwhile.
                    self._client.release_connection(connection)
                else:
                    connection.send_request(self)
                continue
            is_early = loop.time() < not_before
            if self.pieces and self.status // 100 == 2 and not (is_early or until_end):
                return
            timer = loop.call_at(not_before, self.wake) if is_early else None
            self.wakes_on_data = not (is_early or until_end)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()
            not_before = 0.0

    def wake(self) -> None:
        """Lets `wait` check again whether it can return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HttpConnection(asyncio.Protocol):
    """A connection to a server. Methods whose names begin with `on_` are httptools callbacks."""

    transport: asyncio.Transport
    _timeout_timer: asyncio.TimerHandle
    """Set while a request runs."""

    def __init__(self, client: HttpClient) -> None:
        self.idle_since = 0.0
        """The loop time of its last release to the connection pool."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        """The response of the running request."""
        self._last_data_at = 0.0
        self._has_length = False
        self._can_resend = False
        """The connection was used before, and no data has arrived since. If the server closes it, it did so
        before the request arrived. After a reset this is not known: the server may work on the request."""
        self._connection_lost = self._loop.create_future()

    def send_request(self, response: HttpResponse) -> None:
        """Sends the request of a response."""
        self._response, response.connection = response, self
        self._last_data_at = self._loop.time()
        self._timeout_timer = self._loop.call_later(min(response.timeouts_s), self._check_timeout)
        if self._connection_lost.done():  # uvloop's transports raise on a write after this.
            self.abort("the connection was lost before the request was sent")
        else:
            self.transport.write(response.request)

    def abort(self, reason: str = "closed by the client") -> None:
        """Closes the connection. The response of a running request keeps its data and ends with an error."""
        self._end_response(reason)
        self.transport.abort()

    async def wait_closed(self) -> None:
        """Returns when the socket is closed."""
        await asyncio.wait([self._connection_lost])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._can_resend = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"not an HTTP/1.1 response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        has_begun = self._response is not None and self._response.status
        if has_begun and not self._has_length and exc is None:
            self._end_response()  # Without a length the response ends with the connection.
        else:
            reason = f"{type(exc).__name__}: {exc}" if exc else "closed by the server"
            error = f"the connection was lost before the response ended: {reason}"
            is_get = self._response is not None and self._response.request.startswith(b"GET ")
            self._end_response(error, resend=self._can_resend and (exc is None or is_get))
        self._client.connections.discard(self)
        self._connection_lost.set_result(None)

    def on_message_begin(self) -> None:
        self._has_length = False
        if self._response is None:
            self.transport.abort()  # A response without a request.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        if self._response is not None:
            self._response.headers[name.decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        response = self._response
        if response is not None:
            response.pieces.append(body)
            if not (response.is_generation and body.startswith(b":")):  # A comment is no token.
                response.has_begun, self._last_data_at = True, self._loop.time()
            if response.wakes_on_data:
                response.wake()

    def on_message_complete(self) -> None:
        if self._response is None or not self._response.status:
            return  # After `100 Continue` the response follows.
        self._end_response()
        self._can_resend = True
        if self._parser.should_keep_alive():
            self._client.release_connection(self)
        else:
            self.transport.close()

    def _check_timeout(self) -> None:
        """Fails the request after its timeout without data. Rescheduled only when it fires, so that received
        data costs no timer."""
        response = self._response
        assert response is not None, "the timer is cancelled with the request"
        timeout_s = response.timeouts_s[response.has_begun]
        remaining_s = self._last_data_at + timeout_s - self._loop.time()
        if remaining_s > 0:
            delay_s = min(remaining_s, *response.timeouts_s)
            self._timeout_timer = self._loop.call_later(delay_s, self._check_timeout)
            return
        response.timed_out = True
        token = "further token" if response.has_begun else "first token"
        self.abort(f"no {token if response.is_generation else 'data'} for {timeout_s:g} s")

    def _end_response(self, error: str = "", *, resend: bool = False) -> None:
        """Ends the response of the running request, if there is one; with `resend` its request is sent again
        on a new connection instead."""
        response, self._response = self._response, None
        if response is not None:
            self._timeout_timer.cancel()
            response.connection = None
            response.is_ended, response.is_resent, response.error = not resend, resend, error
            response.wake()


@dataclass
class SseParser:
    """Extracts the `data` of server-sent events; any split of the bytes gives the same events.

    `[DONE]` is dropped: it says no more than the end of the response does.

    >>> parser = SseParser()
    >>> parser.feed(b'data: {"a": 1}\\n\\n: keep-alive\\n\\ndata: {"a"')
    [b'{"a": 1}']
    >>> parser.feed(b": 2}\\r\\n\\r\\ndata: [DONE]\\n\\n")
    [b'{"a": 2}']
    """

    partial_line: bytes = b""
    data_lines: list[bytes] = field(default_factory=list)
    """The `data` lines of the event that has begun."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of every event that this piece completes."""
        is_at_start = not (self.partial_line or self.data_lines)
        if is_at_start and piece.startswith(b"data: {") and piece.endswith(b"}\n\n"):
            # The usual case: one or more complete events of one line each.
            event = piece[6:-2]
            if b"\n" not in event:
                return [event]
            events = event.split(b"\n\ndata: ")
            if not any(b"\n" in event or b"\r" in event or event == b"[DONE]" for event in events):
                return events
        text = self.partial_line + piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *lines, self.partial_line = text.split(b"\n")
        data, events = self.data_lines, []
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
