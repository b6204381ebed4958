"""Runs the episodes of a training step: sessions of a gateway, driven by the user's agent, in groups.

An agent is an async function of a session and a task. It may use any client that can set a base URL and a
key, and returns the reward. An episode whose agent raises is failed: it is logged, trains nothing and does
not count in its group.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.hf.engine import HfEngine
from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import Trajectory, TrajectoryGroup
from branchline.gateway.server import Gateway, GatewaySession
from branchline.timelines.causes import classify_forks

log = logging.getLogger("branchline.train")

T = TypeVar("T")
Rollout = Callable[[GatewaySession, T], Awaitable[float | None]]
"""Runs one episode; returns its reward, or None if it has posted rewards to the session."""


class SeededEngine(HfEngine):
    """An embedded engine whose samples follow from a run's seed, the session's id and the prompt.

    A run that is repeated or resumed samples the same tokens, in whatever order its requests arrive. A prompt
    that a session sends again is sampled with another seed.
    """

    def __init__(self, model: Any, *args: Any, run_seed: int = 0, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._run_seed = run_seed
        self._prompt_counts: dict[str, Counter[bytes]] = {}

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        if params.seed is None:
            digest = hashlib.blake2b(f"{self._run_seed} {session} ".encode() + prompt_ids.tobytes()).digest()
            counts = self._prompt_counts.setdefault(session, Counter())
            params = replace(params, seed=int.from_bytes(digest[:8], "little") + counts[digest])
            counts[digest] += 1
        stream = super().generate(prompt_ids, params, session=session, images=images)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    def release_session(self, session: str) -> None:
        self._prompt_counts.pop(session, None)
        super().release_session(session)


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


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs groups of episodes in a gateway."""

    gateway: Gateway
    rollout: Rollout[Any]
    export_policy: ExportPolicy | None = None
    sampling: dict[str, Any] | None = None
    """Overrides the sampling parameters of the agent's requests."""
    timeout_s: float | None = None
    """Time limit of an episode."""

    async def run_group(self, task: Any, group_id: str, size: int) -> EpisodeGroup:
        """Runs `size` episodes of a task at the same time."""
        results = await asyncio.gather(
            *(self._run_episode(task, group_id, f"{group_id}-{index}") for index in range(size))
        )
        causes: Counter[str] = Counter()
        lengths: list[int] = []
        truncated = calls = 0
        for _, managed, _ in results:
            tree = managed.session.tree
            calls += len(tree.calls)
            causes.update(fork.cause.value for fork in classify_forks(tree).forks if tree.calls)
            for node in tree.nodes:
                if node.output is not None and node.sampled_ids is not None:
                    lengths.append(len(node.sampled_ids))
                    truncated += node.output.finish_reason == "length"
            self.gateway.app.router.release_session(managed.id)
            self.gateway.sessions.evict(managed)
        return EpisodeGroup(
            TrajectoryGroup([trajectory for trajectory, _, _ in results], group_id),
            causes,
            calls,
            lengths,
            truncated,
            [error for _, _, error in results if error is not None],
        )

    async def _run_episode(
        self, task: Any, group_id: str, session_id: str
    ) -> tuple[Trajectory, Any, Exception | None]:
        session = await self.gateway.session(
            id=session_id, agent="main", group=group_id, sampling=self.sampling or {}
        )
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                reward = await self.rollout(session, task)
            if reward is not None:
                await session.reward(reward)
            if session.managed.reward is None:
                raise ValueError("the agent returned no reward and posted none")
            await session.sessions.end_session(session.managed, "finalized")
        except Exception as error:
            failure = error
            log.warning("episode %s failed: %s: %s", session_id, type(error).__name__, error)
            await session.abort(f"{type(error).__name__}: {error}")
        trajectory = await asyncio.to_thread(session.managed.trajectory, self.export_policy)
        return trajectory, session.managed, failure
