"""Gateways of other processes, by their URLs: a new session goes to the one with the fewest sessions.

A session stays at the gateway that opened it, because that one has its tree and its journal: its URL is its
address. A gateway that is restarted under the same URL, from its journal, continues its sessions; requests
wait for it. One that does not come back is lost, and its sessions with it: they end as `node_lost` and are
run again at another gateway.

    async with GatewayPool(["http://10.0.0.1:8100", "http://10.0.0.2:8100"], admin_key) as pool:
        stats = await Rollout(pool, run, reward=reward).run(tasks)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from branchline.client.async_client import RETRY_TIMEOUT_S, AsyncClient, AsyncClientSession
from branchline.core.errors import GatewayError, InputError, NodeLostError, SessionError
from branchline.core.reward import Reward
from branchline.export.samples import ExportPolicy
from branchline.export.trajectory import Trajectory
from branchline.rollout.session_gateway import EndedSession, SessionFigures, session_options
from branchline.rollout.session_result import SessionJob
from branchline.runtime.managed_session import SessionState
from branchline.runtime.session_snapshot import SessionSnapshot

log = logging.getLogger("branchline.rollout")

_VERSION_S = 1.0
"""How long a policy version that a gateway reported is used."""


@dataclass
class _PooledGateway:
    """One gateway, and what the pool knows about it."""

    client: AsyncClient
    sessions: set[str] = field(default_factory=set)
    """The ids of sessions that were opened and not yet released."""
    version: int = 0
    version_read_at: float = -_VERSION_S
    lost: str = ""
    """Why it is lost; empty: it is not."""


class GatewayPool:
    """Sessions at several gateways that have one admin key. It belongs to one event loop."""

    def __init__(
        self, urls: Sequence[str], admin_key: str = "", *, retry_timeout_s: float = RETRY_TIMEOUT_S
    ) -> None:
        """A gateway that does not answer for `retry_timeout_s` is lost."""
        if not urls or len(set(urls)) < len(urls):
            raise InputError(f"urls: got {list(urls)}, expected at least one gateway, and each once")
        self._gateways = {
            url: _PooledGateway(AsyncClient(url, admin_key, retry_timeout_s=retry_timeout_s)) for url in urls
        }
        self._url_of: dict[str, str] = {}
        """Where each session is."""

    @property
    def urls(self) -> list[str]:
        """The gateways that are not lost."""
        return [url for url, gateway in self._gateways.items() if not gateway.lost]

    @property
    def session_counts(self) -> dict[str, int]:
        """The sessions at each gateway that were opened and not yet released."""
        return {url: len(gateway.sessions) for url, gateway in self._gateways.items()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; the gateways continue."""
        await asyncio.gather(*(gateway.client.close() for gateway in self._gateways.values()))

    async def mark_lost(self, url: str, reason: str) -> None:
        """Gives a gateway up: it gets no new sessions, and requests to it fail at once."""
        gateway = self._gateways[url]
        if not gateway.lost:
            gateway.lost = reason or "unknown"
            log.error("gateway %s is lost, with %d sessions: %s", url, len(gateway.sessions), reason)
            await gateway.client.close()

    # -- sessions ------------------------------------------------------------------------------------

    async def open(self, job: SessionJob, options: Mapping[str, Any]) -> AsyncClientSession:
        """Opens the session of a job at the gateway with the fewest sessions.

        Raises NodeLostError if that gateway is lost meanwhile, GatewayError if all are lost.
        """
        if not self.urls:
            reasons = "; ".join(f"{url}: {gateway.lost}" for url, gateway in self._gateways.items())
            raise GatewayError(f"gateways: got none that answers, expected at least one: {reasons}")
        url = min(self.urls, key=lambda one: len(self._gateways[one].sessions))
        # At once, so that sessions opened meanwhile count it.
        self._gateways[url].sessions.add(job.session_id)
        self._url_of[job.session_id] = url
        try:
            async with self._requests_to(url) as client:
                return await client.open_session(**session_options(job, options))
        except NodeLostError:
            raise
        except BaseException:
            self._forget(job.session_id)
            raise

    async def find_state(self, session_id: str) -> tuple[SessionState, str] | None:
        for url in self.urls:
            try:
                async with self._requests_to(url) as client:
                    view = await client.session(session_id).view()
            except NodeLostError:
                continue
            except SessionError as error:
                if error.kind != "unknown":
                    raise
                continue
            self._url_of[session_id] = url
            self._gateways[url].sessions.add(session_id)
            return view.state, view.reason
        return None

    async def post_rewards(self, session_id: str, rewards: Sequence[Reward]) -> None:
        async with self._requests_for(session_id) as session:
            await session.post_rewards(rewards)

    async def end(self, session_id: str, state: SessionState, reason: str = "") -> EndedSession:
        async with self._requests_for(session_id) as session:
            try:
                view = await session.end(state, reason)
            except SessionError as error:
                if error.kind != "closed":
                    raise
                view = await session.view()
            rewards = tuple(view.rewards)
            return EndedSession(view.state, view.reason, view.calls, view.answered_calls, rewards)

    async def read(
        self, session_id: str, policy: ExportPolicy | None = None
    ) -> tuple[Trajectory, SessionFigures]:
        async with self._requests_for(session_id) as session:
            version = await self._version(self._gateways[self._url_of[session_id]])
            snapshot = await session.snapshot()
        return await asyncio.to_thread(_read_snapshot, snapshot, policy, version)

    async def release(self, session_id: str) -> None:
        url = self._forget(session_id)
        if url and not self._gateways[url].lost:
            try:
                async with self._requests_to(url) as client:
                    await client.session(session_id).delete()
            except NodeLostError as error:
                log.warning("session %s: not released: %s", session_id, error)

    # -- policy --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pauses generation at all gateways, for a weight update."""
        await asyncio.gather(*(self._gateways[url].client.pause() for url in self.urls))

    async def resume(self, version: int | None = None) -> None:
        """Resumes generation at all gateways; `version` is that of the new weights."""
        await asyncio.gather(*(self._gateways[url].client.resume(version) for url in self.urls))
        for gateway in self._gateways.values():
            gateway.version_read_at = -_VERSION_S

    async def _version(self, gateway: _PooledGateway) -> int:
        now = asyncio.get_running_loop().time()
        if now - gateway.version_read_at >= _VERSION_S:
            gateway.version_read_at = now
            gateway.version = (await gateway.client.policy()).version
        return gateway.version

    # -- gateways ------------------------------------------------------------------------------------

    def _forget(self, session_id: str) -> str:
        """Returns where a session was; empty if it was nowhere."""
        url = self._url_of.pop(session_id, "")
        if url:
            self._gateways[url].sessions.discard(session_id)
        return url

    @asynccontextmanager
    async def _requests_for(self, session_id: str) -> AsyncIterator[AsyncClientSession]:
        """Gives a session that was opened. Raises NodeLostError if it is gone, with its gateway or alone."""
        url = self._url_of.get(session_id)
        if url is None:
            raise SessionError("unknown", f"no session {session_id!r} at {', '.join(self._gateways)}")
        try:
            async with self._requests_to(url) as client:
                yield client.session(session_id)
        except SessionError as error:
            if error.kind == "unknown":
                raise NodeLostError(f"gateway {url}: was started again without the session") from error
            raise

    @asynccontextmanager
    async def _requests_to(self, url: str) -> AsyncIterator[AsyncClient]:
        """Gives the client of a gateway. Raises NodeLostError if the gateway is lost or does not answer."""
        gateway = self._gateways[url]
        if gateway.lost:
            raise NodeLostError(f"gateway {url}: {gateway.lost}")
        try:
            yield gateway.client
        except GatewayError as error:
            if error.status:
                raise
            await self.mark_lost(url, str(error))
            raise NodeLostError(f"gateway {url}: {gateway.lost}") from error


def _read_snapshot(
    snapshot: SessionSnapshot, policy: ExportPolicy | None, version: int
) -> tuple[Trajectory, SessionFigures]:
    return snapshot.trajectory(policy), SessionFigures.from_snapshot(snapshot, version)
