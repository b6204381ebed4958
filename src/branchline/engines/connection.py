"""One HTTP/1.1 connection and what arrives on it.

A connection serves one exchange at a time: it is asked once and fills an inbox until the answer has ended or
has broken. Nobody has to read for that to happen, and the inbox outlives the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from branchline.core.errors import requires_extra

with requires_extra("serve"):
    import httptools


class ResponseBuffer:
    """What has arrived of one answer and was not taken yet."""

    def __init__(self) -> None:
        self.status = 0
        """0: not known yet."""
        self.retry_after = ""
        """When to come again, as a refusal said it."""
        self.is_ended = False
        """Nothing more will come."""
        self.error = ""
        """Why an answer that is over is not all of it."""
        self.is_stale = False
        """The connection was kept from an earlier exchange, and its server closed it without a word."""
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_throttled = False
        """The reader is waiting for its interval to pass: only the end of the response wakes it."""

    @property
    def is_success(self) -> bool:
        return self.status // 100 == 2

    def feed_data(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if not self._is_throttled:
            self._wake()

    def feed_eof(self, error: str = "") -> None:
        self.is_ended, self.error = True, error
        self._wake()

    def read_nowait(self) -> bytes:
        """All that has arrived since the last time."""
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
            self._is_throttled = True
            try:
                await self._wait_for_wake()
            finally:
                timer.cancel()
                self._is_throttled = False
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
    """A connection to a server. The parser's callbacks are its methods beginning with `on_`."""

    def __init__(
        self,
        keep: Callable[[HttpConnection], None],
        forget: Callable[[HttpConnection], None],
        timeout_s: float,
    ) -> None:
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._on_idle, self._on_lost, self._timeout_s = keep, forget, timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._buffer: ResponseBuffer | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._last_data_at = 0.0
        self._response_count = 0
        """How many answers have ended here."""
        self._has_received_data = self._has_length = False
        self._connection_lost = self._loop.create_future()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send_request(self, request: bytes, inbox: ResponseBuffer) -> None:
        """Sends a request; its answer goes into the inbox."""
        self._buffer, self._has_received_data = inbox, False
        self._last_data_at = self._loop.time()
        self._timeout_timer = self._loop.call_later(self._timeout_s, self._check_timeout)
        if self._connection_lost.done():  # uvloop's transports raise where one writes to them then.
            self._fail("the connection broke before anything was asked")
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Ends whatever runs; its inbox keeps what it has."""
        self._fail("closed by us")

    async def close(self) -> None:
        """Aborts, and returns when the socket is closed."""
        self.abort()
        await asyncio.wait([self._connection_lost])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_received_data, self._last_data_at = True, self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not an HTTP/1.1 answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        inbox = self._detach_buffer()
        if inbox is not None:
            if exc is None and inbox.status and not self._has_length:
                inbox.feed_eof()  # It was said that the answer lasts as long as the connection.
            else:
                inbox.is_stale = bool(self._response_count) and not self._has_received_data
                words = f"{type(exc).__name__}: {exc}" if exc else "closed by the server"
                inbox.feed_eof(f"the connection broke before the answer ended: {words}")
        self._on_lost(self)
        self._connection_lost.set_result(None)

    def on_message_begin(self) -> None:
        self._has_length = False
        if self._buffer is None:
            self._transport.abort()  # Nobody asked.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        if name == b"retry-after" and self._buffer is not None:
            self._buffer.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        inbox, status = self._buffer, self._parser.get_status_code()
        if inbox is not None and status >= 200:
            inbox.status = status

    def on_body(self, body: bytes) -> None:
        if self._buffer is not None:
            self._buffer.feed_data(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return  # `100 Continue` and its like: the answer is yet to come.
        inbox = self._detach_buffer()
        self._response_count += 1
        if self._parser.should_keep_alive():
            self._on_idle(self)
        else:
            self._transport.close()
        if inbox is not None:
            inbox.feed_eof()

    def _check_timeout(self) -> None:
        """Whether something came within the time; moved on seldom, so that a piece costs no timer."""
        silent_s = self._loop.time() - self._last_data_at
        if silent_s < self._timeout_s:
            self._timeout_timer = self._loop.call_later(self._timeout_s - silent_s, self._check_timeout)
        else:
            self._fail(f"nothing came for {self._timeout_s:g} s")

    def _fail(self, words: str) -> None:
        inbox = self._detach_buffer()
        self._transport.abort()
        if inbox is not None:
            inbox.feed_eof(words)

    def _detach_buffer(self) -> ResponseBuffer | None:
        inbox, self._buffer = self._buffer, None
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        return inbox
