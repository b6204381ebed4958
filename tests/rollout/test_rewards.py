"""Rewards: functions, verifier commands, rewards of parts, and workers in parallel."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Trajectory
from branchline.core.errors import InputError
from branchline.rollout.rewards import RewardScorer, VerifierCommand
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import MemorySink
from tests.export.test_samples import forked_session
from tests.rollout.harness import ask, run, scripted_gateway


async def two_turns(task: Mapping[str, Any], session: Any) -> None:
    await ask(session, task["prompt"])
    await ask(session, task["prompt"], "ok", "more")


def rewarded(
    reward: Any, tasks: Any = ({"id": "a", "prompt": "x", "answer": "ok"},), **config: Any
) -> MemorySink:
    sink = MemorySink()

    async def test() -> None:
        async with scripted_gateway() as gateway:
            await Rollout(
                gateway, two_turns, reward=reward, sinks=[sink], config=RolloutConfig(**config)
            ).run(tasks)

    run(test)
    return sink


def test_an_async_function_may_reward_turns_and_tools_and_the_whole() -> None:
    async def reward(task: Mapping[str, Any], trajectory: Trajectory) -> list[dict[str, Any]]:
        assert trajectory.answer == task["answer"]
        return [{"score": 0.5, "turn": 1}, {"score": 2.0, "tool": "search"}, {"score": 1.0, "note": "good"}]

    (result,) = rewarded(reward).results
    assert result.reward == 1.0
    (sample,) = result.samples
    spans = [(span.score, span.turn, span.tool) for span in sample.rewards]
    assert sorted(spans, key=str) == [(0.5, 1, ""), (2.0, None, "search")]
    assert sample.reward_extras == '{"note":"good"}'


@pytest.mark.parametrize("value", [None, "much", {"points": 1}, [{"turn": 1}], float("inf"), object()])
def test_a_value_that_is_no_reward_fails_the_session(value: Any) -> None:
    (result,) = rewarded(lambda task, trajectory: value).results
    assert (result.status, str(result.end.cause)) == ("failed", "reward_error")


def test_a_function_that_raises_fails_its_session_only() -> None:
    def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        return 1 / int(task["id"])

    results = rewarded(reward, [{"id": "0", "prompt": "x"}, {"id": "1", "prompt": "x"}]).results
    found = {result.job.task.uid: (result.status, result.end.error) for result in results}
    assert found == {"0": ("failed", "ZeroDivisionError: division by zero"), "1": ("finished", "")}


def test_rewards_are_computed_in_parallel_up_to_the_number_of_workers() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 1.0

    sink = rewarded(reward, [{"id": str(index), "prompt": "x"} for index in range(12)], reward_workers=3)
    assert len(sink.results) == 12
    assert most == 3


def test_a_reward_that_takes_too_long_fails_the_session() -> None:
    async def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    (result,) = rewarded(reward, reward_timeout_s=0.02).results
    assert (result.status, result.end.error) == ("failed", "TimeoutError: timed out after 0.02 s")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", 1.0),
        ("false", 0.0),
        ("echo checking; echo 0.25", 0.25),
        ("""echo '{"score": 0.5, "passed": 3}'""", 0.5),
        ("grep -q BRANCHLINE_NOTHING", 0.0),
        ("grep -q question", 1.0),
        ("""test "$BRANCHLINE_TASK" = '{"prompt":"question"}'""", 1.0),
        ("exit 2", None),
        ("echo broken >&2; kill -9 $$", None),
    ],
)
def test_a_verifier_command_prints_the_reward_or_says_it_by_its_exit_code(
    command: str, expected: float | None
) -> None:
    (result,) = rewarded(VerifierCommand(command), [{"prompt": "question"}]).results
    assert result.reward == expected
    assert result.status == ("failed" if expected is None else "finished")


def test_a_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(InputError, match=r"reward: expected a function of \(task, trajectory\)"):
        RewardScorer(lambda: 1.0)  # type: ignore[arg-type, misc]
    with pytest.raises(InputError, match="reward: got 3, expected a function"):
        RewardScorer(3)  # type: ignore[arg-type]


@given(st.floats(-5, 5), st.booleans())
def test_a_reward_added_to_a_trajectory_equals_one_that_was_posted(score: float, has_timeline: bool) -> None:
    session = forked_session()
    parts: list[Any] = [{"score": 3.0, "timeline": session.tree.leaves()[0].id}] if has_timeline else []
    posted = Trajectory.from_session(session, rewards=[*parts, {"score": score}])
    added = Trajectory.from_session(session, rewards=parts).with_reward(score)
    assert added.reward == posted.reward == score
    assert [sample.reward for sample in added.samples] == [sample.reward for sample in posted.samples]
