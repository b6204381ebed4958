"""Rollouts with a judge that is wrong: its sessions end with `judge_error`, and the rollout goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from branchline import TrajectoryGroup
from branchline.export.credit import group_statistics
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import MemorySink
from tests.rollout.harness import ask, run, scripted_gateway

TASKS = [{"id": str(index), "prompt": f"question {index}"} for index in range(4)]


async def ask_prompt(task: Mapping[str, Any], session: Any) -> None:
    await ask(session, task["prompt"])


@pytest.mark.parametrize("returned", [None, [1], "11", {"score": 1}, float("nan"), RuntimeError("down")])
def test_a_judge_function_that_is_wrong_fails_its_task_and_the_rollout_goes_on(returned: object) -> None:
    async def test() -> None:
        def judge(task: Any, trajectories: Any) -> Any:
            task["prompt"] = "changed"
            if task["id"] != "0":
                return [0.25, 0.75]
            if isinstance(returned, Exception):
                raise returned
            return returned

        async with scripted_gateway() as gateway:
            sink = MemorySink()
            rollout = Rollout(gateway, ask_prompt, judge=judge, sinks=[sink], config=RolloutConfig(n=2))
            stats = await rollout.run(TASKS)
        assert stats.prompts == {"0": "failure", "1": "finished", "2": "finished", "3": "finished"}
        failed = [result for result in sink.results if result.status == "failed"]
        assert [result.end.cause for result in failed] == ["judge_error", "judge_error"]
        assert sorted(stats.rewards) == [0.25] * 3 + [0.75] * 3
        assert "changed" not in {result.job.task.row["prompt"] for result in sink.results}

    run(test)


def test_a_trajectory_that_the_judge_did_not_score_is_left_out_of_the_statistics_of_its_group() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            sink = MemorySink()
            rollout = Rollout(
                gateway,
                ask_prompt,
                judge=lambda task, trajectories: [0.0, 7.0, 1.0],
                sinks=[sink],
                config=RolloutConfig(n=3),
            )
            await rollout.run(TASKS[:1])
        trajectories = [result.trajectory for result in sink.results]
        assert sorted(trajectory.failed for trajectory in trajectories) == [False, False, True]
        statistics = group_statistics(TrajectoryGroup(trajectories))
        assert (statistics.mean, statistics.episodes) == (0.5, 2)

    run(test)
