from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from branchline.loop.timeouts import (
    CancelToken,
    describe_error,
    finish_despite_cancel,
    run_in_thread,
    with_timeout,
)
from tests.hang import HANG_S
from tests.loop.harness import move_clock, pass_control, run

GRACE_S = 1.0


async def forever(started: asyncio.Event, ended: list[str]) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cleaned up")


async def stubborn(started: asyncio.Future[asyncio.Task[Any]], stop: asyncio.Event) -> str:
    """Ignores every cancellation until `stop` is set."""
    task = asyncio.current_task()
    assert task is not None
    started.set_result(task)
    while not stop.is_set():
        try:
            await stop.wait()
        except asyncio.CancelledError:
            continue
    return "done"


def test_work_that_ends_in_time_returns_its_result() -> None:
    async def test() -> None:
        async def work() -> int:
            return 3

        assert await with_timeout(work(), 1, GRACE_S) == 3
        assert await with_timeout(work(), None, GRACE_S) == 3

    run(test)


def test_work_that_exceeds_the_limit_is_cancelled_and_may_clean_up() -> None:
    async def test() -> None:
        started, ended = asyncio.Event(), list[str]()
        waiting = asyncio.create_task(with_timeout(forever(started, ended), 5, GRACE_S))
        await started.wait()
        assert not waiting.done()
        move_clock(5)
        with pytest.raises(TimeoutError, match=r"^timed out after 5 s$"):
            await waiting
        assert ended == ["cleaned up"]

    run(test)


def test_work_that_ignores_its_cancellation_is_abandoned_after_the_grace_period() -> None:
    async def test() -> None:
        started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        waiting = asyncio.create_task(with_timeout(stubborn(started, stop), 5, GRACE_S))
        abandoned = await started
        move_clock(5)
        # The work is cancelled and the grace period starts.
        await pass_control()
        move_clock(GRACE_S - 0.1)
        await pass_control()
        assert not waiting.done(), "the grace period is not over"
        move_clock(0.2)
        with pytest.raises(TimeoutError):
            await waiting
        assert not abandoned.done()
        stop.set()
        await asyncio.wait({abandoned})

    run(test)


def test_cancelling_the_caller_cancels_the_work_first() -> None:
    async def test() -> None:
        started, ended = asyncio.Event(), list[str]()
        waiting = asyncio.create_task(with_timeout(forever(started, ended), None, GRACE_S))
        await started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["cleaned up"]

    run(test)


def test_a_caller_that_is_cancelled_again_still_lets_the_work_clean_up() -> None:
    async def test() -> None:
        started, cleaning, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await gate.wait()
                ended.append("cleaned up")

        waiting = asyncio.create_task(with_timeout(work(), 5, GRACE_S))
        await started.wait()
        move_clock(5)
        await cleaning.wait()
        for _ in range(2):
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["cleaned up"]

    run(test)


