"""SCENARIOS part E, the rollout: a relative judge (3), isolated failures (5) and dispatch by name (7)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.rollout.judge import RelativeJudge
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import MemorySink
from tests.rollout.harness import ask, ask_once, run, scripted_gateway


async def ask_with_sub_agent(task: Mapping[str, Any], session: Any) -> None:
    """A main agent and a sub-agent with a system prompt of its own: two histories."""
    await ask(session, {"role": "system", "content": "Work."}, {"role": "user", "content": task["prompt"]})
    helper = {"role": "system", "content": "Help the main agent."}
    await ask(session, helper, {"role": "user", "content": f"sub-question in {session.id}"}, agent="helper")


def test_e3_a_judge_is_shown_every_history_and_ranks_trajectories_with_additional_ones() -> None:
    async def test() -> None:
        shown: list[str] = []

        async def complete(messages: Any) -> str:
            shown.append(messages[-1]["content"])
            ids = re.findall(r'<trajectory id="(\w+)">', shown[-1])
            return json.dumps({"scores": [{"trajectory_id": one, "score": 0.5} for one in ids]})

        async with scripted_gateway() as gateway:
            sink = MemorySink()
            rollout = Rollout(
                gateway,
                ask_with_sub_agent,
                judge=RelativeJudge(complete),
                sinks=[sink],
                config=RolloutConfig(n=2),
            )
            stats = await rollout.run([{"id": "a", "prompt": "main question"}])
        assert stats.finished == 2
        assert len(shown) == 1
        assert shown[0].count("sub-question in") == 2
        assert shown[0].count("main question") == 1, "what all trajectories begin with is shown once"
        for result in sink.results:
            assert result.reward == 0.5
            assert len(result.trajectory.additional_histories) == 1

    run(test)


def test_e5_one_failed_session_does_not_fail_its_prompt() -> None:
    async def test() -> None:
        async def first_raises(task: Mapping[str, Any], session: Any) -> float:
            await ask(session, task["prompt"])
            if session.id.endswith("-0"):
                raise RuntimeError("no luck")
            return 1.0

        async with scripted_gateway() as gateway:
            sink = MemorySink()
            config = RolloutConfig(n=2)
            rollout = Rollout(gateway, first_raises, sinks=[sink], config=config, run_id="r")
            stats = await rollout.run([{"id": "a", "prompt": "hello"}])
            by_session = {result.session: result for result in sink.results}
        assert stats.prompts == {"a": "finished"}
        assert (stats.sessions, stats.finished, stats.failed, stats.aborted) == (2, 1, 1, 0)
        assert by_session["r-a-1"].status == "finished"
        assert len(by_session["r-a-1"].trajectory.samples) == 1
        assert by_session["r-a-0"].status == "failed"
        assert by_session["r-a-0"].trajectory.failed
        assert by_session["r-a-0"].trajectory.samples == ()
        assert by_session["r-a-0"].trajectory.history is not None, "what happened is kept"
        ((reason, count),) = stats.failure_reasons.items()
        assert (reason.partition(" (")[0], count) == ("runner_error: RuntimeError: no luck", 1)

    run(test)


def test_e5_a_prompt_whose_sessions_all_fail_is_a_failure_with_an_error() -> None:
    async def test() -> None:
        async def raises(task: Mapping[str, Any], session: Any) -> float:
            if task["id"] == "bad":
                raise ValueError("broken")
            return await ask_once(task, session)

        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, raises, config=RolloutConfig(n=2))
            stats = await rollout.run([{"id": "bad", "prompt": "x"}, {"id": "good", "prompt": "y"}])
        assert stats.prompts == {"bad": "failure", "good": "finished"}
        ((task, error),) = stats.errors.items()
        assert (task, error.partition(" (")[0]) == ("bad", "runner_error: ValueError: broken")
        assert (stats.finished, stats.failed) == (2, 2)

    run(test)


def test_e7_tasks_are_dispatched_to_runners_by_agent_name() -> None:
    async def test() -> None:
        seen: list[tuple[str, str]] = []

        async def math(task: Mapping[str, Any], session: Any) -> float:
            seen.append(("math", task["id"]))
            return await ask_once(task, session)

        async def code(task: Mapping[str, Any], session: Any) -> float:
            seen.append(("code", task["id"]))
            return await ask_once(task, session)

        tasks = [
            {"id": "1", "prompt": "x", "agent_name": "math"},
            {"id": "2", "prompt": "x", "agent_name": "code"},
            {"id": "3", "prompt": "x", "agent_name": "math"},
        ]
        async with scripted_gateway() as gateway:
            sink = MemorySink()
            runners = {"math": math, "code": code}
            await Rollout(gateway, runners, sinks=[sink], run_id="r").run(tasks)
        assert sorted(seen) == [("code", "2"), ("math", "1"), ("math", "3")]
        assert {(result.session, result.agent_name) for result in sink.results} == {
            ("r-1-0", "math"),
            ("r-2-0", "code"),
            ("r-3-0", "math"),
        }

    run(test)


def test_e7_an_unknown_agent_name_is_an_error_before_anything_runs() -> None:
    async def test() -> None:
        started: list[str] = []

        async def math(task: Mapping[str, Any], session: Any) -> float:
            started.append(task["id"])
            return 1.0

        tasks = [
            {"id": "1", "prompt": "x", "agent_name": "math"},
            {"id": "2", "prompt": "x", "agent_name": "poet"},
        ]
        async with scripted_gateway() as gateway:
            with pytest.raises(
                InputError, match=r"tasks\[1\]\.agent_name: got 'poet', expected one of .*'math'"
            ):
                await Rollout(gateway, {"math": math}).run(tasks)
            assert len(gateway.sessions) == 0
        assert started == []

    run(test)
