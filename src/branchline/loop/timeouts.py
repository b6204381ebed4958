"""Waiting for code that is not ours: with a limit, and never longer than was said.

A tool may hang, swallow its cancellation, or sit in a thread that nobody can stop. Whoever waits here has an
answer after the limit and the time to wind down; what still runs then is left behind and not heard any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE_S = 10.0
"""What cancelled work has to put its things away, where nobody says otherwise."""

# The event loop itself keeps no hold of its tasks.
_abandoned_tasks: set[asyncio.Task[Any]] = set()


async def with_timeout(work: Coroutine[Any, Any, T], limit_s: float | None, cancel_grace_s: float) -> T:
    """What the work gives, or TimeoutError; if the caller is cancelled, so is the work.

    Cancelled work has `wind_down_s` to put its things away before nobody waits for it any more.
    """
    task = asyncio.create_task(_contain_system_exit(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await _cancel_and_wait(task, cancel_grace_s)
        raise
    if not done:
        await _cancel_and_wait(task, cancel_grace_s)
        raise TimeoutError(f"timed out after {limit_s:g} s")
    if task.cancelled():
        # Nobody here cancelled it, so this must not look like the caller's own cancellation.
        raise RuntimeError("cancelled itself")
    return task.result()


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Sees bounded work to its end; a cancellation that comes meanwhile is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


async def run_in_thread(function: Callable[..., T], /, *args: Any, **named: Any) -> T:
    """A function's result from a thread of its own.

    A thread cannot be cancelled. Whoever stops waiting leaves it running, and what it returns is dropped;
    it keeps neither the event loop nor the interpreter from ending, as a pool's threads would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        problem: Exception | None = None
        try:
            result = context.run(function, *args, **named)
        except BaseException as error:
            problem = _future_exception(error)
        # The loop may have been closed while the thread was busy.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=work, name=getattr(function, "__name__", "tool"), daemon=True).start()
    return await future


def describe_error(error: BaseException) -> str:
    """An error in words, for a model or a report."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    if isinstance(error, KeyError):
        # Its text is only the key.
        return f"KeyError: {error}"
    return str(error) or type(error).__name__


def _future_exception(error: BaseException) -> Exception:
    """An error that a future takes: it refuses StopIteration, and SystemExit would end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


async def _contain_system_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise _future_exception(error) from error


async def _cancel_and_wait(task: asyncio.Task[Any], cancel_grace_s: float) -> None:
    task.cancel()
    _abandoned_tasks.add(task)
    task.add_done_callback(_discard_abandoned)
    await finish_despite_cancel(_wait(task, cancel_grace_s))


async def _wait(task: asyncio.Task[Any], limit_s: float) -> None:
    await asyncio.wait({task}, timeout=limit_s)


def _discard_abandoned(task: asyncio.Task[Any]) -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled():
        # An exception that nobody looks at is reported by the event loop; nobody is left to look at this one.
        task.exception()
