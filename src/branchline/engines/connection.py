"""One HTTP/1.1 connection, and the buffer that its responses are read into.

A connection serves one request at a time. Its protocol callbacks fill a `ResponseBuffer` whether or not a
consumer is waiting, so a consumer that wakes up finds everything that has arrived. The buffer outlives the
connection: data that arrived before a failure can still be read.
"""

from __future__ import annotations

import asyncio
from typing import cast

from branchline.core.errors import requires_extra

with requires_extra("serve"):
    import httptools


class ResponseBuffer:
    """The received and not yet read part of one response."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the headers have arrived."""
        self.retry_after = ""
        """The Retry-After header, if there is one."""
        self.is_ended = False
        """No more data will arrive."""
        self.error = ""
        """Why the response ended before it was complete; "" if it is complete."""
        self.is_stale = False
        """The server closed a reused connection before it answered, so the request can be sent again."""
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_on_data = True

    @property
    def is_success(self) -> bool:
        return self.status // 100 == 2

    def feed_data(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if self._wakes_on_data:
            self._wake()

    def feed_eof(self, error: str = "") -> None:
        self.is_ended, self.error = True, error
        self._wake()

    def read_nowait(self) -> bytes:
        """Removes and returns all data in the buffer."""
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return piece

    async def wait(self, not_before: float = 0.0) -> None:
        """Returns when data of a successful response has arrived and the loop's clock has reached
        `not_before`, or when the response has ended."""
        loop = asyncio.get_running_loop()
        if loop.time() < not_before and not self.is_ended:
            timer = loop.call_at(not_before, self._wake)
            self._wakes_on_data = False
            try:
                await self._wait_for_wake()
            finally:
                timer.cancel()
                self._wakes_on_data = True
        while not self.is_ended and not (self._pieces and self.is_success):
            await self._wait_for_wake()

    async def wait_end(self) -> None:
        """Returns when the response has ended."""
        while not self.is_ended:
            await self._wait_for_wake()

    async def _wait_for_wake(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HttpConnection(asyncio.Protocol):
    """A connection to a server. Methods whose names begin with `on_` are httptools callbacks."""

    def __init__(self, timeout_s: float) -> None:
        self.idle_since = 0.0
        """The loop time of its last release to the connection pool."""
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._buffer: ResponseBuffer | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._last_data_at = 0.0
        self._is_reused = False
        self._has_received_data = self._has_length = False
        self._connection_lost = self._loop.create_future()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send_request(self, request: bytes, buffer: ResponseBuffer) -> None:
        """Sends a request; its response is read into the buffer."""
        self._buffer, self._has_received_data = buffer, False
        self._last_data_at = self._loop.time()
        self._timeout_timer = self._loop.call_later(self._timeout_s, self._check_timeout)
        if self._connection_lost.done():  # uvloop's transports raise on a write after this.
            self._fail("the connection was lost before the request was sent")
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Closes the connection. The buffer of a running request keeps its data and ends with an error."""
        self._fail("closed by the client")

    async def wait_closed(self) -> None:
        """Returns when the socket is closed."""
        await asyncio.wait([self._connection_lost])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_received_data, self._last_data_at = True, self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not an HTTP/1.1 response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        buffer = self._detach_buffer()
        if buffer is not None:
            if exc is None and buffer.status and not self._has_length:
                buffer.feed_eof()  # Without a length the response ends with the connection.
            else:
                buffer.is_stale = self._is_reused and not self._has_received_data
                reason = f"{type(exc).__name__}: {exc}" if exc else "closed by the server"
                buffer.feed_eof(f"the connection was lost before the response ended: {reason}")
        self._connection_lost.set_result(None)

    def on_message_begin(self) -> None:
        self._has_length = False
        if self._buffer is None:
            self._transport.abort()  # A response without a request.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        if name == b"retry-after" and self._buffer is not None:
            self._buffer.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._buffer is not None and status >= 200:
            self._buffer.status = status

    def on_body(self, body: bytes) -> None:
        if self._buffer is not None:
            self._buffer.feed_data(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return  # `100 Continue`: the response follows.
        buffer = self._detach_buffer()
        self._is_reused = True
        if not self._parser.should_keep_alive():
            self._transport.close()
        if buffer is not None:
            buffer.feed_eof()

    def _check_timeout(self) -> None:
        """Fails the request after `timeout_s` without data. Rescheduled only when it fires, so that received
        data costs no timer."""
        silent_s = self._loop.time() - self._last_data_at
        if silent_s < self._timeout_s:
            self._timeout_timer = self._loop.call_later(self._timeout_s - silent_s, self._check_timeout)
        else:
            self._fail(f"no data for {self._timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        buffer = self._detach_buffer()
        self._transport.abort()
        if buffer is not None:
            buffer.feed_eof(reason)

    def _detach_buffer(self) -> ResponseBuffer | None:
        buffer, self._buffer = self._buffer, None
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        return buffer
