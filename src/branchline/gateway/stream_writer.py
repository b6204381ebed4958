"""Writes a streamed answer to its client, event by event, with keepalives while nothing else is sent.

Clients hang up on a silent stream. A tool call is sent when it is complete, and a prompt may wait in a queue;
meanwhile no bytes would leave. One timer per stream checks now and then whether anything was sent since its
last check, so that tokens pay nothing for it. A keepalive and an event never overlap: none is sent while an
event is being sent, and an event waits for a keepalive that is.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from branchline.gateway.asgi_request import AsgiRequest
from branchline.gateway.protocols.base import StreamEncoder
from branchline.runtime.call_record import CallEvent, CallResult


class StreamWriter:
    """Sends one streamed answer; at most `keepalive_s` pass without a byte.

    with StreamWriter(exchange, stream, 10.0) as writer:
        async for event in run_call(...):
            await writer.write(event)
    """

    def __init__(self, exchange: AsgiRequest, stream: StreamEncoder, keepalive_s: float) -> None:
        self._exchange = exchange
        self._stream = stream
        # Something sent right after a check is noticed by the next check but one.
        self._check_every_s = keepalive_s / 2
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at_last_check = 0
        self._ping: asyncio.Task[None] | None = None
        """A keepalive that is being sent."""

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._check_every_s, self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_timer()
        if self._ping is not None:
            self._ping.cancel()

    async def write(self, event: CallEvent) -> None:
        """Sends an event; the result of the call ends the stream."""
        if isinstance(event, CallResult):
            await self.finish(self._stream.encode_end(event))
        elif data := self._stream.encode_delta(event):
            await self._flush_ping()
            await self._exchange.send_chunk(data)

    async def finish(self, data: bytes) -> None:
        """Sends the last bytes."""
        self._stop_timer()
        await self._flush_ping()
        await self._exchange.send_chunk(data, last=True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _flush_ping(self) -> None:
        """Waits for the keepalive that is being sent, if there is one."""
        while (ping := self._ping) is not None:
            # The caller may be cancelled; the keepalive, half sent, must not be.
            await asyncio.wait({ping})
            if not ping.cancelled():
                ping.result()
            if self._ping is ping:
                self._ping = None

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._check_every_s, self._check)
        exchange = self._exchange
        is_silent = exchange.sent_count == self._sent_at_last_check and not exchange.is_sending
        self._sent_at_last_check = exchange.sent_count
        if is_silent and (self._ping is None or self._ping.done()):
            self._ping = self._loop.create_task(exchange.send_chunk(self._stream.encode_ping()))
