"""Writes a streamed answer to its client, event by event, with keepalives while nothing else is sent.

Clients disconnect from a silent stream. A tool call is sent when it is complete, and a prompt may wait in a
queue; meanwhile no bytes would be sent. So one task per stream sends a keepalive if nothing was sent for a
while. A lock keeps keepalives and events from overlapping and their numbers in order.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

from branchline.gateway.asgi import AsgiRequest
from branchline.gateway.protocols.base import ErrorInfo, StreamEncoder
from branchline.runtime.call_record import CallEvent, CallResult


class StreamWriter:
    """Sends one streamed answer; at most `keepalive_s` pass without a byte.

    with StreamWriter(http, encoder, 10.0) as writer:
        async for event in run_call(...):
            await writer.write(event)
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

    def __enter__(self) -> Self:
        self._keepalive_task = asyncio.create_task(self._send_keepalives())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not awaited: the call must end with its last event, before its client can act on that.
        self._keepalive_task.cancel()

    async def write(self, event: CallEvent) -> None:
        """Sends an event; the result of the call ends the stream."""
        async with self._lock:
            if isinstance(event, CallResult):
                await self._send_last(self._encoder.encode_end(event))
            elif data := self._encoder.encode_delta(event):
                await self._http.send_chunk(data)
                self._is_silent = False

    async def write_error(self, info: ErrorInfo) -> None:
        """Ends the stream with an error."""
        async with self._lock:
            await self._send_last(self._encoder.encode_error(info))

    async def _send_last(self, data: bytes) -> None:
        self._keepalive_task.cancel()
        await self._http.send_chunk(data, last=True)

    async def _send_keepalives(self) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            if self._is_silent and not self._lock.locked():
                async with self._lock:
                    with suppress(OSError):  # the client has disconnected, which cancels the call
                        await self._http.send_chunk(self._encoder.encode_ping())
            self._is_silent = True
