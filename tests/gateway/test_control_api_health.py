"""Health of a gateway: alive and ready are different things, and each answer says which check failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import ToyCodec
from branchline.core.errors import EngineError, JournalError
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway import control_api
from tests.gateway.harness import Agent, agent, run


async def _policy(a: Agent, action: str) -> httpx.Response:
    return await a.http.post(f"{a.gateway.url}/policy/{action}", headers=a.admin_headers)


async def _ready(a: Agent) -> tuple[int, Any]:
    response = await a.http.get(f"{a.gateway.url}/readyz")
    return response.status_code, response.json()


def test_a_gateway_that_can_take_calls_is_alive_and_ready(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            checks = {"journal": "ok", "engine": "ok", "policy": "ok"}
            assert await _ready(a) == (200, {"status": "ready", "checks": checks})
            alive = await a.http.get(f"{a.gateway.url}/healthz")
            assert (alive.status_code, alive.json()["status"]) == (200, "ok")

    run(test)


def test_a_paused_gateway_is_alive_and_not_ready() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await _policy(a, "pause")
            status, body = await _ready(a)
            assert (status, body["status"]) == (503, "not ready")
            assert body["checks"] == {"journal": "ok", "engine": "ok", "policy": "paused"}
            assert (await a.http.get(f"{a.gateway.url}/healthz")).status_code == 200
            await _policy(a, "resume")
            assert (await _ready(a))[0] == 200

    run(test)


def test_a_gateway_whose_journal_failed_is_not_ready(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            journal = a.session.managed.journal
            assert journal is not None
            journal.failure = JournalError(f"{tmp_path}/j: the journal could not be written: disk full")
            status, body = await _ready(a)
            assert (status, body["checks"]["journal"]) == (503, "cannot be written")
            assert str(tmp_path) not in str(body)
            assert (await a.http.get(f"{a.gateway.url}/healthz")).status_code == 200
            journal.failure = None

    run(test)


class UnreachableEngine(ScriptedEngine):
    """Counts how often it is asked whether it is ready, and is not; `hangs`: it does not answer."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__(ToyCodec())
        self.hangs = hangs
        self.ready_count = 0

    async def ready(self) -> None:
        self.ready_count += 1
        if self.hangs:
            await asyncio.Event().wait()
        raise EngineError("http://10.0.0.7:8000: cannot connect: refused")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_gateway_whose_engine_does_not_answer_is_not_ready(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = UnreachableEngine(hangs=hangs)
        async with agent(engine=engine) as a:
            answers = await asyncio.gather(*[_ready(a) for _ in range(5)])
            assert {status for status, _ in answers} == {503}
            assert answers[0][1]["checks"]["engine"] == "does not answer"
            assert "10.0.0.7" not in str(answers)
            assert engine.ready_count == 1  # anybody may ask; the engine is asked once in a while
            assert (await a.http.get(f"{a.gateway.url}/healthz")).status_code == 200

    monkeypatch.setattr(control_api, "_ENGINE_TIMEOUT_S", 0.05)
    run(test)


def test_health_does_not_show_the_addresses_of_engines() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec())
        engine.name = "http://10.0.0.7:8000"
        async with agent(engine=engine) as a:
            assert "10.0.0.7" not in (await a.http.get(f"{a.gateway.url}/healthz")).text
            assert "10.0.0.7" in (await a.http.get(f"{a.gateway.url}/engines", headers=a.admin_headers)).text

    run(test)
