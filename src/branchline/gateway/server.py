"""A gateway in a program: an engine, a codec, a journal, served over HTTP while the block runs.

async with Gateway(engine=engine, codec=codec) as gateway:
    session = await gateway.session(agent="main")
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    ...
    await session.reward(1.0)
    trajectory = await session.finalize()
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from branchline.chat.base import Codec, History
from branchline.core.errors import BranchlineError, InputError
from branchline.engines.base import Engine
from branchline.engines.openai import UpstreamChat
from branchline.gateway.app import GatewayApp
from branchline.gateway.config import GatewayConfig
from branchline.gateway.fleet import Fleet
from branchline.gateway.live import LiveSession, SessionOptions
from branchline.gateway.record import Observer, SessionObserver
from branchline.gateway.sessions import Sessions
from branchline.gateway.views import samples_view
from branchline.tree.journal import Durability, Journal

log = logging.getLogger("branchline.gateway")


@dataclass(frozen=True)
class GatewaySession:
    """A session of a gateway, as the program that opened it holds it."""

    app: GatewayApp = field(repr=False)
    live: LiveSession = field(repr=False)
    base_url: str
    api_key: str = field(repr=False)
    control_key: str = field(repr=False)

    @property
    def id(self) -> str:
        return self.live.id

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def reward(self, score: float, **extras: Any) -> None:
        """Posts a reward; extras travel with it."""
        durable = self.live.post_reward({"score": score, **extras})
        if durable is not None:
            await asyncio.wrap_future(durable)

    async def finalize(self) -> dict[str, Any]:
        """Ends the session and gives its samples and report."""
        await self.app.control.end(self.live, "finalized")
        return await asyncio.to_thread(samples_view, self.live)

    async def abort(self, reason: str = "") -> None:
        await self.app.control.end(self.live, "aborted", reason)


class Gateway:
    """A running gateway."""

    def __init__(
        self,
        *,
        engine: Engine | UpstreamChat | Fleet,
        codec: Codec | None = None,
        journal: str | Path | None = None,
        durability: Durability = "process",
        history: History = "template",
        host: str = "127.0.0.1",
        port: int = 0,
        config: GatewayConfig | None = None,
        observers: Sequence[Observer] = (),
        on_end: Sequence[SessionObserver] = (),
    ) -> None:
        """`codec` may be left out where the engine has one; `observers` see calls, `on_end` sessions."""
        config = config or GatewayConfig()
        if config.auth and not config.admin_key:
            config = replace(config, admin_key="ak-bl-" + secrets.token_urlsafe(24))
        self._journal = Journal(journal, durability=durability) if journal is not None else None
        self.sessions = Sessions(codec or _codec_of(engine), history=history, journal=self._journal)
        self.app = GatewayApp(engine, self.sessions, config, tuple(observers), tuple(on_end))
        self.admin_key = config.admin_key
        self._host, self._port = host, port
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._expiring: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.app.control.base_url

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; the port is known, and answered on, when this returns."""
        listener = socket.create_server((self._host, self._port), backlog=2048)
        # Accepted connections inherit it; without it every answer waits some 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        self.app.control.base_url = f"http://{self._host}:{port}"
        settings = uvicorn.Config(
            self.app, log_level="warning", log_config=None, lifespan="off", access_log=False
        )
        self._server = uvicorn.Server(settings)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0)
        if self._serving.done():
            self._serving.result()
        if self.app.config.idle_s:
            self._expiring = asyncio.create_task(self._expire(self.app.config.idle_s))

    async def _expire(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(60.0, idle_s / 4))
            try:
                await self.app.control.expire()
            except BranchlineError as error:  # a journal that failed: calls are told, and this goes on
                log.warning("sessions could not be expired: %s", error)

    async def stop(self) -> None:
        """Takes no new requests, lets the running ones end, closes engine and journal."""
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._journal is None:
            for live in self.sessions:
                if not live.is_closed:
                    self.app.control.tell_ended(live)
        await self.app.fleet.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    async def session(self, **options: Any) -> GatewaySession:
        """Opens a session; options are those of `POST /sessions`."""
        live, api_key, control_key = await asyncio.to_thread(self.sessions.open, SessionOptions(**options))
        return GatewaySession(self.app, live, f"{self.url}/sessions/{live.id}/v1", api_key, control_key)


def _codec_of(engine: object) -> Codec:
    codec: Codec | None = getattr(engine, "codec", None)
    if codec is None:
        raise InputError("codec: got None, expected one, because this engine knows no text")
    return codec
