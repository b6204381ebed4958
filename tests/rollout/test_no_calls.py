"""A session without an answered model call has failed, whatever its agent returned."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline.cli.main import main
from branchline.engines.scripted import ScriptedRequest
from branchline.export.credit import group_statistics
from branchline.rollout.gateway_pool import GatewayPool
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.judge_scores import Judgement
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.runners import CommandRunner, make_runner
from branchline.rollout.session_result import EndCause
from branchline.rollout.sinks import MemorySink
from branchline.train.episodes import EpisodeRunner
from tests.rollout.harness import ask_once, run, scripted_gateway

TASK = {"id": "a", "prompt": "hi"}
HINT = "it may not read its base URL (OPENAI_BASE_URL or ANTHROPIC_BASE_URL"


async def idle_agent(task: Any, session: Any) -> float:
    return 1.0


async def idle_first(task: Any, session: Any) -> float:
    """Asks nothing in the first session of a task."""
    if session.id.endswith("-0"):
        return 1.0
    await asyncio.sleep(0.05)
    return 0.5 * await ask_once(task, session)


def test_a_session_without_a_call_fails_with_a_hint_and_enters_no_statistics() -> None:
    async def test() -> None:
        sink = MemorySink()
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, idle_first, sinks=[sink], config=RolloutConfig(n=2)).run([TASK])
        assert (stats.finished, stats.failed, stats.rewards) == (1, 1, [0.5])
        failed = next(result for result in sink.results if result.status == "failed")
        assert failed.end.cause == EndCause.NO_CALLS
        assert HINT in failed.end.error
        assert (failed.reward, failed.samples, failed.trajectory.failed) == (None, (), True)

    run(test)


def test_a_command_that_ends_with_zero_and_asked_nothing_fails() -> None:
    async def test() -> None:
        sink = MemorySink()
        async with scripted_gateway() as gateway:
            await Rollout(gateway, CommandRunner("true"), sinks=[sink]).run([TASK])
        assert [result.end.cause for result in sink.results] == [EndCause.NO_CALLS]

    run(test)


def test_a_session_without_a_call_wins_no_oversampling() -> None:
    async def test() -> None:
        sink = MemorySink()
        async with scripted_gateway() as gateway:
            config = RolloutConfig(n=1, oversample=1)
            stats = await Rollout(gateway, idle_first, sinks=[sink], config=config).run([TASK])
        assert (stats.finished, stats.failed, stats.aborted) == (1, 1, 0)

    run(test)


def test_no_calls_are_retried() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> float:
            return await ask_once(task, session) if "-r1" in session.id else 1.0

        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, agent, config=RolloutConfig(retries={"no_calls": 1})).run([TASK])
        assert (stats.finished, stats.failed) == (1, 1)

    run(test)


def test_calls_that_all_failed_are_no_calls() -> None:
    async def test() -> None:
        def rule(request: ScriptedRequest) -> str:
            raise RuntimeError("the engine is broken")

        async def agent(task: Any, session: Any) -> float:
            with pytest.raises(httpx.HTTPStatusError):
                await ask_once(task, session)
            return 1.0

        sink = MemorySink()
        async with scripted_gateway(rule) as gateway:
            await Rollout(gateway, agent, sinks=[sink]).run([TASK])
        (result,) = sink.results
        assert result.end.cause == EndCause.NO_CALLS
        assert result.end.error.endswith("or all its calls failed")

    run(test)


def test_calls_that_were_all_cancelled_are_no_calls() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> float:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
            headers = {"authorization": f"Bearer {session.api_key}"}
            url = f"{session.base_url}/chat/completions"
            async with (
                httpx.AsyncClient() as http,
                http.stream("POST", url, json=body, headers=headers) as one,
            ):
                async for _ in one.aiter_lines():
                    break
            managed = gateway.sessions.get(session.id)
            while managed.in_flight or not managed.session.tree.calls:
                await asyncio.sleep(0.001)
            return 1.0

        def rule(request: ScriptedRequest) -> str:
            return "word " * 100_000

        sink = MemorySink()
        async with scripted_gateway(rule) as gateway:
            await Rollout(gateway, agent, sinks=[sink]).run([TASK])
        (result,) = sink.results
        assert result.end.cause == EndCause.NO_CALLS
        assert result.end.error.startswith("of 1 model calls none was answered")

    run(test)


def test_neither_a_judge_nor_a_reward_function_is_asked_about_sessions_without_calls() -> None:
    async def test() -> None:
        judged: list[int] = []

        class Judge(RelativeJudge):
            async def score_group(self, task: Any, trajectories: Any) -> list[Judgement]:
                judged.append(len(trajectories))
                return [Judgement(0.25)] * len(trajectories)

        async def never(messages: Any) -> str:
            raise AssertionError

        def reward(task: Any, trajectory: Any) -> float:
            judged.append(1)
            return 0.25

        for options in ({"judge": Judge(never)}, {"reward": reward}):
            judged.clear()
            async with scripted_gateway() as gateway:
                rollout = Rollout(gateway, idle_first, config=RolloutConfig(n=2), **options)
                stats = await rollout.run([TASK])
            assert judged == [1]
            assert (stats.finished, stats.failed) == (1, 1)

    run(test)


def test_a_session_that_its_agent_finalized_without_a_call_fails() -> None:
    async def test() -> None:
        async def agent(task: Any, session: Any) -> None:
            await session.finalize()

        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, agent).run([TASK])
        assert (stats.finished, stats.failed) == (0, 1)
        assert next(iter(stats.failure_reasons)).startswith("no_calls: ")

    run(test)


def test_a_session_that_an_earlier_process_completed_without_a_call_fails(tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            for name in ("r-a-0", "r-b-0"):
                session = await gateway.session(id=name)
                if name == "r-b-0":
                    await ask_once(TASK, session)
                await session.complete()
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            rollout = Rollout(gateway, idle_agent, resume=True, run_id="r")
            stats = await rollout.run([TASK, {**TASK, "id": "b"}])
        assert stats.causes == {"r-a-0": "no_calls", "r-b-0": ""}

    run(test)


def test_sessions_of_a_pool_without_calls_fail() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            url = gateway.url
            async with GatewayPool([url], gateway.admin_key) as pool:
                stats = await Rollout(pool, idle_first, config=RolloutConfig(n=2)).run([TASK])
        assert (stats.finished, stats.failed) == (1, 1)
        assert next(iter(stats.failure_reasons)).startswith("no_calls: ")

    run(test)


def test_an_episode_without_a_call_trains_nothing_and_does_not_count() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            group = await EpisodeRunner(gateway, make_runner(idle_first)).run_group(TASK, "step0-group0", 2)
        assert [trajectory.failed for trajectory in group.trajectories] == [True, False]
        statistics = group_statistics(group.trajectories)
        assert (statistics.episodes, statistics.mean) == (1, 0.5)
        (error,) = group.errors
        assert HINT in str(error)

    run(test)


def test_a_run_whose_agents_all_asked_nothing_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    arguments = ["tasks.jsonl", "--command", "true", "--run-folder", "out"]
    assert main(["run", *arguments, "--engine", "scripted"]) == 1
    assert "no_calls" in capsys.readouterr().out
    line = json.loads((tmp_path / "out/trajectories.jsonl").read_text())
    assert (line["status"], line["cause"]) == ("failed", "no_calls")


def test_training_whose_agents_all_asked_nothing_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    assert main(["train", "tasks.jsonl", "--command", "true", "--steps", "1", "--run-folder", "run"]) == 1
    error = capsys.readouterr().err
    assert "step 0: all episodes failed" in error
    assert HINT in error
