"""An answer on its way to its client, event by event, while it is sampled.

There are two ways, and both give the client the same bytes. Mostly a token arrives alone and is heard: read,
written and sent in one go by whoever received it, without a task being woken. Where that cannot be, because
the answer has not begun, the client does not keep up, or somebody else is sending, it is told: by the call's
own task, which waits. An ear is open only while nothing is on its way, so the two never overtake each other.

A task that is woken finds all that has come meanwhile, and tells it in one event. So where tokens come faster
than anybody reads them, that is the cheaper way, and the ear stays closed.
"""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Self

from branchline.gateway.answers import Said
from branchline.gateway.calls import Done, Event
from branchline.gateway.exchange import Exchange
from branchline.gateway.protocols.base import Stream
from branchline.gateway.pulse import Pulse

_APART_S = 0.0005
"""Tokens of one answer that come closer together than this are gathered."""


class Telling:
    """The client of one streamed answer.

    with Telling(exchange, stream, 10.0) as client:
        async for event in run_call(..., ear=client):
            await client.tell(event)
    """

    def __init__(self, exchange: Exchange, stream: Stream, silence_s: float) -> None:
        self._exchange = exchange
        self._stream = stream
        self._pulse = Pulse(exchange, stream.beat, silence_s)
        self._told_at = 0.0

    def __enter__(self) -> Self:
        self._pulse.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        exchange = self._exchange
        direct = exchange.direct
        if direct is None or exchange.is_sending or self._pulse.beating is not None:
            return False
        return direct.is_open and monotonic() - self._told_at > _APART_S

    def hear(self, said: Said) -> None:
        exchange = self._exchange
        assert exchange.direct is not None
        if data := self._stream.said(said):
            exchange.direct.write(data)
            exchange.sent += 1
        self._told_at = monotonic()

    async def tell(self, event: Event) -> None:
        """Sends an event; the last one ends the answer."""
        if self._pulse.beating is not None:
            await self._pulse.settle()
        if isinstance(event, Done):
            await self.end(self._stream.end(event))
        elif data := self._stream.said(event):
            await self._exchange.stream(data)
            self._told_at = monotonic()

    async def end(self, data: bytes) -> None:
        """Sends the last bytes."""
        self._pulse.stop()
        if self._pulse.beating is not None:
            await self._pulse.settle()
        await self._exchange.stream(data, last=True)
