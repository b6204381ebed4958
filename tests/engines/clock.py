"""A loop whose time can be moved on, so that tests of long waits do not wait."""

from __future__ import annotations

import asyncio


class Clock(asyncio.SelectorEventLoop):
    moved_s = 0.0

    def time(self) -> float:
        return super().time() + self.moved_s

    @classmethod
    def running(cls) -> Clock:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls)
        return loop
