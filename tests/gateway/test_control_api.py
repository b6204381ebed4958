"""The control API: sessions, rewards, the policy, engines. Scenarios part B has the rest."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from branchline import ToyCodec
from branchline.core.call import Delivery
from branchline.core.errors import MessageError
from branchline.core.reward import read_rewards
from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine
from branchline.engines.upstream_chat import UpstreamChat
from branchline.engines.vllm import VllmEngine
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.runtime.router import Router
from branchline.tree.journal import Journal
from tests.engines.fake_servers import FakeVllm
from tests.export.test_rewards import commit_attempt
from tests.gateway.harness import Agent, agent, run
from tests.hang import HANG_S


def _wait(a: Agent, timeout_s: str) -> Any:
    url = f"{a.gateway.url}/sessions/{a.session.id}/wait?timeout_s={timeout_s}"
    return a.http.get(url, headers=a.control_headers)


def test_wait_returns_at_the_end_of_the_session_or_the_timeout() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert (await _wait(a, "0")).json()["state"] == "open"
            waiting = asyncio.create_task(_wait(a, str(HANG_S)))
            await a.ask_text("p")
            assert not waiting.done()
            await a.session.finalize()
            assert (await waiting).json()["state"] == "finalized"
            assert (await _wait(a, str(HANG_S))).json()["state"] == "finalized"
            assert (await _wait(a, "soon")).status_code == 400

    run(test)


def test_idle_session_is_finalized_and_stays_so_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        journal = tmp_path / "j"
        async with agent("x", journal=journal, config=GatewayConfig(idle_s=100)) as a:
            await a.ask_text("p")
            busy = await a.gateway.session(id="busy")
            for session in (a.session, busy):
                session.managed.last_used -= 101
            busy.managed.in_flight = 1
            await a.gateway.sessions.expire_idle(a.gateway.app.config.idle_s)
            view = await a.get("")
            assert (view["state"], view["reason"]) == ("finalized", "idle for 100 s")
            assert busy.managed.state == "open"
            assert (await a.ask("p", "x", "q")).status_code == 409
            session_id = a.session.id
        async with Gateway(engine=ScriptedEngine(), codec=ToyCodec(), journal=journal) as again:
            assert again.sessions.get(session_id).state == "finalized"
            assert again.sessions.get("busy").state == "open"

    run(test)


def test_sessions_never_expire_with_idle_s_0() -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(idle_s=0)) as a:
            a.session.managed.last_used -= 10**9
            await a.gateway.sessions.expire_idle(a.gateway.app.config.idle_s)
            assert a.session.managed.state == "open"

    run(test)


def test_each_fork_is_logged_once_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
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


def test_gateway_in_a_program_needs_only_an_engine() -> None:
    async def test() -> None:
        async with Gateway(engine=ScriptedEngine()) as gateway:
            session = await gateway.session(agent="main")
            assert session.base_url.endswith(f"/sessions/{session.id}/v1")
            await session.reward(0.5, note="fine")
            export = await session.finalize()
            assert (export.samples, export.report.sampled_tokens) == ([], 0)
            assert session.managed.reward == 0.5
            assert session.api_key not in repr(session)

    run(test)


def test_a_key_names_its_session_and_its_calls() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            for root in (a.session.base_url, f"{a.gateway.url}/v1"):
                shown = await a.http.get(f"{root}/session", headers=a.api_headers)
                assert shown.json() == {
                    "id": a.session.id,
                    "state": "open",
                    "created": a.session.managed.created_at,
                    "calls": [call.id for call in a.session.managed.session.tree.calls],
                }
            assert (await a.http.get(f"{a.session.base_url}/session")).status_code == 401
            posted = await a.http.post(f"{a.session.base_url}/session", headers=a.api_headers)
            assert (posted.status_code, posted.headers["allow"]) == (405, "GET")

    run(test)


def test_samples_of_an_aborted_session_are_exported_only_on_request() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            await a.session.abort()
            headers = {"authorization": f"Bearer {a.session.control_key}"}

            async def read(query: str) -> Any:
                url = f"{a.gateway.url}/sessions/{a.session.id}/samples{query}"
                return await a.http.get(url, headers=headers)

            assert (await read("")).json()["samples"] == []
            assert len((await read("?include_aborted=true")).json()["samples"]) == 1
            for query in ("?include_aborted=maybe", "?share=all"):
                assert (await read(query)).status_code == 400

    run(test)


# -- limits and rewards ------------------------------------------------------------------------------


def test_a_list_of_rewards_is_posted_at_once_and_an_id_counts_once() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            rewards = [{"id": "t/turn-1", "score": 1, "turn": 1}, {"id": "t", "score": 2}]
            for _ in range(2):
                await a.session.managed.post_rewards(read_rewards(rewards))
            assert (len(a.session.managed.rewards), a.session.managed.reward) == (2, 2.0)
            with pytest.raises(MessageError):
                await a.session.managed.post_rewards(read_rewards([{"score": 3}, {"score": "no"}]))
            assert len(a.session.managed.rewards) == 2

    run(test)


def test_a_reward_with_an_id_may_be_corrected_back() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            for part in ({}, {"turn": 1}):
                for score in (1, 0, 1, 1):
                    await a.session.managed.post_rewards(read_rewards({"score": score, "id": "x", **part}))
            assert [reward["score"] for reward in a.session.managed.rewards] == [1, 0, 1] * 2
            (sample,) = (await a.session.export()).samples
            assert (sample.reward, [span.score for span in sample.rewards]) == (1.0, [1.0])

    run(test)


def test_a_reward_with_an_id_may_be_corrected_back_when_its_answer_is_named_otherwise() -> None:
    """By its turn, by its call, and by its turn again: the second is not a repetition, nor is the third."""

    async def test() -> None:
        async with agent("A1", "A2") as a:
            await a.ask_text("p")
            managed = a.session.managed
            turn, call = {"turn": 1, "id": "x"}, {"call": managed.session.tree.calls[0].id, "id": "x"}
            for first, second in ((turn, call), (call, turn)):
                for score, part in ((1, first), (0, second), (1, first), (1, first)):
                    await managed.post_rewards(read_rewards({"score": score, **part}))
                    (sample,) = (await a.session.export()).samples
                    assert [span.score for span in sample.rewards] == [score]
            assert [reward["score"] for reward in managed.rewards] == [1, 0, 1] * 2
            # In one request, too.
            await managed.post_rewards(read_rewards([{"score": 0, **turn}, {"score": 1, **call}]))
            await managed.post_rewards(
                read_rewards([{"score": 0, **turn}, {"score": 1, **call}, {"score": 0, **turn}])
            )
            (sample,) = (await a.session.export()).samples
            assert [span.score for span in sample.rewards] == [0.0]

    run(test)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_list_of_rewards_is_the_same_as_its_items_one_after_another(as_list: bool) -> None:
    async def test() -> None:
        async with agent("A1") as a:
            await a.ask_text("p")
            managed = a.session.managed
            await managed.post_rewards(read_rewards([{"score": 0, "id": "b"}, {"score": 1}]))
            repeat = [{"score": 0, "id": "b", "turn": 1}, {"score": 0, "id": "b"}]
            for items in [repeat] if as_list else repeat:
                await managed.post_rewards(read_rewards(items))
            assert managed.reward == 1.0
            assert [reward["score"] for reward in managed.rewards] == [0, 1, 0]

    run(test)


def test_a_reward_with_an_id_may_be_corrected_back_after_its_call_was_resumed() -> None:
    async def test() -> None:
        async with agent("A1") as a:
            managed = a.session.managed
            commit_attempt(managed.session, "", "h", Delivery.CANCELLED)
            (first,) = managed.session.tree.calls
            for part in ({"call": first.id}, {"timeline": first.outputs[0]}):
                await managed.post_rewards(read_rewards({"score": 0, **part, "id": "x"}))
            commit_attempt(managed.session, first.id, "half", Delivery.DELIVERED)
            first, second = managed.session.tree.calls
            for score, call in ((1, second), (0, first), (0, first)):
                for part in ({"call": call.id}, {"timeline": call.outputs[0]}):
                    await managed.post_rewards(read_rewards({"score": score, **part, "id": "x"}))
                (sample,) = (await a.session.export()).samples
                assert (sample.reward, [span.score for span in sample.rewards]) == (score, [score, score])
            assert [reward["score"] for reward in managed.rewards] == [0, 0, 1, 1, 0, 0]

    run(test)


def test_a_reward_with_an_id_corrects_the_answer_that_its_turn_is_now() -> None:
    async def test() -> None:
        for scores_by_call in ((), (1.0,)):
            async with agent("A1", "A2") as a:
                await a.ask_text("p")
                managed = a.session.managed
                of_turn = read_rewards({"score": 0, "turn": 1, "id": "x"})
                await managed.post_rewards(of_turn)
                await a.ask_text("p")
                for score in scores_by_call:
                    part = {"call": managed.session.tree.calls[1].id, "id": "x"}
                    await managed.post_rewards(read_rewards({"score": score, **part}))
                for _ in range(2):
                    await managed.post_rewards(of_turn)
                samples = (await a.session.export()).samples
                paid = [[span.score for span in sample.rewards] for sample in samples]
                # Without a reward of the second answer it is taken for a repetition.
                assert paid == ([[0.0], [0.0]] if scores_by_call else [[0.0], []])
                assert len(managed.rewards) == (3 if scores_by_call else 1)

    run(test)


def test_a_repeated_reward_is_known_again_when_its_turn_is_gone() -> None:
    async def test() -> None:
        async with agent("A1", "B1", "C1") as a:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "q")
            rewards = read_rewards({"score": 1, "id": "x", "turn": 2})
            await a.session.managed.post_rewards(rewards)
            await a.ask_text("edited")
            await a.session.managed.post_rewards(rewards)
            assert len(a.session.managed.rewards) == 1

    run(test)


def test_token_limit_is_exact() -> None:
    async def test() -> None:
        async with agent("a long answer", limits={"tokens": 10}) as a:
            assert (await a.ask("p", n=3)).status_code == 200
            assert a.session.managed.sampled_tokens == 9
            assert await a.ask_text("p") == "a"
            refused = await a.ask("p")
            assert refused.status_code == 409
            assert "may sample 10 tokens" in refused.text

    run(test)


def test_call_limit_counts_calls_that_are_being_prepared() -> None:
    async def test() -> None:
        async with agent("x", limits={"calls": 2}) as a:
            long = "word " * 20_000  # prepared in a thread, so that all calls run at once
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
        ({"sampling": {"flush_s": 1}}, "sampling.flush_s"),
    ],
)
def test_unknown_session_options_are_refused(body: dict[str, Any], problem: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await a.http.post(f"{a.gateway.url}/sessions", json=body, headers=a.admin_headers)
            assert refused.status_code == 400
            assert problem in refused.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize("score", ["1", None, [1], float("nan"), 10**600, {"text": "good"}])
def test_reward_that_is_not_finite_is_refused_and_not_stored(score: Any) -> None:
    async def test() -> None:
        async with agent("x") as a:
            with pytest.raises(MessageError, match="score"):
                await a.session.reward(score)
            assert (await a.get(""))["rewards"] == []

    run(test)


def test_reward_extras_must_be_json_and_numpy_numbers_are_numbers() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.session.reward(np.float32(0.5), note="fine")  # type: ignore[arg-type]
            with pytest.raises(MessageError, match="extra"):
                await a.session.reward(1.0, extra=object())
            assert (await a.get(""))["rewards"] == [{"score": 0.5, "extras": {"note": "fine"}}]

    run(test)


def test_closing_a_session_cancels_its_calls_with_409() -> None:
    async def test() -> None:
        for stream in (False, True):
            engine = ScriptedEngine(ToyCodec(), gate=asyncio.Event())
            async with agent(engine=engine) as a:
                answer = asyncio.create_task(a.ask("p", stream=stream))
                while not engine.received_prompts:
                    await asyncio.sleep(0)
                await a.session.abort("enough")
                refused = await answer
                assert refused.status_code == 409
                assert "aborted" in refused.text
                assert engine.aborted_count == 1
                assert not a.session.managed.session.tree.calls
                assert not a.session.managed.call_tasks

    run(test)


def test_reward_and_end_that_the_journal_refuses_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def test() -> None:
        journal = tmp_path / "j"
        async with agent("x", journal=journal) as a:
            monkeypatch.setattr(Journal, "_write_inline", lambda _, **__: False)
            monkeypatch.setattr(Journal, "_commit", full)
            url, key = f"{a.gateway.url}/sessions/{a.session.id}", a.control_headers
            assert (await a.http.post(f"{url}/reward", json=1, headers=key)).status_code == 503
            for _ in range(2):
                assert (await a.http.post(f"{url}/finalize", headers=key)).status_code == 503
            view = await a.get("")
            assert (view["state"], view["rewards"]) == ("open", [])
            monkeypatch.undo()
            session_id = a.session.id
        async with Gateway(engine=ScriptedEngine(), codec=ToyCodec(), journal=journal) as again:
            assert again.sessions.get(session_id).state == "open"

    run(test)


def test_answer_that_the_journal_refused_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            monkeypatch.setattr(Journal, "_write_inline", lambda _, **__: False)
            monkeypatch.setattr(Journal, "_commit", full)
            assert (await a.ask("p")).status_code == 503
            assert not (await a.get("/samples"))["samples"]
            monkeypatch.undo()

    run(test)


def test_recently_used_session_is_not_idle_after_a_cancelled_call() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec(), gate=asyncio.Event())
        async with agent(engine=engine, config=GatewayConfig(idle_s=600)) as a:
            answer = asyncio.create_task(a.ask("p"))
            while not engine.received_prompts:
                await asyncio.sleep(0)
            a.session.managed.last_used -= 1000
            answer.cancel()
            while a.session.managed.in_flight:
                await asyncio.sleep(0.001)
            assert not a.session.managed.is_idle(600)

    run(test)


# -- the policy --------------------------------------------------------------------------------------


async def _policy(a: Agent, verb: str, body: Any = None) -> httpx.Response:
    return await a.http.post(f"{a.gateway.url}/policy/{verb}", json=body, headers=a.admin_headers)


async def _policy_state(a: Agent) -> list[tuple[bool, int]]:
    """`paused` and `version` in the responses of /healthz and /engines."""
    urls = [a.gateway.url + path for path in ("/healthz", "/engines")]
    states = [(await a.http.get(url, headers=a.admin_headers)).json() for url in urls]
    return [(state["paused"], state["version"]) for state in states]


def test_health_and_engines_report_a_paused_policy() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert await _policy_state(a) == [(False, 0)] * 2
            assert (await _policy(a, "pause")).json() == {"paused": True, "version": 0}
            assert await _policy_state(a) == [(True, 0)] * 2
            assert (await _policy(a, "resume", {"version": 4})).json() == {"paused": False, "version": 4}
            assert await _policy_state(a) == [(False, 4)] * 2

    run(test)


def test_version_never_decreases() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await _policy(a, "resume", {"version": 5})
            await _policy(a, "pause")
            refused = await _policy(a, "resume", {"version": 3})
            assert refused.status_code == 400
            assert "version: got 3, expected 5, the version of now, or a later one" in refused.text
            assert await _policy_state(a) == [(True, 5)] * 2
            for body in ({"version": 5}, None, {"version": 6}):
                assert (await _policy(a, "resume", body)).status_code == 200
            assert await _policy_state(a) == [(False, 6)] * 2

    run(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"verison": 9}, "field: got 'verison', expected only version"),
        ([9], "body: got [9], expected an object"),
        (9, "body: got 9, expected an object"),
        ({"version": 1.0}, "version: got 1.0, expected a whole number"),
        ({"version": -1}, "version: got -1, expected a whole number"),
        ({"version": 2**31}, "version: got 2147483648, expected a whole number"),
    ],
)
def test_invalid_resume_leaves_the_policy_paused(body: Any, message: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            await _policy(a, "pause", {})
            refused = await _policy(a, "resume", body)
            assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True)
            assert await _policy_state(a) == [(True, 0)] * 2

    run(test)


def test_pause_takes_no_fields() -> None:
    async def test() -> None:
        async with agent("x") as a:
            refused = await _policy(a, "pause", {"version": 3})
            assert (refused.status_code, "field: got 'version', expected none" in refused.text) == (400, True)
            assert await _policy_state(a) == [(False, 0)] * 2

    run(test)


@pytest.mark.parametrize("replicas", [False, True])
def test_calls_wait_until_a_resume_succeeds(replicas: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            async with agent(gateway_engine=Replicas([engine]) if replicas else engine) as a:
                await _policy(a, "pause")
                answer = asyncio.create_task(a.ask("p", max_tokens=3))
                server.failing_paths = {"/update_weight_version"}
                failed = await _policy(a, "resume", {"version": 2})
                assert (failed.status_code, "broken" in failed.text) == (502, True)
                assert await _policy_state(a) == [(True, 0)] * 2
                assert not server.bodies
                assert not answer.done()
                server.failing_paths = set()
                assert (await _policy(a, "resume", {"version": 2})).json() == {"paused": False, "version": 2}
                assert (await answer).status_code == 200
                (line,) = await a.timelines()
                assert line["versions"][-3:] == [2] * 3

    run(test)


def test_upstream_has_no_policy_to_pause() -> None:
    async def test() -> None:
        async with agent(gateway_engine=Router(UpstreamChat("http://127.0.0.1:1", name="far"))) as a:
            assert (await _policy(a, "pause")).json() == {"paused": False, "version": 0}
            assert (await _policy(a, "resume", {"version": 2})).json() == {"paused": False, "version": 0}

    run(test)


# -- engines -----------------------------------------------------------------------------------------

SERVER_INFO = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}


def test_admin_adds_and_removes_replicas() -> None:
    async def test() -> None:
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = SERVER_INFO
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                url, admin = f"{a.gateway.url}/engines", a.admin_headers
                first = {"name": router.describe_replicas()[0]["name"]}
                refused = await a.http.request("DELETE", url, json=first, headers=admin)
                assert (refused.status_code, "is the last one" in refused.text) == (400, True)
                added = await a.http.post(url, json={"url": two.url}, headers=admin)
                assert (added.status_code, len(added.json()["engines"])) == (201, 2)
                removed = await a.http.request("DELETE", url, json=first, headers=admin)
                assert (removed.status_code, len(removed.json()["engines"])) == (200, 1)
                assert (await a.http.get(url)).status_code == 401

    run(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"url": "nowhere"}, "nowhere"),
        ({"url": "http://h:1", "version": "5"}, "version: got '5', expected a whole number"),
        ({"url": "http://h:1", "version": True}, "version: got True, expected a whole number"),
        ({"url": "http://h:1", "verison": 5}, "field: got 'verison', expected only url, version"),
        (["http://h:1"], "body: got "),
    ],
)
def test_invalid_body_adds_no_replica(body: Any, message: str) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            router = Router(Replicas([VllmEngine(server.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                refused = await a.http.post(f"{a.gateway.url}/engines", json=body, headers=a.admin_headers)
                assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True)
                assert len(router.describe_replicas()) == 1

    run(test)
