from __future__ import annotations

import asyncio

import pytest

from branchline.loop.cancel import CancelToken
from tests.loop.clock_runner import run


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_work_that_ends_by_itself_is_not_cancelled() -> None:
    async def test() -> None:
        token = CancelToken()
        assert await token.run_cancellable(asyncio.sleep(0))
        token.cancel()
        assert token.is_set

    run(test)


def test_one_token_cancels_all_and_each_caller_goes_on() -> None:
    async def test() -> None:
        token = CancelToken()
        waiting = [asyncio.create_task(token.run_cancellable(_for_ever())) for _ in range(3)]
        await asyncio.sleep(0)
        token.cancel()
        assert await asyncio.gather(*waiting) == [False] * 3
        assert not any(task.cancelling() for task in waiting)

    run(test)


@pytest.mark.parametrize("also_token", [False, True])
def test_a_cancelled_caller_is_cancelled_whatever_the_token_says(also_token: bool) -> None:
    async def test() -> None:
        token = CancelToken()
        caller = asyncio.create_task(token.run_cancellable(_for_ever()))
        await asyncio.sleep(0)
        if also_token:
            token.cancel()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    run(test)


def test_a_timeout_around_the_caller_is_a_timeout() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await CancelToken().run_cancellable(_for_ever())

    run(test)


def test_an_error_of_the_work_is_the_callers() -> None:
    async def test() -> None:
        async def fail() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await CancelToken().run_cancellable(fail())

    run(test)
