"""Waiting for foreign code with a limit, and cancelling many loops at once.

A tool may hang, ignore its cancellation, or block in a thread that cannot be stopped. A caller here gets its
result or an error after at most the limit plus the grace period. Work that still runs then is abandoned: it
finishes by itself and its result is dropped. Work that finishes although its caller was cancelled has a
result: the caller gets it first and the cancellation afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

log = logging.getLogger("branchline.loop")
T = TypeVar("T")

# The event loop holds only weak references to tasks.
_abandoned_tasks: set[asyncio.Task[Any]] = set()


class CancelToken:
    """Cancels every loop that runs with it, for example before a weight update. It cannot be reset.

    A token belongs to one event loop, as its loops do.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self) -> None:
        self.is_set = True
        for task in self._tasks:
            task.cancel()

    async def run_cancellable(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs the work; returns False if this token cancelled it. Any other cancellation is raised."""
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


async def with_timeout(work: Coroutine[Any, Any, T], limit_s: float | None, grace_s: float) -> T:
    """Returns the result of the work or raises TimeoutError; cancelling the caller cancels the work.

    If the work returns a result nevertheless, the result is returned, and the cancellation is raised at the
    caller's next await that suspends: the caller can record what the work has done. Cancelled work has
    `grace_s` to finish before it is abandoned.
    """
    task = asyncio.create_task(_contain_exit(work), name=getattr(work, "__qualname__", None))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        was_done = task.done()
        with suppress(asyncio.CancelledError):
            await _cancel_and_wait(task, grace_s)
        # An exception after the cancellation may be its consequence, so it is no outcome of the work.
        if task.done() and not task.cancelled() and (was_done or task.exception() is None):
            _cancel_at_next_await()
            return task.result()
        raise
    if not done:
        await _cancel_and_wait(task, grace_s)
        raise TimeoutError(f"timed out after {limit_s:g} s")
    if task.cancelled():
        # The work cancelled itself; this must not look like a cancellation of the caller.
        raise RuntimeError("cancelled itself")
    return task.result()


def _cancel_at_next_await() -> None:
    """Raises the cancellation that is being handled again when the current task next suspends."""
    caller = asyncio.current_task()
    assert caller is not None, "the caller awaits"
    # One request remains one request: asyncio.timeout and TaskGroup compare the number of requests.
    caller.uncancel()
    caller.cancel()


async def finish_despite_cancel(work: Coroutine[Any, Any, T]) -> T:
    """Runs bounded work to its end; a cancellation that arrives meanwhile is raised afterwards."""
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


async def run_in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Returns a function's result from a daemon thread of its own.

    A thread cannot be cancelled: the first cancellation of the caller is ignored, so that a function that
    ends in the grace period has a result. After that the thread continues and its result is dropped; unlike
    a pool's thread it delays neither the end of the event loop nor the end of the interpreter.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def resolve(result: T | None, error: Exception | None) -> None:
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
            result = context.run(function, *args, **kwargs)
        except BaseException as error:
            problem = _future_exception(error).with_traceback(error.__traceback__)
        # The event loop may have been closed in the meantime.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, result, problem)

    threading.Thread(target=work, name=getattr(function, "__name__", "tool"), daemon=True).start()
    with suppress(asyncio.CancelledError):
        return await asyncio.shield(future)
    return await future


def describe_error(error: BaseException) -> str:
    """An error as text for a model or a report; it never raises, whatever the error's `__str__` does."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{name}, whose text cannot be read"
    # The text of a KeyError is only the key.
    return f"{name}: {text}" if isinstance(error, KeyError) else text or name


def _future_exception(error: BaseException) -> Exception:
    """An exception that a future accepts: no StopIteration, and no BaseException, which ends the event loop
    or is taken for a cancellation."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    name, text = type(error).__name__, describe_error(error)
    return RuntimeError(text if text.startswith(name) else f"{name}: {text}")


async def _contain_exit(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. A BaseException that is neither a cancellation nor an interrupt is an error of
    the work; so is SystemExit, which would end the event loop."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise _future_exception(error) from error


async def _cancel_and_wait(task: asyncio.Task[Any], grace_s: float) -> None:
    task.cancel()
    _abandoned_tasks.add(task)
    task.add_done_callback(_discard_abandoned)
    try:
        await finish_despite_cancel(asyncio.wait({task}, timeout=grace_s))
    finally:
        if not task.done():
            log.warning("%s: abandoned, it still ran %g s after its cancellation", task.get_name(), grace_s)


def _discard_abandoned(task: asyncio.Task[Any]) -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled():
        # Retrieves the exception, which the event loop would report otherwise.
        task.exception()
