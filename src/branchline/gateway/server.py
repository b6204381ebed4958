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
from branchline.core.errors import BranchlineError, GatewayError, InputError, raise_errors
from branchline.core.reward import make_reward
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
        await self.managed.post_rewards([reward])

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
        codec = codec or _engine_codec(engine)
        self._journal = Journal(journal, durability=durability) if journal is not None else None
        try:
            self.sessions = SessionStore(codec, history=history, journal=self._journal)
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise
        self.app = GatewayApp(engine, self.sessions, config, tuple(observers), tuple(on_session_end))
        self.admin_key = config.admin_key
        self._host, self._port = host, port
        self._server: UvicornServer | None = None
        self._server_task: asyncio.Task[None] | None = None
        self._expiry_task: asyncio.Task[None] | None = None
        self._skip_drain_event = asyncio.Event()
        self._stop_task: asyncio.Task[None] | None = None
        self._server_ended = asyncio.Event()

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
        await self._stop_after(error)

    async def start(self) -> None:
        """Starts to listen; when this returns, the port is known and requests are answered."""
        try:
            if self._journal is not None:
                await self.app.router.restore(self._journal, self.sessions.max_version)
            await self._listen()
        except BaseException as error:
            await self._stop_after(error)
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
        self._server_task.add_done_callback(self._handle_server_end)
        if self._server_task.done():
            self._server_task.result()

    def _handle_server_end(self, server_task: asyncio.Task[None]) -> None:
        """Makes it known if the server has ended by itself: nothing is answered any more."""
        self._server_ended.set()
        if self._stop_task is None:
            error = "it was cancelled" if server_task.cancelled() else server_task.exception()
            log.critical("the server has ended, and every connection was closed: %s", error)
            self.sessions.stopping.set()

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set, or the server has ended by an error, which `stop()` then raises."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._server_ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _expire_idle_sessions(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(60.0, idle_s / 4))
            try:
                await self.sessions.expire_idle(idle_s)
            except BranchlineError as error:  # the journal failed; calls are refused with that error
                log.warning("sessions could not be expired: %s", error)
            except Exception:
                log.exception("sessions could not be expired")

    async def stop(self) -> None:
        """Refuses new requests, waits for those in progress, closes engine and journal.

        Requests still running after `drain_s`, or after `skip_drain`, are cancelled; their calls are recorded
        as cancelled, with what was sampled.

        Everything is closed, whatever fails before, also if this is cancelled: a cancellation skips the wait
        for calls. What failed is raised then, several errors as one group.
        """
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._close_all())
        elif self._stop_task.done():
            return  # it has raised already
        cancelled: asyncio.CancelledError | None = None
        while not self._stop_task.done():
            try:
                await asyncio.wait({self._stop_task})
            except asyncio.CancelledError as error:
                if cancelled is not None:
                    self._stop_task.cancel()  # ends the current step; the next ones follow
                cancelled = error
                self.skip_drain()
        if cancelled is not None:
            _log_stop_error(None if self._stop_task.cancelled() else self._stop_task.exception())
            raise cancelled
        self._stop_task.result()

    async def _stop_after(self, error: BaseException | None) -> None:
        """Stops after an error, which is the one that is raised; what fails here is logged then."""
        try:
            await self.stop()
        except BaseException as stop_error:
            if error is None:
                raise
            if stop_error is not error:
                _log_stop_error(stop_error)

    async def _close_all(self) -> None:
        self.sessions.stopping.set()
        errors: list[BaseException] = []
        for close in (
            self._close_expiry,
            self._drain,
            self._close_sessions,
            self.app.router.close,
            self._close_journal,
        ):
            try:
                await close()
            except BaseException as error:  # also a cancellation: what remains is closed before it is raised
                errors.append(error)
        raise_errors("the gateway did not stop cleanly", errors)

    async def _close_expiry(self) -> None:
        if self._expiry_task is not None:
            self._expiry_task.cancel()
            await asyncio.wait({self._expiry_task})

    async def _drain(self) -> None:
        server, server_task = self._server, self._server_task
        if server is None or server_task is None:
            return
        server.stop()
        skip_drain = asyncio.ensure_future(self._skip_drain_event.wait())
        try:
            drain_s = self.app.config.drain_s
            await asyncio.wait(
                {server_task, skip_drain}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            skip_drain.cancel()
            try:
                if not server_task.done():
                    log.warning("not waiting any longer for: %s", "; ".join(server.describe_unfinished()))
                    await self.app.cancel_all()
            finally:
                server.force_exit = True
        if server_task.cancelled():
            raise GatewayError("the server was cancelled while it served")
        await server_task

    async def _close_sessions(self) -> None:
        self.sessions.close()

    async def _close_journal(self) -> None:
        if self._journal is not None:
            try:
                await asyncio.to_thread(self._journal.close)
            finally:  # at once, if the thread was not waited for
                self._journal.close()

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


def _log_stop_error(error: BaseException | None) -> None:
    if error is not None:
        log.error("the gateway did not stop cleanly: %s", error, exc_info=error)


def _http_url(host: str, port: int) -> str:
    # A wildcard is not an address that a client can use; loopback is.
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _engine_codec(engine: object) -> Codec:
    codec: Codec | None = getattr(engine, "codec", None)
    if codec is None:
        raise InputError("codec: got None, expected a codec, because this engine has none of its own")
    return codec
