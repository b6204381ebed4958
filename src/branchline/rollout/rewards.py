"""Rewards of sessions: from a function, an async function or a verifier command, several at the same time.

A reward is a score, an object with a score, or a list of such objects (`core/reward.py`). An object names the
part of the session that it is for by `call`, `turn`, `timeline`, `tool` or `agent`; one without them is for
all of it, and the last such one counts. Its other keys are kept as `extras`. Anything else fails the session.

    def reward(task, trajectory):                  # or async def
        return trajectory.answer == task["answer"]
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.core.reward import Reward, RewardData, decode_json, read_rewards
from branchline.export.trajectory import Trajectory
from branchline.loop.registry import is_async_callable
from branchline.loop.timeouts import run_in_thread, with_timeout
from branchline.rollout.processes import CommandResult, run_command
from branchline.rollout.session_result import SessionResult
from branchline.rollout.task_variables import task_variables

RewardFunction = Callable[[Any, Trajectory], RewardData | Awaitable[RewardData]]
_GRACE_S = 1.0
_SHOWN_CHARS = 100
"""How much of a line is shown in an error."""


@dataclass(frozen=True)
class VerifierCommand:
    """A shell command that scores a trajectory.

    It gets `BRANCHLINE_TASK`, `BRANCHLINE_TASK_FILE` and, on stdin, the session's line of
    `trajectories.jsonl`. It ends with exit
    status 0, and the last non-empty line of its stdout is the reward as JSON: a number, true or false, an
    object with a score, or a list of such objects. Anything else is an error. stderr is shown in errors and
    never read as a reward.
    """

    command: str
    exit_code: bool = False
    """The exit status is the reward: 0 is 1 and 1 is 0, as of a test runner; another one is an error. stdout
    is not read."""

    async def score(self, result: SessionResult) -> list[Reward]:
        stdin = msgspec.json.encode(result.line)
        with task_variables(self.command, result.session, result.job.task) as variables:
            environment = {**os.environ, **variables}
            ended = await run_command(self.command, environment, stdin=stdin, separate_stderr=True)
        if self.exit_code and ended.exit_code in (0, 1):
            return [{"score": 1.0 - ended.exit_code}]
        if ended.exit_code != 0:
            expected = "0 for a right answer or 1 for a wrong one" if self.exit_code else "0"
            raise _verifier_error(f"got {_describe_status(ended.exit_code)}, expected {expected}", ended)
        return _read_last_line(ended)


def _read_last_line(ended: CommandResult) -> list[Reward]:
    """Returns the reward that a verifier printed. Raises InputError for anything else."""
    output = ended.output.rstrip(b" \t\r\n")
    start = output.rfind(b"\n") + 1
    line = output[start:].strip(b" \t\r")
    if ended.is_cut and not start:
        size = len(ended.output)
        raise _verifier_error(f"the last line of its stdout is not in its last {size} bytes", ended)
    if not line:
        raise _verifier_error("got nothing on stdout, expected the reward as its last line", ended)
    try:
        return read_rewards(decode_json(line))
    except (ValueError, InputError) as error:
        shown = line[:_SHOWN_CHARS].decode(errors="backslashreplace") + "…" * (len(line) > _SHOWN_CHARS)
        raise _verifier_error(
            f"the last line of its stdout: got {shown!r}, expected a number, true, false, an object with a "
            f"score, or a list of such objects, as JSON ({error})",
            ended,
        ) from error


def _describe_status(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"


def _verifier_error(problem: str, ended: CommandResult) -> InputError:
    stderr = ended.stderr_tail
    return InputError(
        f"verifier command: {problem}" + (f"; its stderr ends with {stderr!r}" if stderr else "")
    )


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

    async def score(self, result: SessionResult) -> list[Reward]:
        """Returns the rewards of a session that is about to end; raises what the function raises, and
        InputError for a value that is no reward."""
        async with self._workers:
            return await with_timeout(self._call(result), self._timeout_s, _GRACE_S)

    async def _call(self, result: SessionResult) -> list[Reward]:
        reward = self._reward
        if isinstance(reward, VerifierCommand):
            return await reward.score(result)
        task, trajectory = result.job.task.row, result.trajectory
        if is_async_callable(reward):
            value = reward(task, trajectory)
        else:
            value = await run_in_thread(reward, task, trajectory)
        if inspect.isawaitable(value):
            value = await value
        if value is None:
            raise InputError("reward function: returned None, expected a reward (is a `return` missing?)")
        return read_rewards(value)


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