def test_an_exception_of_cancelled_work_is_not_reported() -> None:
    async def test() -> None:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("while cleaning up")

        waiting = asyncio.create_task(with_timeout(work(), 5, GRACE_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        move_clock(5)
        with pytest.raises(TimeoutError):
            await waiting
        del waiting
        gc.collect()

    run(test)


def test_work_that_cancels_itself_does_not_look_like_a_cancelled_caller() -> None:
    async def test() -> None:
        async def work() -> None:
            raise asyncio.CancelledError

        with pytest.raises(RuntimeError, match="cancelled itself"):
            await with_timeout(work(), 1, GRACE_S)

    run(test)


def test_work_that_raises_system_exit_only_fails() -> None:
    async def test() -> None:
        async def work() -> None:
            raise SystemExit(2)

        with pytest.raises(RuntimeError, match="SystemExit: 2"):
            await with_timeout(work(), 1, GRACE_S)

    run(test)


def test_finish_despite_cancel_raises_the_cancellation_afterwards() -> None:
    async def test() -> None:
        go, done = asyncio.Event(), list[int]()

        async def work() -> None:
            await go.wait()
            done.append(1)

        waiting = asyncio.create_task(finish_despite_cancel(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert done == [1]

    run(test)


def test_finish_despite_cancel_returns_the_result_and_raises_the_error() -> None:
    async def test() -> None:
        async def work(fails: bool) -> int:
            if fails:
                raise ValueError("no")
            return 4

        assert await finish_despite_cancel(work(False)) == 4
        with pytest.raises(ValueError, match="no"):
            await finish_despite_cancel(work(True))

    run(test)


def test_a_thread_returns_its_result_and_raises_its_error() -> None:
    async def test() -> None:
        go = threading.Event()

        def work(text: str, *, times: int) -> str:
            assert go.wait(HANG_S)
            return text * times

        waiting = asyncio.create_task(run_in_thread(work, "ab", times=2))
        await asyncio.sleep(0)
        go.set()
        assert await waiting == "abab"
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await run_in_thread(next, iter(()))
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await run_in_thread(exit_with, 3)

    run(test)


def exit_with(code: int) -> None:
    raise SystemExit(code)


def test_a_thread_may_outlive_the_caller_and_the_event_loop() -> None:
    go = threading.Event()
    threads: list[threading.Thread] = []

    async def test() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            threads.append(threading.current_thread())
            loop.call_soon_threadsafe(started.set)
            assert go.wait(HANG_S)

        waiting = asyncio.create_task(with_timeout(run_in_thread(work), 5, GRACE_S))
        await started.wait()
        move_clock(5)
        with pytest.raises(TimeoutError):
            await waiting
        (abandoned,) = [task for task in asyncio.all_tasks() if task.get_name() == "run_in_thread"]
        # As asyncio.run does at its end.
        abandoned.cancel()
        await asyncio.wait({abandoned})

    run(test)
    assert threads[0].is_alive()
    assert threads[0].daemon
    go.set()
    threads[0].join(HANG_S)
    assert not threads[0].is_alive()


class OddError(Exception):
    """An error without a readable text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Interrupt(BaseException):
    """As some frameworks define."""


def test_a_base_exception_of_the_work_is_an_error_of_the_work() -> None:
    async def test() -> None:
        async def work(error: BaseException) -> None:
            raise error

        for error, expected in (
            (Interrupt("stop"), "Interrupt: stop"),
            (SystemExit(3), "SystemExit: 3"),
            (Interrupt(), "Interrupt"),
        ):
            with pytest.raises(RuntimeError, match=f"^{expected}$"):
                await with_timeout(work(error), 1, GRACE_S)
            with pytest.raises(RuntimeError, match=f"^{expected}$"):
                await run_in_thread(raise_error, error)

    run(test)


def raise_error(error: BaseException) -> None:
    raise error


def test_work_that_finishes_although_its_caller_was_cancelled_returns_its_result_first() -> None:
    async def test() -> None:
        results: list[str] = []

        async def caller() -> None:
            results.append(await with_timeout(asyncio.sleep(0, "done"), None, GRACE_S))
            results.append("recorded")
            await asyncio.sleep(0)
            results.append("never")

        for rounds in range(6):
            results.clear()
            task = asyncio.create_task(caller())
            await pass_control(rounds)
            task.cancel()
            await asyncio.wait({task})
            assert results in ([], ["done", "recorded"], ["done", "recorded", "never"])
            assert task.cancelled() == (results[-1:] != ["never"])

    run(test)


def test_a_timeout_around_work_that_finishes_late_is_still_a_timeout() -> None:
    async def test() -> None:
        started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def caller() -> str:
            async with asyncio.timeout(5):
                assert await with_timeout(stubborn(started, stop), None, GRACE_S) == "done"
                await asyncio.Event().wait()
            return "never"

        task = asyncio.create_task(caller())
        await started
        move_clock(5)
        await pass_control()
        stop.set()
        with pytest.raises(TimeoutError):
            await task

    run(test)


def test_describe_error() -> None:
    assert describe_error(OddError()) == "OddError, whose text cannot be read"
    assert describe_error(ValueError("too small")) == "too small"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(KeyError("city")) == "KeyError: 'city'"
    assert (
        describe_error(ExceptionGroup("several", [ValueError("one"), KeyError("two")]))
        == "one; KeyError: 'two'"
    )


async def _wait_forever() -> None:
    await asyncio.Event().wait()


def test_run_cancellable_returns_true_for_work_that_ends_by_itself() -> None:
    async def test() -> None:
        token = CancelToken()
        assert await token.run_cancellable(asyncio.sleep(0))
        token.cancel()
        assert token.is_set

    run(test)


def test_a_token_cancels_all_its_work_and_no_caller() -> None:
    async def test() -> None:
        token = CancelToken()
        waiting = [asyncio.create_task(token.run_cancellable(_wait_forever())) for _ in range(3)]
        await asyncio.sleep(0)
        token.cancel()
        assert await asyncio.gather(*waiting) == [False] * 3
        assert not any(task.cancelling() for task in waiting)

    run(test)


@pytest.mark.parametrize("also_token", [False, True])
def test_a_cancelled_caller_is_cancelled_with_or_without_the_token(also_token: bool) -> None:
    async def test() -> None:
        token = CancelToken()
        caller = asyncio.create_task(token.run_cancellable(_wait_forever()))
        await asyncio.sleep(0)
        if also_token:
            token.cancel()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    run(test)


def test_a_timeout_around_run_cancellable_is_a_timeout() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await CancelToken().run_cancellable(_wait_forever())

    run(test)


def test_run_cancellable_raises_the_error_of_the_work() -> None:
    async def test() -> None:
        async def fail() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await CancelToken().run_cancellable(fail())

    run(test)
