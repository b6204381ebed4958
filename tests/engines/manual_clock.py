"""Event loops whose clock a test can advance, so that tests of timeouts do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.hang import fail_if_hung


class ManualClockLoop(asyncio.SelectorEventLoop):
    """Its clock is the real one plus an offset that tests increase."""

    offset_s = 0.0

    def time(self) -> float:
        return super().time() + self.offset_s

    @classmethod
    def running(cls) -> ManualClockLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls)
        return loop


class FrozenClockLoop(ManualClockLoop):
    """Its clock moves only when a test moves it."""

    def time(self) -> float:
        return self.offset_s


async def advance(seconds: float) -> None:
    """Moves the clock of the running loop, and lets the timers that are due and their waiters run."""
    ManualClockLoop.running().offset_s += seconds
    await yield_to_loop()


async def yield_to_loop(count: int = 5) -> None:
    """Lets every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_with_frozen_clock(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test in which a timer fires when the test moves the clock, and never because the machine is
    busy."""
    with asyncio.Runner(loop_factory=FrozenClockLoop) as runner:
        runner.run(fail_if_hung(test))
