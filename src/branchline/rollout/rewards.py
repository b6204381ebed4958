"""Rewards of sessions: from a function, an async function or a verifier command, several at the same time.

A reward is a number, an object with a `score` whose other fields are kept, or a list of such objects. `call`,
`turn`, `timeline` and `tool` name the part of the session that a reward is for; one without them is for all
of it, and the last such one counts. What tokens get is decided by the trainer's credit policy: `broadcast`,
its default, gives that score to all of them.

    def reward(task, trajectory):                  # or async def
        return float(trajectory.answer == task["answer"])
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.export.trajectory import Trajectory
from branchline.loop.registry import is_async_callable
from branchline.loop.timeouts import run_in_thread, with_timeout
from branchline.rollout.processes import run_command
from branchline.rollout.session_result import SessionResult

RewardData = float | Mapping[str, Any] | Sequence[Mapping[str, Any]]
RewardFunction = Callable[[Any, Trajectory], RewardData | Awaitable[RewardData]]
_GRACE_S = 1.0


@dataclass(frozen=True)
class VerifierCommand:
    """A shell command that scores a trajectory.

    It gets `BRANCHLINE_TASK` and, on stdin, the session's line of `trajectories.jsonl`. If the last line of
    its stdout is a JSON number or an object with a score, that is the reward. Otherwise exit code 0 is 1 and
    exit code 1 is 0, so that a test runner is a verifier. Any other exit code is an error.
    """

    command: str

    async def score(self, result: SessionResult) -> RewardData:
        environment = {
            **os.environ,
            "BRANCHLINE_TASK": msgspec.json.encode(result.job.task.row).decode(),
            "BRANCHLINE_SESSION": result.session,
        }
        ended = await run_command(self.command, environment, stdin=msgspec.json.encode(result.line))
        reward = _parse_last_line(ended.output)
        if reward is not None and ended.exit_code == 0:
            return reward
        if ended.exit_code not in (0, 1):
            raise InputError(
                f"verifier command: got exit code {ended.exit_code}, expected 0, or 1 for a wrong answer; "
                f"its output ends with {ended.tail!r}"
            )
        return 1.0 - ended.exit_code


class RewardScorer:
    """Scores sessions, at most `workers` at the same time, each within a time limit."""

    def __init__(
        self,
        reward: RewardFunction | VerifierCommand,
        *,
        workers: int = 8,
        timeout_s: float | None = 600.0,
    ) -> None:
        if not isinstance(reward, VerifierCommand):
            check_reward_function(reward)
        self._reward = reward
        self._timeout_s = timeout_s
        self._workers = asyncio.Semaphore(workers)

    async def score(self, result: SessionResult) -> RewardData:
        """Returns the reward of a session that is about to end; raises what the function raises."""
        async with self._workers:
            return await with_timeout(self._call(result), self._timeout_s, _GRACE_S)

    async def _call(self, result: SessionResult) -> RewardData:
        reward = self._reward
        if isinstance(reward, VerifierCommand):
            return await reward.score(result)
        task, trajectory = result.job.task.row, result.trajectory
        if is_async_callable(reward):
            value = reward(task, trajectory)
        else:
            value = await run_in_thread(reward, task, trajectory)
        return await value if inspect.isawaitable(value) else value


def check_reward_function(function: object) -> None:
    """Raises InputError for what cannot be called with a task and a trajectory."""
    if not callable(function):
        raise InputError(f"reward: got {function!r}, expected a function of (task, trajectory)")
    try:
        inspect.signature(function).bind("task", "trajectory")
    except TypeError as error:
        raise InputError(f"reward: expected a function of (task, trajectory), but {error}") from error
    except ValueError:  # a builtin without a signature
        pass


def _parse_last_line(output: str) -> RewardData | None:
    lines = output.strip().splitlines()
    try:
        value = msgspec.json.decode(lines[-1]) if lines else None
    except msgspec.DecodeError:
        return None
    if isinstance(value, dict) and ("score" in value or "reward" in value):
        return value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
