"""The control API of a gateway for asyncio programs. `Client` is the same without async.

async with AsyncClient("http://127.0.0.1:8100", admin_key) as client:
    session = await client.open_session(group="doors")
    ...                                         # an agent with session.base_url and session.api_key
    await session.reward(1.0)
    export = await session.finalize()           # export.samples, export.report

A session is read as a snapshot: its tree, samples and trajectory are those that the gateway would compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote, urlencode

from branchline.client.connection import GatewayConnection
from branchline.core.errors import SessionError
from branchline.core.reward import make_reward, read_rewards
from branchline.export.samples import Export, ExportPolicy
from branchline.export.trajectory import Trajectory, TrajectoryGroup
from branchline.gateway.control_types import (
    EngineList,
    EngineState,
    HealthState,
    OpenedSession,
    PolicyView,
    ReadyState,
    SessionList,
    SessionStateView,
    SessionView,
)
from branchline.runtime.managed_session import SessionState
from branchline.runtime.session_snapshot import SessionSnapshot
from branchline.tree.tree import Tree

RETRY_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 300.0
_WAIT_S = 30.0
"""How long one request waits for the end of a session; proxies cut longer ones."""
_POLL_S = 0.5
_CONCURRENT_READS = 8
_END_ACTIONS = {"completed": "complete", "finalized": "finalize", "aborted": "abort"}


class AsyncClient:
    """The control API of a gateway. A client belongs to one event loop."""

    def __init__(
        self,
        url: str,
        admin_key: str = "",
        *,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """`admin_key` is not needed for sessions whose control key is given to `session`, nor without auth.

        `retry_timeout_s`: for how long a request is repeated if the gateway is not reachable or busy.
        `read_timeout_s`: how long the gateway may be silent while it answers.
        """
        self._connection = GatewayConnection(
            url, admin_key, retry_timeout_s=retry_timeout_s, read_timeout_s=read_timeout_s
        )

    @property
    def url(self) -> str:
        return self._connection.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; sessions stay as they are."""
        await self._connection.close()

    # -- sessions ------------------------------------------------------------------------------------

    async def open_session(self, **options: Any) -> AsyncClientSession:
        """Opens a session; `options` are those of `POST /sessions`: `id`, `group`, `sampling`, `limits`, …"""
        opened = await self._connection.send("POST", "/sessions", OpenedSession, body=options)
        return AsyncClientSession(self._connection, opened, key="")

    def session(self, session_id: str, *, control_key: str = "", api_key: str = "") -> AsyncClientSession:
        """Returns an existing session, without a request. `control_key` replaces the admin key."""
        root = f"{self.url}/sessions/{session_id}"
        opened = OpenedSession(
            id=session_id,
            base_url=f"{root}/v1",
            openai_base_url=f"{root}/v1",
            anthropic_base_url=root,
            api_key=api_key,
            control_key=control_key,
        )
        return AsyncClientSession(self._connection, opened, key=control_key)

    async def sessions(
        self, *, state: SessionState | None = None, group: str | None = None
    ) -> list[SessionView]:
        """Returns the sessions in the gateway's memory, oldest first."""
        filters = {name: value for name, value in (("state", state), ("group", group)) if value is not None}
        path = f"/sessions?{urlencode(filters)}" if filters else "/sessions"
        return (await self._connection.send("GET", path, SessionList)).sessions

    async def trajectory_group(self, group: str, policy: ExportPolicy | None = None) -> TrajectoryGroup:
        """Returns the trajectories of a group's sessions that are in the gateway's memory and no longer open,
        oldest first. With a journal a gateway keeps the last 1,000 closed sessions in memory."""
        limit = asyncio.Semaphore(_CONCURRENT_READS)

        async def read(view: SessionView) -> Trajectory:
            async with limit:
                return await self.session(view.id).trajectory(policy)

        ended = [view for view in await self.sessions(group=group) if view.state != "open"]
        return TrajectoryGroup(await asyncio.gather(*[read(view) for view in ended]), group)

    # -- policy and engines --------------------------------------------------------------------------

    async def pause(self) -> PolicyView:
        """Pauses generation for a weight update; calls wait, and continue after `resume`."""
        return await self._connection.send("POST", "/policy/pause", PolicyView)

    async def resume(self, version: int | None = None) -> PolicyView:
        """Resumes generation. `version` is that of the new weights; None: the weights are the old ones."""
        body = {} if version is None else {"version": version}
        return await self._connection.send("POST", "/policy/resume", PolicyView, body=body)

    async def policy(self) -> PolicyView:
        """Returns the version of the policy, and whether it is paused."""
        return await self._connection.send("GET", "/engines", PolicyView)

    async def engines(self) -> list[EngineState]:
        return (await self._connection.send("GET", "/engines", EngineList)).engines

    async def add_engine(self, url: str, version: int | None = None) -> list[EngineState]:
        """Adds a replica by the address of its server; `version` is that of the weights it has loaded."""
        body = {"url": url} if version is None else {"url": url, "version": version}
        return (await self._connection.send("POST", "/engines", EngineList, body=body)).engines

    async def remove_engine(self, name: str) -> list[EngineState]:
        """Removes a replica; its running calls continue on others, after the ids that they have."""
        return (await self._connection.send("DELETE", "/engines", EngineList, body={"name": name})).engines

    async def health(self) -> HealthState:
        """Returns the answer of `/healthz`; needs no key."""
        return await self._connection.send("GET", "/healthz", HealthState)

    async def ready(self) -> ReadyState:
        """Returns the answer of `/readyz`: whether the gateway would accept a call now; needs no key."""
        return await self._connection.send("GET", "/readyz", ReadyState, accepted=503)


