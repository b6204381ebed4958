"""A loop whose time can be moved on, so that tests of long waits do not wait."""

from __future__ import annotations

import asyncio


class ManualClockLoop(asyncio.SelectorEventLoop):
    offset_s = 0.0

    def time(self) -> float:
        return super().time() + self.offset_s

    @classmethod
    def running(cls) -> ManualClockLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls)
        return loop
