"""The control API beside what SCENARIOS part B says: waiting, idling, being explained."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline import ToyCodec
from branchline.core.errors import MessageError
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.tree.journal import Journal
from tests.gateway.harness import Agent, agent, run


def _wait(a: Agent, timeout_s: str) -> Any:
    key = {"authorization": f"Bearer {a.session.control_key}"}
    return a.http.get(f"{a.gateway.url}/sessions/{a.session.id}/wait?timeout_s={timeout_s}", headers=key)


def test_a_wait_ends_with_the_session_or_with_its_time() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert (await _wait(a, "0")).json()["state"] == "open"
            waiting = asyncio.create_task(_wait(a, "20"))
            await a.ask_text("p")
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
            await a.ask_text("p")
            busy = await a.gateway.session(id="busy")
            for session in (a.session, busy):
                session.managed.last_used -= 101
            busy.managed.in_flight = 1
            await a.gateway.sessions.expire_idle(a.gateway.app.config.idle_s)
            told = await a.get("")
            assert (told["state"], told["reason"]) == ("finalized", "idle for 100 s")
            assert busy.managed.state == "open"
            assert (await a.ask("p", "x", "q")).status_code == 409
            session_id = a.session.id
        async with Gateway(engine=ScriptedEngine(), codec=ToyCodec(), journal=journal) as again:
            assert again.sessions.get(session_id).state == "finalized"
            assert again.sessions.get("busy").state == "open"

    run(test)


def test_sessions_never_expire_where_that_is_asked_for() -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(idle_s=0)) as a:
            a.session.managed.last_used -= 10**9
            await a.gateway.sessions.expire_idle(a.gateway.app.config.idle_s)
            assert a.session.managed.state == "open"

    run(test)


def test_forks_are_explained_as_they_happen_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3", config=GatewayConfig(explain_forks=True)) as a:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "x")
            assert not caplog.records
            await a.ask_text("p", "rewritten", "x")
            await a.ask_text("p", "rewritten", "x", "A3", "y")

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
            assert session.managed.reward == 0.5
            assert session.api_key not in repr(session)

    run(test)


# -- what a session may use and what it is paid ------------------------------------------------------


def test_a_limit_of_tokens_is_kept_to_the_token() -> None:
    async def test() -> None:
        async with agent("a long answer", limits={"tokens": 10}) as a:
            assert (await a.ask("p", n=3)).status_code == 200
            assert a.session.managed.sampled_tokens == 9
            assert await a.ask_text("p") == "a"
            refused = await a.ask("p")
            assert refused.status_code == 409
            assert "may sample 10 tokens" in refused.text

    run(test)


def test_a_limit_of_calls_counts_those_that_are_still_being_prepared() -> None:
    async def test() -> None:
        async with agent("x", limits={"calls": 2}) as a:
            long = "word " * 20_000  # prepared in a thread, so that all of them are under way at once
            answers = await asyncio.gather(*(a.ask(long) for _ in range(5)))
            assert sorted(answer.status_code for answer in answers) == [200, 200, 409, 409, 409]

    run(test)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"limits": {"call": 1}}, "unknown field `call`"),
        ({"limits": {"calls": 0}}, ">= 1"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: got 1, expected one of"),
        ({"sampling_defaults": {"stop_ids": [1]}}, "sampling_defaults.stop_ids"),
        ({"sampling": {"hear": 1}}, "sampling.hear"),
    ],
)
def test_options_that_nobody_would_read_are_refused(body: dict[str, Any], problem: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
            refused = await a.http.post(f"{a.gateway.url}/sessions", json=body, headers=admin)
            assert refused.status_code == 400
            assert problem in refused.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize("score", ["1", None, True, [1], float("nan"), 10**600, {"text": "good"}])
def test_a_reward_that_is_no_finite_number_is_refused_and_leaves_nothing(score: Any) -> None:
    async def test() -> None:
        async with agent("x") as a:
            with pytest.raises(MessageError, match="score"):
                await a.session.reward(score)
            assert (await a.get(""))["rewards"] == []

    run(test)


def test_what_travels_with_a_reward_must_be_json_and_numbers_of_numpy_are_numbers() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.session.reward(np.float32(0.5), note="fine")
            with pytest.raises(MessageError, match="extra"):
                await a.session.reward(1.0, extra=object())
            assert (await a.get(""))["rewards"] == [{"score": 0.5, "note": "fine"}]

    run(test)


def test_closing_a_session_stops_what_is_being_sampled_and_tells_its_client() -> None:
    async def test() -> None:
        for stream in (False, True):
            engine = ScriptedEngine(ToyCodec(), gate=asyncio.Event())
            async with agent(engine=engine) as a:
                asking = asyncio.create_task(a.ask("p", stream=stream))
                while not engine.received_prompts:
                    await asyncio.sleep(0)
                await a.session.abort("enough")
                refused = await asking
                assert refused.status_code == 409
                assert "aborted" in refused.text
                assert engine.aborted_count == 1
                assert not a.session.managed.session.tree.calls
                assert not a.session.managed.call_tasks

    run(test)


def test_what_the_journal_refuses_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def test() -> None:
        journal = tmp_path / "j"
        async with agent("x", journal=journal) as a:
            monkeypatch.setattr(Journal, "_insert", full)
            key = {"authorization": f"Bearer {a.session.control_key}"}
            url = f"{a.gateway.url}/sessions/{a.session.id}"
            assert (await a.http.post(f"{url}/reward", json=1, headers=key)).status_code == 503
            for _ in range(2):
                assert (await a.http.post(f"{url}/finalize", headers=key)).status_code == 503
            told = await a.get("")
            assert (told["state"], told["rewards"]) == ("open", [])
            monkeypatch.undo()
            session_id = a.session.id
        async with Gateway(engine=ScriptedEngine(), codec=ToyCodec(), journal=journal) as again:
            assert again.sessions.get(session_id).state == "open"

    run(test)


def test_an_answer_the_journal_refused_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            monkeypatch.setattr(Journal, "_insert", full)
            assert (await a.ask("p")).status_code == 503
            told = await a.get("/samples")
            assert not told["samples"]
            monkeypatch.undo()

    run(test)


def test_a_session_that_was_used_a_moment_ago_is_not_idle_though_its_call_was_cancelled() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), gate=asyncio.Event())
        async with agent(engine=engine, config=GatewayConfig(idle_s=600)) as a:
            asking = asyncio.create_task(a.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            a.session.managed.last_used -= 1000
            asking.cancel()
            while a.session.managed.in_flight:
                await asyncio.sleep(0.001)
            assert not a.session.managed.is_idle(600)

    run(test)
