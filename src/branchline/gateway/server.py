"""A gateway in a program: an engine, a codec, a journal, served over HTTP by uvicorn while the block runs.

async with Gateway(engine=engine, codec=codec) as gateway:
    session = await gateway.session(agent="main")
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    ...
    await session.reward(1.0)
    export = await session.finalize()       # export.samples, export.report
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.errors import BranchlineError, InputError
from branchline.engines.base import Engine
from branchline.engines.upstream_chat import UpstreamChat
from branchline.export.samples import Export, ExportPolicy
from branchline.gateway.access import require_loopback
from branchline.gateway.app import GatewayApp
from branchline.gateway.config import GatewayConfig
from branchline.gateway.uvicorn_server import UvicornServer, bind_socket
from branchline.runtime.call_record import CallObserver
from branchline.runtime.managed_session import (
    ManagedSession,
    SessionObserver,
    SessionState,
    read_session_options,
)
from branchline.runtime.router import Router
from branchline.runtime.session_store import SessionStore
from branchline.tree.journal import Durability, Journal

log = logging.getLogger("branchline.gateway")


@dataclass(frozen=True)
class GatewaySession:
    """A session of a gateway, for the program that opened it."""

    sessions: SessionStore = field(repr=False)
    managed: ManagedSession = field(repr=False)
    base_url: str
    api_key: str = field(repr=False)
    control_key: str = field(repr=False)

    @property
    def id(self) -> str:
        return self.managed.id

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def reward(self, score: float, **extras: Any) -> None:
        """Posts a reward; `extras` are stored with it. `call`, `turn`, `timeline` and `tool` name the part of
        the session that it is for."""
        await self.managed.post_reward({"score": score, **extras})

    async def export(self, policy: ExportPolicy | None = None, *, include_aborted: bool = False) -> Export:
        """Samples and report of the session as it is now; it may continue."""
        return await asyncio.to_thread(self.managed.export, policy, include_aborted=include_aborted)

    async def wait(self, timeout_s: float | None = None) -> SessionState:
        """Waits until the session is no longer open, at most `timeout_s`; returns its state."""
        await self.sessions.wait_until_ended(self.managed, timeout_s)
        return self.managed.state

    async def complete(self, reason: str = "") -> None:
        """Marks the agent as done; later rewards and calls are still accepted."""
        await self.sessions.end_session(self.managed, "completed", reason)

    async def finalize(self, policy: ExportPolicy | None = None) -> Export:
        """Ends the session and returns its samples and report."""
        await self.sessions.end_session(self.managed, "finalized")
        return await self.export(policy)

    async def abort(self, reason: str = "") -> None:
        """Ends the session as aborted; its samples are exported only with `include_aborted`."""
        await self.sessions.end_session(self.managed, "aborted", reason)


class Gateway:
    """A gateway in this process; it serves between `start` and `stop`, or in an `async with` block."""

    def __init__(
        self,
        *,
        engine: Engine | UpstreamChat | Router,
        codec: Codec | None = None,
        journal: str | Path | None = None,
        durability: Durability = "process",
        history: HistoryPolicy = "template",
        host: str = "127.0.0.1",
        port: int = 0,
        config: GatewayConfig | None = None,
        observers: Sequence[CallObserver] = (),
        on_session_end: Sequence[SessionObserver] = (),
    ) -> None:
        """`codec` defaults to the engine's own. Observers are called once per call, or per ended session."""
        config = config or GatewayConfig()
        if not config.auth:
            require_loopback(host)
        if config.auth and not config.admin_key:
            config = replace(config, admin_key="ak-bl-" + secrets.token_urlsafe(24))
        self._journal = Journal(journal, durability=durability) if journal is not None else None
        self.sessions = SessionStore(codec or _engine_codec(engine), history=history, journal=self._journal)
        self.app = GatewayApp(engine, self.sessions, config, tuple(observers), tuple(on_session_end))
        self.admin_key = config.admin_key
        self._host, self._port = host, port
        self._server: UvicornServer | None = None
        self._server_task: asyncio.Task[None] | None = None
        self._expiry_task: asyncio.Task[None] | None = None
        self._skip_drain_event = asyncio.Event()
        self._is_stopped = False

    @property
    def url(self) -> str:
        """The public URL if one is configured, else an address that works on this machine."""
        return self.app.config.public_url.rstrip("/") or _http_url(self._host, self._port)

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts to listen; when this returns, the port is known and requests are answered."""
        try:
            if self._journal is not None:
                await self.app.router.restore(self._journal, self.sessions.max_version)
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        if self.app.config.idle_s:
            self._expiry_task = asyncio.create_task(self._expire_idle_sessions(self.app.config.idle_s))

    async def _listen(self) -> None:
        listener = bind_socket(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._server = UvicornServer(self.app, self.app.config)
        self._server_task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._server_task.done():
            await asyncio.sleep(0)
        if self._server_task.done():
            self._server_task.result()

    async def _expire_idle_sessions(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(60.0, idle_s / 4))
            try:
                await self.sessions.expire_idle(idle_s)
            except BranchlineError as error:  # the journal failed; calls are refused with that error
                log.warning("sessions could not be expired: %s", error)

    async def stop(self) -> None:
        """Refuses new requests, waits for those in progress, closes engine and journal.

        Requests still running after `drain_s`, or after `skip_drain`, are cancelled; their calls are recorded
        as cancelled, with what was sampled.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._expiry_task is not None:
            self._expiry_task.cancel()
            await asyncio.gather(self._expiry_task, return_exceptions=True)
        self.sessions.stopping.set()
        if self._server is not None and self._server_task is not None:
            await self._drain(self._server, self._server_task)
        self.sessions.close()
        await self.app.router.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    async def _drain(self, server: UvicornServer, server_task: asyncio.Task[None]) -> None:
        server.stop()
        skip_drain = asyncio.ensure_future(self._skip_drain_event.wait())
        await asyncio.wait(
            {server_task, skip_drain}, timeout=self.app.config.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        skip_drain.cancel()
        if not server_task.done():
            log.warning("cancelling %d calls that are still running", self.app.model_api.in_flight)
            await self.app.cancel_all()
            server.force_exit = True
        await server_task

    def skip_drain(self) -> None:
        """Lets `stop`, also one in progress, cancel requests at once instead of waiting for them."""
        self._skip_drain_event.set()

    async def session(self, **options: Any) -> GatewaySession:
        """Opens a session; options are those of `POST /sessions`."""
        managed, api_key, control_key = await asyncio.to_thread(
            self.sessions.open, read_session_options(options)
        )
        base_url = f"{self.url}/sessions/{managed.id}/v1"
        return GatewaySession(self.sessions, managed, base_url, api_key, control_key)


def _http_url(host: str, port: int) -> str:
    # A wildcard is not an address that a client can use; loopback is.
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _engine_codec(engine: object) -> Codec:
    codec: Codec | None = getattr(engine, "codec", None)
    if codec is None:
        raise InputError("codec: got None, expected a codec, because this engine has none of its own")
    return codec
