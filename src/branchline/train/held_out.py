"""Scores the policy of a run on tasks that it does not train on, greedily and as it samples in training.

Its sessions are those of the run's gateway and agent, under ids of their own, so that a run samples and
trains the same with and without them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from branchline.train.episodes import EpisodeGroup, EpisodeRunner

log = logging.getLogger("branchline.train")
GREEDY, SAMPLED = "eval/reward_greedy", "eval/reward_sampled"
_CONCURRENCY = 64


async def evaluate(runners: Mapping[str, EpisodeRunner], tasks: Sequence[Any], step: int) -> dict[str, float]:
    """Runs an episode of each task with each runner; returns the means of their rewards, under the names of
    the runners. A mean is absent if no episode finished."""
    started_at = time.perf_counter()
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def run(runner: EpisodeRunner, task: Any, name: str) -> EpisodeGroup:
        async with limit:
            return await runner.run_group(task, name, 1)

    metrics: dict[str, float] = {"step": float(step)}
    failed = 0
    for name, runner in runners.items():
        kind = name.rpartition("_")[2]
        groups = await asyncio.gather(
            *(run(runner, task, f"eval{step}-{kind}-{index}") for index, task in enumerate(tasks))
        )
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rewards = [one.episode_reward for one in trajectories if not one.failed]
        known = [reward for reward in rewards if reward is not None]
        failed += len(trajectories) - len(known)
        if known:
            metrics[name] = sum(known) / len(known)
        else:
            log.warning("step %d: no episode of the evaluation finished: %s", step, groups[0].errors[0])
    return {
        **metrics,
        "eval/episodes": float(len(runners) * len(tasks)),
        "eval/failed_episodes": float(failed),
        "eval/time": time.perf_counter() - started_at,
    }


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Returns one line about an evaluation."""
    greedy, sampled = (format(metrics[name], ".3f") if name in metrics else "-" for name in (GREEDY, SAMPLED))
    failed = f", {metrics['eval/failed_episodes']:.0f} failed" if metrics["eval/failed_episodes"] else ""
    return f"step {metrics['step']:3.0f}  eval: reward {greedy} greedy, {sampled} as sampled{failed}"


def is_evaluation(metrics: Mapping[str, float]) -> bool:
    """Whether a line of metrics is that of an evaluation, and not of a step."""
    return "eval/episodes" in metrics
