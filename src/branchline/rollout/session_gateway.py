"""The sessions of a rollout at a gateway: opened, rewarded, ended and read, by their ids.

A rollout uses a gateway through these few operations, and an agent through `AgentSession`: a URL and keys. So
the agents may run in other processes, and a gateway in another process needs only this class again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from branchline.core.errors import SessionError
from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import Trajectory
from branchline.gateway.server import Gateway
from branchline.rollout.session_result import SessionJob
from branchline.runtime.managed_session import ManagedSession, SessionState

_MAX_INLINE_TOKENS = 10_000


class AgentSession(Protocol):
    """A session as an agent gets it."""

    @property
    def id(self) -> str: ...

    @property
    def base_url(self) -> str:
        """For OpenAI clients; ends in `/v1`."""
        ...

    @property
    def anthropic_base_url(self) -> str: ...

    @property
    def api_key(self) -> str:
        """Opens the model API of this session and nothing else."""
        ...

    @property
    def control_key(self) -> str:
        """Rewards, reads and ends the session."""
        ...

    async def reward(self, score: float, **extras: Any) -> None:
        """Posts a reward; `call`, `turn`, `timeline` and `tool` name the part that it is for."""
        ...

    async def complete(self, reason: str = "") -> None:
        """Marks the agent as done."""
        ...

    async def wait(self, timeout_s: float | None = None) -> SessionState:
        """Waits until the session is no longer open; returns its state."""
        ...


@dataclass(frozen=True)
class SessionFigures:
    """Counts of a session's tree."""

    calls: int = 0
    answer_lengths: tuple[int, ...] = ()
    truncated_answers: int = 0


class SessionGateway:
    """The gateway of this process."""

    def __init__(self, gateway: Gateway, export_policy: ExportPolicy | None = None) -> None:
        self._gateway = gateway
        self._export_policy = export_policy

    @property
    def version(self) -> int:
        """The policy version that samples now."""
        return self._gateway.app.router.version

    async def open(self, job: SessionJob, options: Mapping[str, Any]) -> AgentSession:
        names = {"uid": job.task.uid, "slot": job.slot, "attempt": job.attempt}
        metadata = {**names, "agent_name": job.task.agent_name}
        return await self._gateway.session(
            **{"agent": "main", "group": job.task.uid, "metadata": metadata, **options}, id=job.session_id
        )

    async def find_state(self, session_id: str) -> tuple[SessionState, str] | None:
        """Returns state and reason of a session, also of an earlier process; None if there is none."""
        try:
            managed = await asyncio.to_thread(self._gateway.sessions.get, session_id)
        except SessionError:
            return None
        return managed.state, managed.reason

    def rewards(self, session_id: str) -> list[dict[str, Any]]:
        return self._find(session_id).rewards[:]

    async def post_reward(self, session_id: str, reward: object) -> None:
        """Adds a number, an object with a score, or a list of them. Raises MessageError for anything else."""
        await self._find(session_id).post_reward(reward)

    async def end(self, session_id: str, state: SessionState, reason: str = "") -> tuple[SessionState, str]:
        """Ends a session unless it is closed already; returns its state and reason."""
        managed = self._find(session_id)
        if not managed.is_closed:
            await managed.end(state, reason)
        return managed.state, managed.reason

    async def read(self, session_id: str) -> tuple[Trajectory, SessionFigures]:
        """Returns the trajectory of a session as it is now, and its counts."""
        managed = self._find(session_id)
        # A thread costs more than reading a short session, and a long one must not hold up the others.
        if managed.session.tree.token_count <= _MAX_INLINE_TOKENS:
            return self._read(managed)
        return await asyncio.to_thread(self._read, managed)

    def count_calls(self, session_id: str) -> int:
        return len(self._find(session_id).session.tree.calls)

    def _read(self, managed: ManagedSession) -> tuple[Trajectory, SessionFigures]:
        trajectory = managed.trajectory(self._export_policy)
        tree = managed.session.snapshot()
        outputs = [node for node in tree.nodes if node.output is not None and node.sampled_ids is not None]
        lengths = tuple([len(node.sampled_ids) for node in outputs if node.sampled_ids is not None])
        truncated = sum(node.output is not None and node.output.finish_reason == "length" for node in outputs)
        return trajectory, SessionFigures(len(tree.calls), lengths, truncated)

    def release(self, session_id: str) -> None:
        """Frees the memory of a closed session; a journal keeps it."""
        self._gateway.app.router.release_session(session_id)
        self._gateway.sessions.evict(self._find(session_id))

    def _find(self, session_id: str) -> ManagedSession:
        return self._gateway.sessions.get(session_id)