class SessionAddress:
    """Where an agent finds a session, and its keys."""

    def __init__(self, opened: OpenedSession) -> None:
        self.opened = opened

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def id(self) -> str:
        return self.opened.id

    @property
    def base_url(self) -> str:
        """For OpenAI's clients; ends in `/v1`."""
        return self.opened.base_url

    @property
    def anthropic_base_url(self) -> str:
        return self.opened.anthropic_base_url

    @property
    def api_key(self) -> str:
        """Opens the model API of this session and nothing else; empty if it is not known here."""
        return self.opened.api_key

    @property
    def control_key(self) -> str:
        """Reads, rewards and ends the session; empty if the admin key is used."""
        return self.opened.control_key


class AsyncClientSession(SessionAddress):
    """A session of a gateway, for a program in another process."""

    def __init__(self, connection: GatewayConnection, opened: OpenedSession, *, key: str) -> None:
        """`key` opens the session; empty: the admin key does."""
        super().__init__(opened)
        self._connection = connection
        self._key = key
        self._path = f"/sessions/{quote(opened.id, safe='')}"

    async def view(self) -> SessionView:
        """Returns options, state and counts of the session."""
        return await self._connection.send("GET", self._path, SessionView, key=self._key)

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
        """Posts a reward for the session, or for the part of it that is named; `extras` are kept with it. A
        repeated post with the same `id` counts once."""
        reward = make_reward(
            score, call=call, turn=turn, timeline=timeline, tool=tool, agent=agent, id=id, **extras
        )
        await self.post_rewards([reward])

    async def post_rewards(self, rewards: Sequence[Mapping[str, Any]]) -> None:
        """Posts several rewards, objects with a score, in one request."""
        path, body = f"{self._path}/reward", read_rewards(list(rewards))
        await self._connection.send("POST", path, SessionStateView, body=body, key=self._key)

    async def complete(self, reason: str = "") -> None:
        """Marks the agent as done; later rewards and calls are still accepted."""
        await self.end("completed", reason)

    async def abort(self, reason: str = "") -> None:
        """Ends the session as failed; its samples are not exported."""
        await self.end("aborted", reason)

    async def finalize(self, policy: ExportPolicy | None = None, *, reason: str = "") -> Export:
        """Ends the session and returns its samples and report."""
        await self.end("finalized", reason)
        return await self.export(policy)

    async def end(self, state: SessionState, reason: str = "") -> SessionView:
        """Sets the state and returns the session. A session that has the state keeps its reason."""
        body = {"reason": reason, **({"return": "session"} if state == "finalized" else {})}
        path = f"{self._path}/{_END_ACTIONS[state]}"
        return await self._connection.send("POST", path, SessionView, body=body, key=self._key)

    async def wait(self, timeout_s: float | None = None) -> SessionState:
        """Waits until the session is no longer open, at most `timeout_s`; returns its state."""
        now = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else now() + timeout_s
        while True:
            left_s = _WAIT_S if deadline is None else max(0.0, deadline - now())
            started, wait_s = now(), min(_WAIT_S, left_s)
            path = f"{self._path}/wait?timeout_s={wait_s:.3f}"
            view = await self._connection.send(
                "GET",
                path,
                SessionView,
                key=self._key,
                retry_timeout_s=None if deadline is None else left_s,
            )
            if view.state != "open" or (deadline is not None and now() >= deadline):
                return view.state
            if now() - started < wait_s:
                await asyncio.sleep(min(_POLL_S, left_s))  # A gateway that stops answers at once.

    async def snapshot(self) -> SessionSnapshot:
        """Returns the session as it is now: tree, rewards, state."""
        content = await self._connection.send("GET", f"{self._path}/snapshot", bytes, key=self._key)
        return await asyncio.to_thread(SessionSnapshot.decode, content)

    async def tree(self) -> Tree:
        """Returns a copy of the session's tree as it is now."""
        return (await self.snapshot()).tree

    async def export(self, policy: ExportPolicy | None = None, *, include_aborted: bool = False) -> Export:
        """Returns samples and report of the session as it is now; it may continue."""
        snapshot = await self.snapshot()
        return await asyncio.to_thread(snapshot.export, policy, include_aborted=include_aborted)

    async def trajectory(self, policy: ExportPolicy | None = None) -> Trajectory:
        """Returns the trajectory of the session as it is now; it has failed if the session was aborted, or no
        call of it was answered."""
        snapshot = await self.snapshot()
        return await asyncio.to_thread(snapshot.trajectory, policy)

    async def delete(self) -> None:
        """Removes a closed session from the gateway's memory; its journal keeps it. Does nothing if the
        gateway does not have the session: an earlier attempt may have deleted it."""
        try:
            await self._connection.send("DELETE", self._path, bytes, key=self._key)
        except SessionError as error:
            if error.kind != "unknown":
                raise
