"""A stop closes everything, whatever fails before, and says what failed; a server that ends is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.core.errors import GatewayError, InputError
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.runtime.router import Router
from tests.gateway.harness import agent, run


class ClosingEngine(ScriptedEngine):
    """Says whether it was closed, and may raise then."""

    error: BaseException | None = None
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


def make_engine(error: BaseException | None = None, **options: Any) -> ClosingEngine:
    engine = ClosingEngine(ToyCodec(), replies("x"), **options)
    engine.error = error
    return engine


def make_gateway(engine: Any, folder: Path, **options: Any) -> Gateway:
    return Gateway(engine=engine, codec=ToyCodec(), journal=folder / "j", **options)


def assert_closed(gateway: Gateway, engine: ClosingEngine) -> None:
    assert engine.is_closed
    assert gateway._journal is not None
    assert gateway._journal._closed
    assert not gateway._journal._writer.is_alive()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def fail_the_server(gateway: Gateway, error: Exception) -> asyncio.Task[None]:
    """Makes the server task raise at its next tick."""

    async def on_tick(_: int) -> bool:
        raise error

    assert gateway._server is not None
    assert gateway._server_task is not None
    gateway._server.on_tick = on_tick  # type: ignore[assignment,method-assign]
    gateway._server._stop_requested.set()  # ends the wait for the tick
    return gateway._server_task


# -- what fails before -------------------------------------------------------------------------------


def test_server_that_has_failed_leaves_nothing_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = make_engine()
        gateway = make_gateway(engine, tmp_path)
        await gateway.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(gateway.serve_until(stop))
        waiting = asyncio.create_task((await gateway.session()).wait())
        await asyncio.wait({fail_the_server(gateway, OSError("of the server"))})
        await serving  # a program that serves until a signal does not go on without a server
        assert await waiting == "open"
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as http:
                await http.get(f"{gateway.url}/healthz")
        with pytest.raises(OSError, match="of the server"):
            await gateway.stop()
        assert_closed(gateway, engine)

    run(test)
    assert "the server has ended, and every connection was closed: of the server" in caplog.messages


def test_server_that_was_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    async def test() -> None:
        engine = make_engine()
        gateway = make_gateway(engine, tmp_path)
        await gateway.start()
        assert gateway._server_task is not None
        gateway._server_task.cancel()
        with pytest.raises(GatewayError, match="cancelled"):
            await gateway.stop()
        assert_closed(gateway, engine)

    run(test)


@pytest.mark.parametrize("failing", ["_close_expiry", "_drain", "_close_sessions"])
def test_step_of_a_stop_that_fails_is_raised_after_the_others(failing: str, tmp_path: Path) -> None:
    async def test() -> None:
        async def fail() -> None:
            raise OSError(failing)

        engine = make_engine()
        gateway = make_gateway(engine, tmp_path)
        await gateway.start()
        drain = gateway._drain
        setattr(gateway, failing, fail)
        with pytest.raises(OSError, match=failing):
            await gateway.stop()
        assert_closed(gateway, engine)
        await gateway.stop()  # a second time it has nothing to say
        if failing == "_drain":
            await drain()

    run(test)


def test_every_error_of_a_stop_is_raised(tmp_path: Path) -> None:
    async def test() -> None:
        big, small = make_engine(OSError("big")), make_engine(ValueError("small"))
        gateway = make_gateway(Router(big, named_engines={"small": small}), tmp_path)
        await gateway.start()
        await asyncio.wait({fail_the_server(gateway, KeyError("server"))})
        with pytest.raises(ExceptionGroup) as raised:
            await gateway.stop()
        server, engines = raised.value.exceptions
        assert isinstance(server, KeyError)
        assert isinstance(engines, ExceptionGroup)
        assert [str(error) for error in engines.exceptions] == ["big", "small"]
        for engine in (big, small):
            assert_closed(gateway, engine)

    run(test)


def test_replicas_are_all_closed_if_one_fails() -> None:
    async def test() -> None:
        engines = [make_engine(OSError("first"), name="a"), make_engine(name="b")]
        with pytest.raises(OSError, match="first"):
            await Replicas(engines).close()
        assert [engine.is_closed for engine in engines] == [True, True]

    run(test)


def test_error_of_the_program_is_raised_and_that_of_the_stop_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = make_engine(OSError("of the engine"))
        with pytest.raises(ValueError, match="of the program"):
            async with make_gateway(engine, tmp_path) as gateway:
                raise ValueError("of the program")
        assert_closed(gateway, engine)

    with caplog.at_level(logging.ERROR, "branchline.gateway"):
        run(test)
    assert caplog.messages == ["the gateway did not stop cleanly: of the engine"]


def test_observer_that_fails_does_not_keep_a_session_open(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def fail(_: Any) -> None:
        raise ValueError("of an observer")

    async def test() -> None:
        engine = make_engine()
        gateway = Gateway(
            engine=engine,
            codec=ToyCodec(),
            on_session_end=[fail, lambda managed: seen.append(managed.id)],
        )
        async with gateway:
            finalized, lost = await gateway.session(id="a"), await gateway.session(id="b")
            await finalized.finalize()
            assert lost.managed.state == "open"
        assert engine.is_closed

    run(test)
    assert seen == ["a", "b"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"an observer failed for the end of session {name}" for name in "ab"
    ]


def test_expiry_continues_after_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        gateway = make_gateway(make_engine(), tmp_path, config=GatewayConfig(idle_s=0.001))
        rounds: list[float] = []

        async def fail(idle_s: float) -> None:
            rounds.append(idle_s)
            raise ValueError("of one round")

        gateway.sessions.expire_idle = fail  # type: ignore[method-assign]
        async with gateway:
            await until(lambda: len(rounds) == 3)

    run(test)
    assert "sessions could not be expired" in caplog.messages


# -- a cancellation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_stop_that_is_cancelled_closes_everything(cancellations: int, tmp_path: Path) -> None:
    """As a second Ctrl-C does, and a third."""

    async def test() -> None:
        engine = make_engine(gate=asyncio.Event())
        async with agent(engine=engine, config=GatewayConfig(drain_s=1000), journal=tmp_path / "j") as a:
            asking = asyncio.create_task(a.ask("p"))
            await until(lambda: bool(engine.received_prompts))
            stopping = asyncio.create_task(a.gateway.stop())
            await until(lambda: a.gateway.sessions.stopping.is_set())
            for _ in range(cancellations):
                stopping.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await stopping
            assert_closed(a.gateway, engine)
            with_answer = await asyncio.gather(asking, return_exceptions=True)
            assert getattr(with_answer[0], "status_code", 503) == 503
            await a.gateway.stop()

    run(test)


def test_two_stops_at_a_time_both_wait() -> None:
    async def test() -> None:
        engine = make_engine(gate=asyncio.Event())
        async with agent(engine=engine, config=GatewayConfig(drain_s=1000)) as a:
            asking = asyncio.create_task(a.ask("p"))
            await until(lambda: bool(engine.received_prompts))
            first, second = (asyncio.create_task(a.gateway.stop()) for _ in range(2))
            await until(lambda: a.gateway.sessions.stopping.is_set())
            await asyncio.sleep(0)
            assert not first.done()
            assert not second.done()
            assert engine.gate is not None
            engine.gate.set()
            await asyncio.gather(first, second)
            assert engine.is_closed
            assert (await asking).status_code == 200

    run(test)


@pytest.mark.parametrize("calls", [1, 7])
def test_stop_that_waits_no_longer_says_for_what(calls: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = make_engine(gate=asyncio.Event())
        async with agent(engine=engine, config=GatewayConfig(drain_s=1000)) as a:
            asking = [asyncio.create_task(a.ask("p")) for _ in range(calls)]
            await until(lambda: len(engine.received_prompts) == calls)
            stopping = asyncio.create_task(a.gateway.stop())
            await until(lambda: a.gateway.sessions.stopping.is_set())
            a.gateway.skip_drain()
            await stopping
            await asyncio.gather(*asking, return_exceptions=True)

    run(test)
    (line,) = [line for line in caplog.messages if line.startswith("not waiting any longer for: ")]
    assert line.count("POST /sessions/") == min(calls, 5)
    assert ("and 2 others" in line) == (calls == 7)


# -- a start that fails ------------------------------------------------------------------------------


def test_error_of_a_start_is_raised_and_that_of_its_stop_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = make_engine(OSError("of the engine"))
        gateway = make_gateway(engine, tmp_path)

        def fail(*_: object, **__: object) -> None:
            raise ValueError("of the start")

        monkeypatch.setattr("branchline.gateway.uvicorn_server.UvicornServer.startup", fail)
        with pytest.raises(ValueError, match="of the start"):
            await gateway.start()
        assert_closed(gateway, engine)

    with caplog.at_level(logging.ERROR, "branchline.gateway"):
        run(test)
    assert [line for line in caplog.messages if "cleanly" in line]


def test_gateway_that_cannot_be_made_leaves_its_journal_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="codec: got None"):
        Gateway(engine=object(), journal=tmp_path / "j")  # type: ignore[arg-type]
    assert not (tmp_path / "j").exists()

    def fail(*_: object) -> None:
        raise RuntimeError("of the replay")

    with monkeypatch.context() as patched:
        patched.setattr("branchline.runtime.session_store.SessionStore._replay", fail)
        with pytest.raises(RuntimeError, match="of the replay"):
            make_gateway(make_engine(), tmp_path)

    async def test() -> None:
        async with make_gateway(make_engine(), tmp_path):
            pass

    run(test)
