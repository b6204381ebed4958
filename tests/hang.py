"""How long tests wait for what must happen, and what ends one that waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

HANG_S = 300.0
"""So long that only a hang reaches it, however busy the machine is. No test waits for it to pass."""


async def fail_if_hung(test: Awaitable[None]) -> None:
    """Runs a test and ends it after HANG_S of real time, whatever the clock of its event loop says."""
    task = asyncio.current_task()
    assert task is not None
    loop, is_hung = asyncio.get_running_loop(), threading.Event()

    def end() -> None:
        is_hung.set()
        loop.call_soon_threadsafe(task.cancel)

    timer = threading.Timer(HANG_S, end)
    timer.start()
    try:
        await test
    except asyncio.CancelledError:
        if not is_hung.is_set():
            raise
        raise AssertionError(f"the test hung for {HANG_S:g} s") from None
    finally:
        timer.cancel()
        timer.join()
