"""Runs one session: opens it, runs the agent, scores it, ends it and reads its result.

Nothing here raises because of an agent, a reward function or a bad reward: each becomes the end of the
session, with its cause. What is raised is a cancellation, or a failure of the gateway itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from branchline.core.errors import BranchlineError, NodeLostError, SessionError
from branchline.core.reward import PART_KEYS, RewardData, read_rewards
from branchline.export.rewards import session_extras, session_reward
from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import Trajectory
from branchline.loop.timeouts import finish_despite_cancel, with_timeout
from branchline.rollout.rewards import RewardScorer
from branchline.rollout.runners import Runner
from branchline.rollout.session_gateway import EndedSession, SessionFigures, SessionGateway
from branchline.rollout.session_result import EndCause, RunnerError, SessionEnd, SessionJob, SessionResult
from branchline.runtime.managed_session import SessionState

_SMALL_PARTS = ("call", "turn", "tool")
"""Parts whose rewards are kept beside that of the session, of a timeline or of an agent."""
_GRACE_S = 5.0
"""How long a cancelled agent may take to end before it is abandoned."""


_NO_CALLS = (
    "the agent made no model call that was recorded; it may not read its base URL (OPENAI_BASE_URL or "
    "ANTHROPIC_BASE_URL, session.base_url or session.anthropic_base_url), or all its calls failed"
)
_NONE_ANSWERED = "of {calls} model calls none was answered: they were cancelled, or their answers were lost"


class SessionRunner:
    """Runs sessions, one call of each method per session and step."""

    def __init__(
        self,
        gateway: SessionGateway,
        scorer: RewardScorer | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        export_policy: ExportPolicy | None = None,
        timeout_s: float | None = None,
        max_staleness: int | None = None,
        require_reward: bool = False,
    ) -> None:
        self._gateway = gateway
        self._scorer = scorer
        self._options = options or {}
        self._export_policy = export_policy
        self._timeout_s = timeout_s
        self._max_staleness = max_staleness
        self._require_reward = require_reward
        self._started: dict[str, float] = {}
        self._exceptions: dict[str, Exception] = {}
        self._scored: dict[str, tuple[Trajectory, SessionFigures]] = {}

    async def run(self, job: SessionJob, runner: Runner) -> SessionResult:
        """Runs a session from its start to its result."""
        end = await self.run_agent(job, runner)
        if end.cause is None:
            end = await self.score(job)
        return await self.finish(job, end)

    async def run_agent(self, job: SessionJob, runner: Runner) -> SessionEnd:
        """Opens the session and runs the agent until it is done; posts the reward that it returns."""
        task = job.task.copy()
        # A session that is being opened in a thread would stay open after a cancellation.
        try:
            session = await finish_despite_cancel(self._gateway.open(job, self._options))
        except NodeLostError as error:
            return SessionEnd(EndCause.NODE_LOST, str(error))
        self._started[job.session_id] = time.perf_counter()

        async def run() -> RewardData | None:
            try:
                return await runner.run(task, session)
            except TimeoutError as error:  # the agent's own
                own = SessionEnd.from_error(error)
                raise RunnerError(own.cause or EndCause.RUNNER_ERROR, own.error, own.trace) from error

        try:
            reward = await with_timeout(run(), self._timeout_s, _GRACE_S)
        except TimeoutError as error:
            self._exceptions[job.session_id] = error
            return SessionEnd(EndCause.TIMEOUT, str(error))
        except Exception as error:
            self._exceptions[job.session_id] = error
            return SessionEnd.from_error(error)
        if reward is not None:
            end = await self.post_reward(job, reward)
            if end.cause is not None:
                return end
        return await self.complete(job)

    async def complete(self, job: SessionJob) -> SessionEnd:
        """Marks the agent as done, if it is not; a session without an answered call has failed."""
        try:
            ended = await self._gateway.end(job.session_id, "completed")
        except NodeLostError as error:
            return SessionEnd(EndCause.NODE_LOST, str(error))
        return _check_calls(SessionEnd.from_state(ended.state, ended.reason), ended)

    async def is_unscored(self, job: SessionJob, *, is_judged: bool) -> bool:
        """Whether a session that its agent finalized has no reward yet, in a run that scores sessions."""
        if self._scorer is None and not is_judged:
            return False
        ended = await self._gateway.end(job.session_id, "finalized")
        return ended.state == "finalized" and session_reward(ended.rewards) is None

    async def score(self, job: SessionJob) -> SessionEnd:
        """Computes and posts the reward of a session whose agent is done."""
        if self._scorer is None and self._max_staleness is None and not self._require_reward:
            return SessionEnd()
        session_id = job.session_id
        trajectory, figures, end = await self.read(job)
        if end.cause is not None:
            return end
        if self._scorer is not None:
            self._scored[session_id] = trajectory, figures
            # The function may change what it gets; what is written stays as it was recorded.
            copied = await asyncio.to_thread(deepcopy, trajectory)
            own = SessionResult(replace(job, task=job.task.copy()), SessionEnd(), copied)
            try:
                reward = await self._scorer.score(own)
            except Exception as error:
                self._exceptions[session_id] = error
                return replace(SessionEnd.from_error(error), cause=EndCause.REWARD_ERROR)
            end = await self.post_reward(job, reward)
            if end.cause is not None:
                return end
            posted = [*figures.rewards, *reward]
        else:
            posted = [*figures.rewards]
        if not self._require_reward or any(reward.keys().isdisjoint(_SMALL_PARTS) for reward in posted):
            return SessionEnd()
        if posted:
            return SessionEnd(EndCause.NO_REWARD, "got rewards for turns, calls or tools only")
        return SessionEnd(EndCause.NO_REWARD, "the agent returned no reward and posted none")

    async def read(self, job: SessionJob) -> tuple[Trajectory, SessionFigures, SessionEnd]:
        """Returns the session as it is now; its end is that of a session that is gone, or whose tokens are
        too many versions old, else that of a finished one."""
        try:
            trajectory, figures = await self._gateway.read(job.session_id, self._export_policy)
        except NodeLostError as error:
            return *_lost_session(job), SessionEnd(EndCause.NODE_LOST, str(error))
        if self._max_staleness is None:
            return trajectory, figures, SessionEnd()
        trained = [sample.response_versions[sample.response_mask != 0] for sample in trajectory.samples]
        now = figures.version
        staleness = now - min((int(versions.min()) for versions in trained if len(versions)), default=now)
        if staleness <= self._max_staleness:
            return trajectory, figures, SessionEnd()
        age = f"{staleness} versions old, expected at most {self._max_staleness}"
        return trajectory, figures, SessionEnd(EndCause.STALE, age)

    async def finish(self, job: SessionJob, end: SessionEnd) -> SessionResult:
        """Ends the session and returns its result. Raises SessionError if it was never opened.

        A session that was closed at the gateway, by its agent for example, ends as the gateway says.
        """
        session_id = job.session_id
        state: SessionState = "finalized" if end.cause is None else "aborted"
        try:
            ended = await self._gateway.end(session_id, state, end.gateway_reason)
            end = replace(
                _check_calls(SessionEnd.from_state(ended.state, ended.reason), ended), trace=end.trace
            )
            trajectory, figures = await self._read_ended(session_id, ended)
        except NodeLostError as error:
            end = SessionEnd(EndCause.NODE_LOST, str(error))
            trajectory, figures = _lost_session(job)
            self._scored.pop(session_id, None)
        started = self._started.pop(session_id, None)
        return SessionResult(
            replace(job, task=job.task.copy()),
            end,
            replace(trajectory, failed=end.cause is not None),
            list(figures.rewards),
            figures.calls,
            figures.answer_lengths,
            figures.truncated_answers,
            0.0 if started is None else time.perf_counter() - started,
            figures.version,
            self._exceptions.pop(session_id, None),
        )

    async def _read_ended(self, session_id: str, ended: EndedSession) -> tuple[Trajectory, SessionFigures]:
        """Returns the trajectory of an ended session. What was read to score it is used again, if since then
        it got nothing but a reward for the whole session."""
        scored = self._scored.pop(session_id, None)
        if scored is not None and ended.state == "finalized":
            trajectory, figures = scored
            is_whole = not any(part in reward for reward in ended.rewards for part in PART_KEYS)
            reward = session_reward(ended.rewards)
            if is_whole and reward is not None and ended.calls == figures.calls:
                scored_trajectory = trajectory.with_reward(reward, session_extras(ended.rewards))
                return scored_trajectory, replace(figures, rewards=ended.rewards)
        return await self._gateway.read(session_id, self._export_policy)

    async def post_reward(self, job: SessionJob, reward: RewardData) -> SessionEnd:
        """Posts a reward; returns the end of a session that does not take it, else a finished one."""
        try:
            rewards = read_rewards(reward)
        except Exception as error:  # also what an object of the agent raises when it is read
            self._exceptions[job.session_id] = error
            return replace(SessionEnd.from_error(error), cause=EndCause.REWARD_ERROR)
        try:
            try:
                await self._gateway.post_rewards(job.session_id, rewards)
            except SessionError:
                ended = await self._gateway.end(job.session_id, "aborted")
                return SessionEnd.from_state(ended.state, ended.reason)
        except NodeLostError as error:
            return SessionEnd(EndCause.NODE_LOST, str(error))
        except BranchlineError as error:
            self._exceptions[job.session_id] = error
            return SessionEnd(EndCause.REWARD_ERROR, str(error))
        return SessionEnd()


def _check_calls(end: SessionEnd, ended: EndedSession) -> SessionEnd:
    """Returns the end of a session; one that would be finished has failed if no call of it was answered."""
    if end.cause is not None or ended.answered_calls:
        return end
    problem = _NONE_ANSWERED.format(calls=ended.calls) if ended.calls else _NO_CALLS
    return SessionEnd(EndCause.NO_CALLS, problem)


def _lost_session(job: SessionJob) -> tuple[Trajectory, SessionFigures]:
    """What is left of a session whose gateway is gone."""
    return Trajectory((), session=job.session_id, failed=True), SessionFigures()
