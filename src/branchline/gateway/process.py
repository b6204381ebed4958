"""How a process that does nothing but serve is run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def tune_gc() -> None:
    """For a process that only serves: trees grow and nothing of them is garbage, so looking through them at
    Python's own pace is for nothing. What is there now is not looked at again; what comes, more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with calm garbage collection and, where it is installed, a faster event loop."""
    tune_gc()
    try:
        import uvloop
    except ImportError:  # as on Windows, where there is none
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
