from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from branchline.loop.timeouts import describe_error, finish_despite_cancel, run_in_thread, with_timeout
from tests.loop.clock_runner import move_clock, run


async def forever(began: asyncio.Event, ended: list[str]) -> None:
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("wound down")


async def stubborn(began: asyncio.Future[asyncio.Task[Any]], leave: asyncio.Event) -> str:
    """Swallows every cancellation until it may leave."""
    task = asyncio.current_task()
    assert task is not None
    began.set_result(task)
    while not leave.is_set():
        try:
            await leave.wait()
        except asyncio.CancelledError:
            continue
    return "done"


def test_what_ends_in_time_gives_its_result() -> None:
    async def test() -> None:
        async def work() -> int:
            return 3

        assert await with_timeout(work(), 1, 1) == 3
        assert await with_timeout(work(), None, 1) == 3

    run(test)


def test_what_takes_too_long_is_cancelled_and_may_wind_down() -> None:
    async def test() -> None:
        began, ended = asyncio.Event(), list[str]()
        waiting = asyncio.create_task(with_timeout(forever(began, ended), 5, 1))
        await began.wait()
        assert not waiting.done()
        move_clock(5)
        with pytest.raises(TimeoutError, match=r"^timed out after 5 s$"):
            await waiting
        assert ended == ["wound down"]

    run(test)


def test_what_ignores_its_cancellation_is_left_behind_after_the_time_to_wind_down() -> None:
    async def test() -> None:
        began, leave = asyncio.get_running_loop().create_future(), asyncio.Event()
        waiting = asyncio.create_task(with_timeout(stubborn(began, leave), 5, 2))
        left_behind = await began
        move_clock(5)
        # The cancellation, and the time to wind down begins.
        for _ in range(5):
            await asyncio.sleep(0)
        move_clock(1.9)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "it still has time"
        move_clock(0.2)
        with pytest.raises(TimeoutError):
            await waiting
        assert not left_behind.done()
        leave.set()
        await asyncio.wait({left_behind})

    run(test)


def test_cancelling_the_waiter_cancels_the_work_first() -> None:
    async def test() -> None:
        began, ended = asyncio.Event(), list[str]()
        waiting = asyncio.create_task(with_timeout(forever(began, ended), None, 1))
        await began.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["wound down"]

    run(test)


def test_a_waiter_that_is_cancelled_again_still_lets_the_work_wind_down() -> None:
    async def test() -> None:
        began, winding, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[str]()

        async def work() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                winding.set()
                await gate.wait()
                ended.append("wound down")

        waiting = asyncio.create_task(with_timeout(work(), 5, 100))
        await began.wait()
        move_clock(5)
        await winding.wait()
        for _ in range(2):
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["wound down"]

    run(test)


def test_what_work_raises_when_nobody_listens_any_more_is_not_reported() -> None:
    async def test() -> None:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("while winding down")

        waiting = asyncio.create_task(with_timeout(work(), 5, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        move_clock(5)
        with pytest.raises(TimeoutError):
            await waiting
        del waiting
        gc.collect()

    run(test)


def test_work_that_cancels_itself_does_not_look_like_the_waiters_cancellation() -> None:
    async def test() -> None:
        async def work() -> None:
            raise asyncio.CancelledError

        with pytest.raises(RuntimeError, match="cancelled itself"):
            await with_timeout(work(), 1, 1)

    run(test)


def test_work_that_wants_to_end_the_process_only_fails() -> None:
    async def test() -> None:
        async def work() -> None:
            raise SystemExit(2)

        with pytest.raises(RuntimeError, match="SystemExit: 2"):
            await with_timeout(work(), 1, 1)

    run(test)


def test_settling_work_goes_on_through_cancellations_which_are_raised_afterwards() -> None:
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


def test_settled_work_gives_its_result_and_its_error() -> None:
    async def test() -> None:
        async def work(fails: bool) -> int:
            if fails:
                raise ValueError("no")
            return 4

        assert await finish_despite_cancel(work(False)) == 4
        with pytest.raises(ValueError, match="no"):
            await finish_despite_cancel(work(True))

    run(test)


def test_a_thread_gives_its_result_and_its_error_and_keeps_the_loop_free() -> None:
    async def test() -> None:
        go = threading.Event()

        def work(text: str, *, times: int) -> str:
            assert go.wait(20)
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


def test_a_thread_that_outlives_the_waiter_and_the_loop_harms_nobody() -> None:
    go = threading.Event()
    threads: list[threading.Thread] = []

    async def test() -> None:
        loop, began = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            threads.append(threading.current_thread())
            loop.call_soon_threadsafe(began.set)
            assert go.wait(20)

        waiting = asyncio.create_task(with_timeout(run_in_thread(work), 5, 1))
        await began.wait()
        move_clock(5)
        with pytest.raises(TimeoutError):
            await waiting

    run(test)
    assert threads[0].is_alive()
    assert threads[0].daemon
    go.set()
    threads[0].join(20)
    assert not threads[0].is_alive()


def test_errors_are_told_in_words() -> None:
    assert describe_error(ValueError("too small")) == "too small"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(KeyError("city")) == "KeyError: 'city'"
    assert (
        describe_error(ExceptionGroup("several", [ValueError("one"), KeyError("two")]))
        == "one; KeyError: 'two'"
    )
