"""Runs a process that only serves: its limits, fewer garbage collections, and uvloop if it is installed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

if sys.platform != "win32":
    import resource

Result = TypeVar("Result")

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that prepares a prompt may keep the event loop waiting, instead of Python's 5 ms: a call
needs the interpreter some twenty times, and would wait that often."""


def tune_gc() -> None:
    """Makes garbage collection rare. Trees only grow and hold no garbage, so scanning them is wasted time.

    Objects that exist now are never scanned again; new ones are scanned less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def open_file_limit() -> int | None:
    """How many files and connections the process may open; None if there is no limit."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_file_limit() -> None:
    """Raises the limit on open files to what the system allows: a call needs two connections or more, and
    many systems start a process with 1024."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(ValueError, OSError):  # macOS allows less than the hard limit says
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in a process that serves: on uvloop if it is installed."""
    raise_open_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tune_gc()
    try:
        import uvloop
    except ImportError:  # not available on Windows
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
