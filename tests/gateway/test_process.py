"""`run_server` runs on uvloop if it is installed and otherwise behaves like `asyncio.run`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from branchline.gateway import process
from branchline.gateway.process import open_file_limit, raise_open_file_limit, run_server, tune_gc


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package of the event loop that `run_server` shall use."""
    monkeypatch.setattr(process, "tune_gc", lambda: None)
    monkeypatch.setattr(process, "raise_open_file_limit", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


def test_result_of_the_coroutine_is_returned(loop_package: str) -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert run_server(main()) == loop_package


def test_error_of_the_coroutine_is_raised(loop_package: str) -> None:
    async def main() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run_server(main())


def test_running_tasks_and_generators_are_closed_at_the_end(loop_package: str) -> None:
    closed: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("task")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append("generator")

    generator = numbers()

    async def main() -> asyncio.AbstractEventLoop:
        running = asyncio.ensure_future(forever())
        await anext(generator)
        assert not running.done()
        return asyncio.get_running_loop()

    loop = run_server(main())
    assert sorted(closed) == ["generator", "task"]
    assert loop.is_closed()


def test_handled_signal_does_not_interrupt(loop_package: str) -> None:
    async def main() -> str:
        received = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, received.set)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await received.wait()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return "stopped"

    before = signal.getsignal(signal.SIGINT)
    assert run_server(main()) == "stopped"
    assert signal.getsignal(signal.SIGINT) == before


def test_unhandled_interrupt_cancels_the_coroutine(loop_package: str) -> None:
    ended: list[str] = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append("main")

    with pytest.raises(KeyboardInterrupt):
        run_server(main())
    assert ended == ["main"]


@pytest.fixture
def _restored_gc() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("_restored_gc")
def test_tuned_gc_is_rare_and_ignores_existing_objects() -> None:
    existing = [object()]
    tune_gc()
    assert gc.get_threshold() == (100_000, 20, 50)
    assert gc.get_freeze_count() > 0
    assert not any(tracked is existing for tracked in gc.get_objects())


def test_the_process_is_tuned_before_the_coroutine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(process, "tune_gc", lambda: order.append("tune_gc"))
    monkeypatch.setattr(process, "raise_open_file_limit", lambda: order.append("raise_open_file_limit"))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: order.append(f"switch {seconds}"))

    async def main() -> None:
        order.append("main")

    run_server(main())
    assert order == ["raise_open_file_limit", "switch 0.0005", "tune_gc", "main"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_the_limit_on_open_files_is_raised_to_what_the_system_allows() -> None:
    import resource

    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        assert open_file_limit() == min(soft, 256)
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
