"""Runs async tests on a clock that can be moved; whatever is left over fails them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.engines.manual_clock import ManualClockLoop

Test = Callable[[], Coroutine[Any, Any, None]]


def run(test: Test) -> None:
    """Runs a test; nothing may be left running."""
    problems: list[Any] = []

    async def main() -> None:
        ManualClockLoop.running().set_exception_handler(lambda _, context: problems.append(context))
        await asyncio.wait_for(test(), 1000)
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()

    with asyncio.Runner(loop_factory=ManualClockLoop) as runner:
        runner.run(main())
    assert not problems


def move_clock(seconds: float) -> None:
    """Time passes at once; timers that are due go off when the test next waits."""
    ManualClockLoop.running().offset_s += seconds
