"""Rollouts over several gateways, by their URLs: placement, restarts under the same URL, lost gateways."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.toy import ToyCodec
from branchline.client.async_client import AsyncClient, AsyncClientSession
from branchline.core.errors import GatewayError, InputError
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.rollout.gateway_pool import GatewayPool
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.session_result import SessionJob
from branchline.rollout.sinks import MemorySink
from branchline.rollout.tasks import RolloutTask
from tests.hang import HANG_S
from tests.rollout.harness import ask, judge_answer, run, scripted_gateway

ADMIN_KEY = "ak-test"
TASKS = [{"id": str(index), "prompt": f"question {index}"} for index in range(4)]


def answer_last_line(request: ScriptedRequest) -> str:
    return f"answer to {request.last_line}"


async def start_gateway(journal: Path | None = None, port: int = 0) -> Gateway:
    codec = ToyCodec.chatml()
    config = GatewayConfig(admin_key=ADMIN_KEY, drain_s=1.0)
    engine = ScriptedEngine(codec, answer_last_line)
    gateway = Gateway(engine=engine, codec=codec, journal=journal, port=port, config=config)
    await gateway.start()
    return gateway


@asynccontextmanager
async def two_gateways(
    retry_timeout_s: float = HANG_S, folder: Path | None = None
) -> AsyncIterator[tuple[GatewayPool, dict[str, Gateway]]]:
    """Two gateways and a pool over them; a test may replace a gateway in the mapping."""
    journals = [None if folder is None else folder / name for name in ("a", "b")]
    gateways = {gateway.url: gateway for gateway in [await start_gateway(journal) for journal in journals]}
    try:
        async with GatewayPool(list(gateways), ADMIN_KEY, retry_timeout_s=retry_timeout_s) as pool:
            yield pool, gateways
    finally:
        for gateway in gateways.values():
            await gateway.stop()


async def ask_patiently(session: Any, *messages: Any) -> dict[str, Any]:
    """Asks again while the gateway is not reachable, as SDKs do."""
    while True:
        try:
            return await ask(session, *messages)
        except (httpx.TransportError, httpx.HTTPStatusError):
            await asyncio.sleep(0.02)


async def ask_twice(task: Mapping[str, Any], session: Any) -> float:
    first = await ask_patiently(session, task["prompt"])
    await ask_patiently(session, task["prompt"], first, "again")
    return float(task["id"])


def gateway_url(session: Any) -> str:
    return str(session.base_url).partition("/sessions")[0]


def test_a_rollout_over_two_gateways_gives_what_one_gateway_gives() -> None:
    async def test() -> None:
        urls: Counter[str] = Counter()

        async def agent(task: Mapping[str, Any], session: Any) -> float:
            urls[gateway_url(session)] += 1
            return await ask_twice(task, session)

        results: list[dict[str, Any]] = []
        for is_pooled in (False, True):
            sink = MemorySink()
            async with two_gateways() as (pool, gateways), scripted_gateway(answer_last_line) as alone:
                gateway, config = pool if is_pooled else alone, RolloutConfig(n=3)
                rollout = Rollout(gateway, agent, sinks=[sink], config=config, run_id="r")
                stats = await rollout.run(TASKS)
                assert all(not len(gateway.sessions) for gateway in (*gateways.values(), alone))
                assert set(pool.session_counts.values()) == {0}
            assert stats.finished == 12
            assert stats.sampled_tokens == stats.delivered_tokens > 0
            results.append({result.session: result for result in sink.results})
        one, two = results
        assert set(one) == set(two)
        for session, result in two.items():
            assert result.reward == one[session].reward
            assert result.calls == one[session].calls == 2
            assert result.answer_lengths == one[session].answer_lengths
            for sample, other in zip(result.samples, one[session].samples, strict=True):
                for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
                    assert np.array_equal(getattr(sample, name), getattr(other, name), equal_nan=True)
        pooled = [count for url, count in urls.items() if count != 12]
        assert pooled == [6, 6], "sessions are spread evenly"

    run(test)


def test_sessions_of_a_gateway_that_is_restarted_under_its_url_continue(tmp_path: Path) -> None:
    async def test() -> None:
        acknowledged: list[tuple[str, str]] = []
        restarted = asyncio.Event()
        sink = MemorySink()
        async with two_gateways(folder=tmp_path) as (pool, gateways):
            first_url = next(iter(gateways))

            async def restart() -> None:
                port = int(first_url.rpartition(":")[2])
                try:
                    await gateways[first_url].stop()
                    while True:
                        try:
                            gateways[first_url] = await start_gateway(tmp_path / "a", port)
                            break
                        except OSError as error:  # a client of another test may have the port for a moment
                            if error.errno != errno.EADDRINUSE:
                                raise
                            await asyncio.sleep(0.05)
                finally:
                    restarted.set()

            async def agent(task: Mapping[str, Any], session: Any) -> float:
                answer = await ask_patiently(session, task["prompt"])
                acknowledged.append((session.id, answer["content"]))
                if len(acknowledged) == 4:
                    restarting.append(asyncio.create_task(restart()))
                if gateway_url(session) == first_url:
                    await restarted.wait()
                again = await ask_patiently(session, task["prompt"], answer, "again")
                acknowledged.append((session.id, again["content"]))
                await session.reward(0.5, part="agent")
                return 1.0

            restarting: list[asyncio.Task[None]] = []
            stats = await Rollout(pool, agent, sinks=[sink], config=RolloutConfig(n=2)).run(TASKS)
            await asyncio.gather(*restarting)
        assert restarted.is_set()
        assert (stats.sessions, stats.finished) == (8, 8)
        assert stats.sampled_tokens == stats.delivered_tokens
        texts = {
            result.session: [message["content"] for message in result.line["histories"][0]["messages"]]
            for result in sink.results
        }
        for session, content in acknowledged:
            assert content in texts[session], "no answer that an agent received is missing"

    run(test)


def test_sessions_of_a_lost_gateway_are_aborted_and_run_again_at_another() -> None:
    async def test() -> None:
        stopped = asyncio.Event()
        sink = MemorySink()
        async with two_gateways(retry_timeout_s=0.1) as (pool, gateways):
            lost_url = next(iter(gateways))
            waiting: set[str] = set()

            async def agent(task: Mapping[str, Any], session: Any) -> float:
                await ask(session, task["prompt"])
                if not stopped.is_set():
                    waiting.add(session.id)
                    if len(waiting) == len(TASKS):
                        await gateways[lost_url].stop()
                        stopped.set()
                    await stopped.wait()
                return 1.0

            stats = await Rollout(pool, agent, sinks=[sink], run_id="r").run(TASKS)
            assert pool.urls == [url for url in gateways if url != lost_url]
        found = {result.session: (result.status, str(result.end.cause or "")) for result in sink.results}
        lost = {session for session, end in found.items() if end == ("aborted", "node_lost")}
        assert len(lost) == 2
        assert {session: end for session, end in found.items() if session not in lost} == {
            **{f"r-{index}-0": ("finished", "") for index in range(4) if f"r-{index}-0" not in lost},
            **{f"{session}-r1": ("finished", "") for session in lost},
        }
        assert stats.prompts == {task["id"]: "finished" for task in TASKS}
        assert "does not answer" not in stats.abort_reasons
        assert stats.abort_reasons == {"node_lost": 2}

    run(test)


def test_sessions_that_a_restarted_gateway_does_not_have_are_run_again() -> None:
    async def test() -> None:
        restarted = asyncio.Event()
        sink = MemorySink()
        async with two_gateways() as (pool, gateways):
            url = next(iter(gateways))

            async def agent(task: Mapping[str, Any], session: Any) -> float:
                await ask(session, task["prompt"])
                if gateway_url(session) == url and not restarted.is_set():
                    await gateways[url].stop()
                    gateways[url] = await start_gateway(port=int(url.rpartition(":")[2]))
                    restarted.set()
                return 1.0

            stats = await Rollout(pool, agent, sinks=[sink], run_id="r").run(TASKS[:1])
            assert len(pool.urls) == 2, "the gateway itself is not lost"
        found = {result.session: (result.status, str(result.end.cause or "")) for result in sink.results}
        assert found == {"r-0-0": ("aborted", "node_lost"), "r-0-0-r1": ("finished", "")}
        assert stats.sessions == 2

    run(test)


def test_a_rollout_without_gateways_ends_with_an_error_and_writes_every_session_once() -> None:
    async def test() -> None:
        sink = MemorySink()
        async with two_gateways(retry_timeout_s=0.05) as (pool, gateways):
            for gateway in gateways.values():
                await gateway.stop()
            with pytest.raises(GatewayError, match="gateways: got none that answers, expected at least one"):
                await Rollout(pool, ask_twice, sinks=[sink], config=RolloutConfig(n=2)).run(TASKS)
        sessions = [result.session for result in sink.results]
        assert len(set(sessions)) == len(sessions)
        assert {result.status for result in sink.results} <= {"aborted"}

    run(test)


def test_bad_rewards_a_judge_and_staleness_work_as_with_one_gateway() -> None:
    async def test() -> None:
        async def agent(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, f"{task['prompt']} of {session.id}")

        def reward(task: Mapping[str, Any], trajectory: Any) -> Any:
            return {"0": float("nan"), "1": "good", "2": np.float32(0.5)}.get(task["id"], 1)

        async def judge(messages: Any) -> str:
            return judge_answer(messages, 0.25, 0.75)

        async with two_gateways() as (pool, _):
            stats = await Rollout(pool, agent, reward=reward).run(TASKS)
            assert stats.prompts == {"0": "failure", "1": "failure", "2": "finished", "3": "finished"}
            assert sorted(stats.rewards) == [0.5, 1.0]
            judged = [{**task, "id": f"j{task['id']}"} for task in TASKS]
            rollout = Rollout(pool, agent, judge=RelativeJudge(judge), config=RolloutConfig(n=2))
            stats = await rollout.run(judged)
            assert sorted(stats.rewards) == [0.25] * 4 + [0.75] * 4
            # The policy moves on between the answers and the end of the sessions.
            await pool.pause()
            await pool.resume(3)

            async def update(task: Mapping[str, Any], session: Any) -> None:
                await ask(session, task["prompt"])
                await pool.resume(7)

            stale = [{**task, "id": f"s{task['id']}"} for task in TASKS[:1]]
            stats = await Rollout(pool, update, config=RolloutConfig(max_staleness=1)).run(stale)
            assert stats.abort_reasons == {"stale": 1}

    run(test)


def test_a_session_that_its_agent_ended_is_not_ended_again() -> None:
    async def test() -> None:
        sink = MemorySink()
        async with two_gateways() as (pool, _):

            async def agent(task: Mapping[str, Any], session: Any) -> None:
                await ask(session, task["prompt"])
                if task["id"] == "0":
                    await session.abort("no")
                else:
                    await session.finalize()

            await Rollout(pool, agent, sinks=[sink], run_id="r").run(TASKS[:2])
        found = {result.session: (result.status, result.end.error) for result in sink.results}
        assert found == {"r-0-0": ("aborted", "no"), "r-1-0": ("finished", "")}

    run(test)


def test_urls_are_given_once() -> None:
    for urls in ([], ["http://a:1", "http://a:1"]):
        with pytest.raises(InputError, match=r"urls: got .*, expected at least one gateway, and each once"):
            GatewayPool(urls)


@settings(max_examples=50)
@given(
    count=st.integers(1, 5),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=40),
)
def test_a_new_session_goes_to_a_gateway_with_the_fewest(count: int, steps: list[int | None]) -> None:
    """A step opens a session, or releases one that is open."""

    async def test() -> None:
        pool = GatewayPool([f"http://host:{index + 1}" for index in range(count)])
        opened: list[str] = []
        for number, step in enumerate(steps):
            if step is None:
                before = pool.session_counts
                job = SessionJob(RolloutTask(f"t{number}", {}))
                await pool.open(job, {})
                opened.append(job.session_id)
                after = pool.session_counts
                (changed,) = [url for url in after if after[url] != before[url]]
                assert before[changed] == min(before.values())
                assert after[changed] == before[changed] + 1
            elif opened:
                await pool.release(opened.pop(step % len(opened)))
            assert sum(pool.session_counts.values()) == len(opened)

    async def nothing(*_: Any, **__: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClient, "open_session", nothing)
        patch.setattr(AsyncClientSession, "delete", nothing)
        run(test)
