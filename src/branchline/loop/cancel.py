"""Cancelling many loops at once, and telling that from every other cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class CancelToken:
    """Cancels every loop that runs with it, at once: for a change of weights, say. Used once.

    Belongs to one event loop, as its loops do.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self) -> None:
        self.is_set = True
        for task in self._tasks:
            task.cancel()

    async def run_cancellable(self, work: Coroutine[Any, Any, None]) -> bool:
        """Does the work; False if this token cancelled it. Other cancellations are raised as ever."""
        caller = asyncio.current_task()
        assert caller is not None, "loops run in tasks"
        cancelling = caller.cancelling()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not self.is_set or caller.cancelling() > cancelling:
                raise
            return False
        finally:
            self._tasks.discard(task)
        return True
