from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from branchline.loop.retry import Retry
from tests.loop.clock_runner import move_clock, run


def test_between_knocks_stands_a_pause_that_grows_where_none_is_asked_for() -> None:
    async def test() -> None:
        patience = Retry(600)
        assert [patience.next_delay_s("0") for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]

    run(test)


def test_what_is_asked_for_is_waited_if_it_is_longer() -> None:
    async def test() -> None:
        later = formatdate(time.time() + 100, usegmt=True)
        assert [Retry(600).next_delay_s(said) for said in ("2", "soon", "")] == [2.0, 1.0, 1.0]
        assert 90 < Retry(600).next_delay_s(later) <= 100

    run(test)


@pytest.mark.parametrize(
    ("status", "said", "moved_s", "goes_on"),
    [
        (429, "0", 0, True),
        (429, "11", 0, False),
        (429, "0", 10, False),
        (503, "0", 0, False),
    ],
)
def test_patience_ends(status: int, said: str, moved_s: float, goes_on: bool) -> None:
    async def test() -> None:
        patience = Retry(10)
        move_clock(moved_s)
        assert await patience.wait_to_retry(status, said) is goes_on

    run(test)
