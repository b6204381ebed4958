"""A process that serves runs on the faster event loop where there is one, and otherwise behaves the same."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from branchline.gateway import process
from branchline.gateway.process import run_server, tune_gc


@pytest.fixture(params=["uvloop", "asyncio"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package that the running loop is to come from."""
    monkeypatch.setattr(process, "calm_gc", lambda: None)
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


def test_the_result_is_what_the_program_gives(loops: str) -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert run_server(main()) == loops


def test_an_error_is_the_programs_own(loops: str) -> None:
    async def main() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run_server(main())


def test_what_still_runs_at_the_end_is_ended_and_not_left(loops: str) -> None:
    ends: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("task")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ends.append("generator")

    kept = numbers()

    async def main() -> asyncio.AbstractEventLoop:
        running = asyncio.ensure_future(forever())
        await anext(kept)
        assert not running.done()
        return asyncio.get_running_loop()

    loop = run_server(main())
    assert sorted(ends) == ["generator", "task"]
    assert loop.is_closed()


def test_a_signal_that_is_handled_interrupts_nothing(loops: str) -> None:
    async def main() -> str:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, told.set)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await told.wait()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return "stopped"

    before = signal.getsignal(signal.SIGINT)
    assert run_server(main()) == "stopped"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_nobody_handles_ends_the_program_in_order(loops: str) -> None:
    ends: list[str] = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ends.append("main")

    with pytest.raises(KeyboardInterrupt):
        run_server(main())
    assert ends == ["main"]


@pytest.fixture
def _own_pace() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("_own_pace")
def test_garbage_is_looked_for_rarely_and_not_among_what_is_there() -> None:
    there = [object()]
    tune_gc()
    assert gc.get_threshold() == (100_000, 20, 50)
    assert gc.get_freeze_count() > 0
    assert not any(one is there for one in gc.get_objects())


def test_serving_is_calm_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(process, "calm_gc", lambda: order.append("calm"))

    async def main() -> None:
        order.append("main")

    run_server(main())
    assert order == ["calm", "main"]
