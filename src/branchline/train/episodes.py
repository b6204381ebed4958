"""Runs the episodes of a training step: sessions of a gateway, driven by the user's agent, in groups.

An agent is a runner of `rollout/runners.py`. It may use any client that can set a base URL and a key. Its
reward is what it returns or posts, or that of a reward function. An episode whose agent raises is failed: it
is logged, trains nothing and does not count in its group.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import TrajectoryGroup
from branchline.gateway.server import Gateway
from branchline.rollout.failures import keep_traceback
from branchline.rollout.rewards import RewardFunction, RewardScorer, VerifierCommand
from branchline.rollout.runners import Runner
from branchline.rollout.session_gateway import LocalGateway
from branchline.rollout.session_result import RunnerError, SessionJob, SessionResult
from branchline.rollout.session_runner import SessionRunner
from branchline.rollout.tasks import RolloutTask

log = logging.getLogger("branchline.train")


@dataclass(frozen=True)
class EpisodeGroup:
    """The episodes of one task: their trajectories, and what happened in their sessions."""

    trajectories: TrajectoryGroup
    causes: Counter[str]
    """The forks of all sessions by cause."""
    calls: int
    answer_lengths: Sequence[int]
    truncated_answers: int
    """Answers that `max_tokens` or the context window ended."""
    errors: Sequence[Exception]
    """The errors of failed episodes."""
    overridden: Counter[str]
    """The calls whose request has a sampling parameter that the run overrides, by its name."""


class EpisodeRunner:
    """Runs groups of episodes in a gateway."""

    def __init__(
        self,
        gateway: Gateway,
        agent: Runner,
        *,
        reward: RewardFunction | VerifierCommand | None = None,
        export_policy: ExportPolicy | None = None,
        sampling: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        reward_timeout_s: float | None = 600.0,
        is_evaluation: bool = False,
        log_folder: Path | None = None,
    ) -> None:
        """`sampling` overrides the sampling parameters of the agent's requests, `timeout_s` is the time limit
        of an agent and `reward_timeout_s` that of its reward. What an evaluation overrides is not counted.
        `log_folder` gets the traceback of each episode that failed, in `SESSION.log`."""
        self._is_evaluation = is_evaluation
        self._gateway = LocalGateway(gateway)
        self._store = gateway.sessions
        self._agent = agent
        self._log_folder = log_folder
        self._logged: set[str] = set()
        self._sessions = SessionRunner(
            self._gateway,
            None if reward is None else RewardScorer(reward, timeout_s=reward_timeout_s),
            options={"sampling": sampling or {}, "eval": is_evaluation},
            export_policy=export_policy,
            timeout_s=timeout_s,
            require_reward=True,
        )

    async def run_group(self, task: Any, group_id: str, size: int) -> EpisodeGroup:
        """Runs `size` episodes of a task at the same time."""
        name = task.get("agent_name") if isinstance(task, dict) else None
        group = RolloutTask(group_id, task, name or "")
        overridden: Counter[str] = Counter()
        results = await asyncio.gather(
            *(self._run_episode(SessionJob(group, slot), overridden) for slot in range(size))
        )
        causes: Counter[str] = Counter()
        for result in results:
            causes.update(result.trajectory.fork_causes)
        return EpisodeGroup(
            TrajectoryGroup([result.trajectory for result in results], group_id),
            causes,
            sum(result.calls for result in results),
            [length for result in results for length in result.answer_lengths],
            sum(result.truncated_answers for result in results),
            [_error(result) for result in results if result.end.cause is not None],
            overridden,
        )

    async def _run_episode(self, job: SessionJob, overridden: Counter[str]) -> SessionResult:
        result = await self._sessions.run(job, self._agent)
        if result.end.cause is not None:
            kept = await asyncio.to_thread(keep_traceback, self._log_folder, result.session, result.end.trace)
            log.warning("episode %s failed: %s%s", result.session, result.end.reason, kept)
        if not self._is_evaluation:
            overridden.update(self._count_overridden(result.session))
        await self._gateway.release(result.session)
        return result

    def _count_overridden(self, session_id: str) -> Counter[str]:
        """Counts the calls of a session by what they ask for and do not get; logs each name once, with the
        first value."""
        counts: Counter[str] = Counter()
        for call in self._store.get(session_id).session.tree.calls:
            for name, value in call.sampling.get("overridden", {}).items():
                counts[name] += 1
                if name not in self._logged:
                    self._logged.add(name)
                    log.warning(
                        "%s: the agent asks for %r, which the run overrides: training samples from the whole "
                        "distribution; such calls are counted as overridden/%s",
                        name,
                        value,
                        name,
                    )
        return counts


def _error(result: SessionResult) -> Exception:
    cause = result.end.cause
    assert cause is not None, "a finished session has no error"
    return result.exception or RunnerError(cause, result.end.error)
