"""The control API beside what SCENARIOS part B says: waiting, idling, being explained."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from tests.gateway.running import Agent, agent, run


def _wait(a: Agent, timeout_s: str) -> Any:
    key = {"authorization": f"Bearer {a.session.control_key}"}
    return a.http.get(f"{a.gateway.url}/sessions/{a.session.id}/wait?timeout_s={timeout_s}", headers=key)


def test_a_wait_ends_with_the_session_or_with_its_time() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert (await _wait(a, "0")).json()["state"] == "open"
            waiting = asyncio.create_task(_wait(a, "20"))
            await a.say("p")
            assert not waiting.done()
            await a.session.finalize()
            assert (await waiting).json()["state"] == "finalized"
            assert (await _wait(a, "20")).json()["state"] == "finalized"
            assert (await _wait(a, "soon")).status_code == 400

    run(test)


def test_an_idle_session_is_finalized_and_stays_so_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        journal = tmp_path / "j"
        async with agent("x", journal=journal, config=GatewayConfig(idle_s=100)) as a:
            await a.say("p")
            busy = await a.gateway.session(id="busy")
            for session in (a.session, busy):
                session.live.last_used -= 101
            busy.live.in_flight = 1
            await a.gateway.app.control.expire()
            told = await a.get("")
            assert (told["state"], told["reason"]) == ("finalized", "idle for 100 s")
            assert busy.live.state == "open"
            assert (await a.ask("p", "x", "q")).status_code == 409
            session_id = a.session.id
        async with Gateway(engine=ScriptedEngine(), codec=ToyCodec(), journal=journal) as again:
            assert again.sessions.get(session_id).state == "finalized"
            assert again.sessions.get("busy").state == "open"

    run(test)


def test_sessions_never_expire_where_that_is_asked_for() -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(idle_s=0)) as a:
            a.session.live.last_used -= 10**9
            await a.gateway.app.control.expire()
            assert a.session.live.state == "open"

    run(test)


def test_forks_are_explained_as_they_happen_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3", config=GatewayConfig(explain_forks=True)) as a:
            await a.say("p")
            await a.say("p", "A1", "x")
            assert not caplog.records
            await a.say("p", "rewritten", "x")
            await a.say("p", "rewritten", "x", "A3", "y")

    with caplog.at_level(logging.WARNING, logger="branchline.forks"):
        run(test)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'A1user:x\\nass' became 'rewritten\\nus'" in line
    assert "cause edit" in line


def test_a_gateway_in_a_program_needs_only_an_engine() -> None:
    async def test() -> None:
        async with Gateway(engine=ScriptedEngine()) as gateway:
            session = await gateway.session(agent="main")
            assert session.base_url.endswith(f"/sessions/{session.id}/v1")
            await session.reward(0.5, note="fine")
            told = await session.finalize()
            assert told["report"]["sampled_tokens"] == 0
            assert session.live.reward == 0.5
            assert session.api_key not in repr(session)

    run(test)
