"""The sessions of a rollout at a gateway: opened, rewarded, ended and read, by their ids.

A rollout uses a gateway through these few operations, and an agent through `AgentSession`: a URL and keys. So
agents and gateways may be in other processes: `GatewayPool` has the same operations for gateways at URLs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from branchline.core.errors import SessionError
from branchline.core.reward import Reward
from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import Trajectory
from branchline.gateway.server import Gateway
from branchline.rollout.session_result import SessionJob
from branchline.runtime.managed_session import ManagedSession, SessionState
from branchline.runtime.session_snapshot import SessionSnapshot

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
        """Opens the model API of this session; may complete it, and reward it with `agent_reward`."""
        ...

    @property
    def control_key(self) -> str:
        """Rewards, reads and ends the session."""
        ...

    async def reward(
        self,
        score: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        timeline: int | None = None,
        tool: str | None = None,
        agent: str | None = None,
        id: str | int | None = None,
        **extras: Any,
    ) -> None:
        """Posts a reward for the session, or for the part of it that is named; `extras` are kept with it."""
        ...

    async def complete(self, reason: str = "") -> None:
        """Marks the agent as done."""
        ...

    async def wait(self, timeout_s: float | None = None) -> SessionState:
        """Waits until the session is no longer open; returns its state."""
        ...


@dataclass(frozen=True)
class SessionFigures:
    """What a result has besides the trajectory: counts of the session's tree, and its rewards."""

    calls: int = 0
    answer_lengths: tuple[int, ...] = ()
    truncated_answers: int = 0
    rewards: tuple[Mapping[str, Any], ...] = ()
    version: int = 0
    """The policy version when the session was read."""

    @classmethod
    def from_snapshot(cls, snapshot: SessionSnapshot, version: int) -> SessionFigures:
        nodes = snapshot.tree.nodes
        outputs = [node for node in nodes if node.output is not None and node.sampled_ids is not None]
        lengths = tuple([len(node.sampled_ids) for node in outputs if node.sampled_ids is not None])
        truncated = sum(node.output is not None and node.output.finish_reason == "length" for node in outputs)
        return cls(len(snapshot.tree.calls), lengths, truncated, tuple(snapshot.rewards), version)


@dataclass(frozen=True)
class EndedSession:
    """A session after its end."""

    state: SessionState
    reason: str
    calls: int
    answered_calls: int
    """Calls whose answers reached the agent, as far as it is known."""
    rewards: tuple[Mapping[str, Any], ...]


class SessionGateway(Protocol):
    """Where the sessions of a rollout are. NodeLostError says that a session is gone with its gateway."""

    async def open(self, job: SessionJob, options: Mapping[str, Any]) -> AgentSession: ...

    async def find_state(self, session_id: str) -> tuple[SessionState, str] | None:
        """Returns state and reason of a session, also of an earlier process; None if there is none."""
        ...

    async def post_rewards(self, session_id: str, rewards: Sequence[Reward]) -> None:
        """Adds rewards. Raises MessageError for one whose part the session does not have."""
        ...

    async def end(self, session_id: str, state: SessionState, reason: str = "") -> EndedSession:
        """Ends a session unless it is closed already; returns what it is then."""
        ...

    async def read(
        self, session_id: str, policy: ExportPolicy | None = None
    ) -> tuple[Trajectory, SessionFigures]:
        """Returns the trajectory of a session as it is now, and its figures."""
        ...

    async def release(self, session_id: str) -> None:
        """Frees the memory of a closed session; a journal keeps it."""
        ...


def session_options(job: SessionJob, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the session of a job, as `POST /sessions` takes them."""
    task = job.task
    names = {"uid": task.uid, "run": task.run, "slot": job.slot, "attempt": job.attempt}
    metadata = {**names, "agent_name": task.agent_name}
    own = deepcopy(dict(options))
    return {"agent": "main", "group": task.group, "metadata": metadata, **own, "id": job.session_id}


class LocalGateway:
    """The gateway of this process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def open(self, job: SessionJob, options: Mapping[str, Any]) -> AgentSession:
        return await self._gateway.session(**session_options(job, options))

    async def find_state(self, session_id: str) -> tuple[SessionState, str] | None:
        try:
            managed = await asyncio.to_thread(self._gateway.sessions.get, session_id)
        except SessionError:
            return None
        return managed.state, managed.reason

    async def post_rewards(self, session_id: str, rewards: Sequence[Reward]) -> None:
        await self._find(session_id).post_rewards(rewards)

    async def end(self, session_id: str, state: SessionState, reason: str = "") -> EndedSession:
        managed = self._find(session_id)
        if not managed.is_closed:
            await managed.end(state, reason)
        calls, rewards = len(managed.session.tree.calls), tuple(managed.rewards)
        return EndedSession(managed.state, managed.reason, calls, managed.answered_calls, rewards)

    async def read(
        self, session_id: str, policy: ExportPolicy | None = None
    ) -> tuple[Trajectory, SessionFigures]:
        managed = self._find(session_id)
        # A thread costs more than reading a short session, and a long one must not hold up the others.
        if managed.session.tree.token_count <= _MAX_INLINE_TOKENS:
            return self._read(managed, policy)
        return await asyncio.to_thread(self._read, managed, policy)

    def _read(
        self, managed: ManagedSession, policy: ExportPolicy | None
    ) -> tuple[Trajectory, SessionFigures]:
        snapshot, version = managed.snapshot(), self._gateway.app.router.version
        return snapshot.trajectory(policy), SessionFigures.from_snapshot(snapshot, version)

    async def release(self, session_id: str) -> None:
        self._gateway.app.router.release_session(session_id)
        self._gateway.sessions.evict(self._find(session_id))

    def _find(self, session_id: str) -> ManagedSession:
        return self._gateway.sessions.get(session_id)
