"""The control API of a gateway for programs without asyncio.

with Client("http://127.0.0.1:8100", admin_key) as client:
    session = client.open_session(group="doors")
    ...                                         # an agent with session.base_url and session.api_key
    session.reward(1.0)
    export = session.finalize()                 # export.samples, export.report

Every method runs that of `AsyncClient` on an event loop in a thread, so requests, retries and decoding are
written once. It works in any thread, also in one that runs an event loop, as in a notebook.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from branchline.client.async_client import (
    READ_TIMEOUT_S,
    RETRY_TIMEOUT_S,
    AsyncClient,
    AsyncClientSession,
    SessionAddress,
)
from branchline.core.errors import InputError
from branchline.core.reward import make_reward
from branchline.export.samples import Export, ExportPolicy
from branchline.export.trajectory import Trajectory, TrajectoryGroup
from branchline.gateway.control_types import EngineState, HealthState, PolicyView, ReadyState, SessionView
from branchline.runtime.managed_session import SessionState
from branchline.runtime.session_snapshot import SessionSnapshot
from branchline.tree.tree import Tree

T = TypeVar("T")


class EventLoopThread:
    """An event loop in a thread, started by the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()
        self.is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine. If the wait is interrupted (Ctrl-C), cancels the coroutine."""
        try:
            loop = self._start()
        except BaseException:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if os.getpid() != self._process_id:
                raise InputError(
                    f"Client: got process {os.getpid()}, expected {self._process_id}, which made it: "
                    "make a Client in each process"
                )
            if self.is_closed:
                raise InputError("Client: got a request after close, expected none")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="branchline-client", daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Ends the thread; coroutines that run are cancelled."""
        with self._lock:
            self.is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client:
    """The control API of a gateway. A client may be used by several threads, in the process that made it."""

    def __init__(
        self,
        url: str,
        admin_key: str = "",
        *,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """Takes the arguments of `AsyncClient`."""
        self._client = AsyncClient(
            url, admin_key, retry_timeout_s=retry_timeout_s, read_timeout_s=read_timeout_s
        )
        self._thread = EventLoopThread()

    @property
    def url(self) -> str:
        return self._client.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; sessions stay as they are."""
        if not self._thread.is_closed:
            self._thread.run(self._client.close())
            self._thread.close()

    # -- sessions ------------------------------------------------------------------------------------

    def open_session(self, **options: Any) -> ClientSession:
        """Opens a session; `options` are those of `POST /sessions`: `id`, `group`, `sampling`, `limits`, …"""
        return ClientSession(self._thread, self._thread.run(self._client.open_session(**options)))

    def session(self, session_id: str, *, control_key: str = "", api_key: str = "") -> ClientSession:
        """Returns an existing session, without a request. `control_key` replaces the admin key."""
        session = self._client.session(session_id, control_key=control_key, api_key=api_key)
        return ClientSession(self._thread, session)

    def sessions(self, *, state: SessionState | None = None, group: str | None = None) -> list[SessionView]:
        """Returns the sessions in the gateway's memory, oldest first."""
        return self._thread.run(self._client.sessions(state=state, group=group))

    def trajectory_group(self, group: str, policy: ExportPolicy | None = None) -> TrajectoryGroup:
        """Returns the trajectories of a group's sessions that are in the gateway's memory and no longer open,
        oldest first. With a journal a gateway keeps the last 1,000 closed sessions in memory."""
        return self._thread.run(self._client.trajectory_group(group, policy))

    # -- policy and engines --------------------------------------------------------------------------

    def pause(self) -> PolicyView:
        """Pauses generation for a weight update; calls wait, and continue after `resume`."""
        return self._thread.run(self._client.pause())

    def resume(self, version: int | None = None) -> PolicyView:
        """Resumes generation. `version` is that of the new weights; None: the weights are the old ones."""
        return self._thread.run(self._client.resume(version))

    def policy(self) -> PolicyView:
        """Returns the version of the policy, and whether it is paused."""
        return self._thread.run(self._client.policy())

    def engines(self) -> list[EngineState]:
        return self._thread.run(self._client.engines())

    def add_engine(self, url: str, version: int | None = None) -> list[EngineState]:
        """Adds a replica by the address of its server; `version` is that of the weights it has loaded."""
        return self._thread.run(self._client.add_engine(url, version))

    def remove_engine(self, name: str) -> list[EngineState]:
        """Removes a replica; its running calls continue on others, after the ids that they have."""
        return self._thread.run(self._client.remove_engine(name))

    def health(self) -> HealthState:
        """Returns the answer of `/healthz`; needs no key."""
        return self._thread.run(self._client.health())

    def ready(self) -> ReadyState:
        """Returns the answer of `/readyz`: whether the gateway would accept a call now; needs no key."""
        return self._thread.run(self._client.ready())


class ClientSession(SessionAddress):
    """A session of a gateway, for a program in another process."""

    def __init__(self, thread: EventLoopThread, session: AsyncClientSession) -> None:
        super().__init__(session.opened)
        self._thread = thread
        self._session = session

    def view(self) -> SessionView:
        """Returns options, state and counts of the session."""
        return self._thread.run(self._session.view())

    def reward(
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
        self._thread.run(self._session.post_rewards([reward]))

    def post_rewards(self, rewards: Sequence[Mapping[str, Any]]) -> None:
        """Posts several rewards, objects with a score, in one request."""
        self._thread.run(self._session.post_rewards(rewards))

    def complete(self, reason: str = "") -> None:
        """Marks the agent as done; later rewards and calls are still accepted."""
        self._thread.run(self._session.complete(reason))

    def end(self, state: SessionState, reason: str = "") -> SessionView:
        """Sets the state and returns the session. A session that has the state keeps its reason."""
        return self._thread.run(self._session.end(state, reason))

    def abort(self, reason: str = "") -> None:
        """Ends the session as failed; its samples are not exported."""
        self._thread.run(self._session.abort(reason))

    def finalize(self, policy: ExportPolicy | None = None, *, reason: str = "") -> Export:
        """Ends the session and returns its samples and report."""
        return self._thread.run(self._session.finalize(policy, reason=reason))

    def wait(self, timeout_s: float | None = None) -> SessionState:
        """Waits until the session is no longer open, at most `timeout_s`; returns its state."""
        return self._thread.run(self._session.wait(timeout_s))

    def snapshot(self) -> SessionSnapshot:
        """Returns the session as it is now: tree, rewards, state."""
        return self._thread.run(self._session.snapshot())

    def tree(self) -> Tree:
        """Returns a copy of the session's tree as it is now."""
        return self._thread.run(self._session.tree())

    def export(self, policy: ExportPolicy | None = None, *, include_aborted: bool = False) -> Export:
        """Returns samples and report of the session as it is now; it may continue."""
        return self._thread.run(self._session.export(policy, include_aborted=include_aborted))

    def trajectory(self, policy: ExportPolicy | None = None) -> Trajectory:
        """Returns the trajectory of the session as it is now; it has failed if the session was aborted, or no
        call of it was answered."""
        return self._thread.run(self._session.trajectory(policy))

    def delete(self) -> None:
        """Removes a closed session from the gateway's memory; its journal keeps it."""
        self._thread.run(self._session.delete())
