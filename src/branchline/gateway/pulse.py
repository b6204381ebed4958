"""Says that a stream is alive while there is nothing else to say: clients hang up on silence.

A tool call is told when it is whole, and a prompt may wait in a queue; meanwhile no bytes would leave. One
timer for each stream looks from time to time whether anything has left since, so that tokens pay nothing
for it. A beat and an event never overtake each other: there is none while something is being sent, and who
sends something waits for the one under way (`settle`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from branchline.gateway.exchange import Exchange


class Pulse:
    """Around a stream: no more than `silence_s` without a byte.

    with Pulse(exchange, stream.beat, 10.0) as pulse:
        if pulse.beating is not None:
            await pulse.settle()
        await exchange.stream(data)
    """

    def __init__(self, exchange: Exchange, beat: Callable[[], bytes], silence_s: float) -> None:
        self._exchange = exchange
        self._beat = beat
        # What leaves right behind a look is found out by the next but one.
        self._every_s = silence_s / 2
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen = 0
        self.beating: asyncio.Task[None] | None = None
        """A beat that is being sent."""

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._every_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self.beating is not None:
            self.beating.cancel()

    def stop(self) -> None:
        """There will be no more beats: the last event is about to leave."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> None:
        """Waits for the beat that is being sent."""
        while (beat := self.beating) is not None:
            # Whoever waits may be cancelled; the beat, half sent, is not.
            await asyncio.wait({beat})
            if not beat.cancelled():
                beat.result()
            if self.beating is beat:
                self.beating = None

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._look)
        exchange = self._exchange
        is_silent = exchange.sent == self._seen and not exchange.is_sending
        self._seen = exchange.sent
        if is_silent and (self.beating is None or self.beating.done()):
            self.beating = self._loop.create_task(exchange.stream(self._beat()))
