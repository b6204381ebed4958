"""One HTTP/1.1 connection and what arrives on it.

A connection serves one exchange at a time: it is asked once and fills an inbox until the answer has ended or
has broken. Nobody has to read for that to happen, and the inbox outlives the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools


class Inbox:
    """What has arrived of one answer and was not taken yet."""

    def __init__(self) -> None:
        self.status = 0
        """0: not known yet."""
        self.retry_after = ""
        """When to come again, as a refusal said it."""
        self.is_over = False
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
    def is_good(self) -> bool:
        return self.status // 100 == 2

    def put(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if not self._is_throttled:
            self._wake()

    def end(self, error: str = "") -> None:
        self.is_over, self.error = True, error
        self._wake()

    def take(self) -> bytes:
        """All that has arrived since the last time."""
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return piece

    async def wait(self, not_before: float = 0.0) -> None:
        """Returns when data of a successful response has arrived and the loop's clock has reached
        `not_before`, or when the response has ended."""
        loop = asyncio.get_running_loop()
        if loop.time() < not_before and not self.is_over:
            timer = loop.call_at(not_before, self._wake)
            self._is_throttled = True
            try:
                await self._woken()
            finally:
                timer.cancel()
                self._is_throttled = False
        while not self.is_over and not (self._pieces and self.is_good):
            await self._woken()

    async def wait_end(self) -> None:
        """Returns when the response has ended."""
        while not self.is_over:
            await self._woken()

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """A connection to a server. The parser's callbacks are its methods beginning with `on_`."""

    def __init__(
        self, keep: Callable[[Connection], None], forget: Callable[[Connection], None], timeout_s: float
    ) -> None:
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._keep, self._forget, self._timeout_s = keep, forget, timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._inbox: Inbox | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._answers = 0
        """How many answers have ended here."""
        self._heard = self._has_length = False
        self._lost = self._loop.create_future()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes, inbox: Inbox) -> None:
        """Sends a request; its answer goes into the inbox."""
        self._inbox, self._heard = inbox, False
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        if self._lost.done():  # uvloop's transports raise where one writes to them then.
            self._fail("the connection broke before anything was asked")
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Ends whatever runs; its inbox keeps what it has."""
        self._fail("closed by us")

    async def close(self) -> None:
        """Aborts, and returns when the socket is closed."""
        self.abort()
        await asyncio.wait([self._lost])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard, self._heard_at = True, self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not an HTTP/1.1 answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        inbox = self._let_go()
        if inbox is not None:
            if exc is None and inbox.status and not self._has_length:
                inbox.end()  # It was said that the answer lasts as long as the connection.
            else:
                inbox.is_stale = bool(self._answers) and not self._heard
                words = f"{type(exc).__name__}: {exc}" if exc else "closed by the server"
                inbox.end(f"the connection broke before the answer ended: {words}")
        self._forget(self)
        self._lost.set_result(None)

    def on_message_begin(self) -> None:
        self._has_length = False
        if self._inbox is None:
            self._transport.abort()  # Nobody asked.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        if name == b"retry-after" and self._inbox is not None:
            self._inbox.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        inbox, status = self._inbox, self._parser.get_status_code()
        if inbox is not None and status >= 200:
            inbox.status = status

    def on_body(self, body: bytes) -> None:
        if self._inbox is not None:
            self._inbox.put(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return  # `100 Continue` and its like: the answer is yet to come.
        inbox = self._let_go()
        self._answers += 1
        if self._parser.should_keep_alive():
            self._keep(self)
        else:
            self._transport.close()
        if inbox is not None:
            inbox.end()

    def _look(self) -> None:
        """Whether something came within the time; moved on seldom, so that a piece costs no timer."""
        silent_s = self._loop.time() - self._heard_at
        if silent_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - silent_s, self._look)
        else:
            self._fail(f"nothing came for {self._timeout_s:g} s")

    def _fail(self, words: str) -> None:
        inbox = self._let_go()
        self._transport.abort()
        if inbox is not None:
            inbox.end(words)

    def _let_go(self) -> Inbox | None:
        inbox, self._inbox = self._inbox, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return inbox
