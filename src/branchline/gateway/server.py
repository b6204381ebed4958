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
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from branchline.chat.base import Codec, History
from branchline.engines.base import Engine
from branchline.gateway.app import GatewayApp, GatewayConfig
from branchline.gateway.live import LiveSession, SessionOptions, Sessions
from branchline.gateway.views import samples_view
from branchline.tree.journal import Durability, Journal


@dataclass(frozen=True)
class GatewaySession:
    """A session of a gateway, as the program that opened it holds it."""

    live: LiveSession
    base_url: str
    api_key: str
    control_key: str

    @property
    def id(self) -> str:
        return self.live.id

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def reward(self, score: float, **extras: Any) -> None:
        """Posts a reward; extras travel with it."""
        await _safe(self.live.post_reward({"score": score, **extras}))

    async def finalize(self) -> dict[str, Any]:
        """Ends the session and gives its samples and report."""
        await _safe(self.live.end("finalized"))
        return samples_view(self.live)

    async def abort(self, reason: str = "") -> None:
        await _safe(self.live.end("aborted", reason))


async def _safe(durable: Any) -> None:
    if durable is not None:
        await asyncio.wrap_future(durable)


class Gateway:
    """A running gateway."""

    def __init__(
        self,
        *,
        engine: Engine,
        codec: Codec,
        journal: str | Path | None = None,
        durability: Durability = "process",
        history: History = "template",
        host: str = "127.0.0.1",
        port: int = 0,
        config: GatewayConfig | None = None,
    ) -> None:
        config = config or GatewayConfig()
        if config.auth and not config.admin_key:
            config = replace(config, admin_key="ak-bl-" + secrets.token_urlsafe(24))
        self._journal = Journal(journal, durability=durability) if journal is not None else None
        self.sessions = Sessions(codec, history=history, journal=self._journal)
        self.app = GatewayApp(engine, self.sessions, config)
        self.admin_key = config.admin_key
        self._host, self._port = host, port
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.app.base_url

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
        self.app.base_url = f"http://{self._host}:{port}"
        settings = uvicorn.Config(self.app.asgi, log_level="warning", lifespan="off", access_log=False)
        self._server = uvicorn.Server(settings)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Takes no new requests, lets the running ones end, closes engine and journal."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await self.app.engine.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    async def session(self, **options: Any) -> GatewaySession:
        """Opens a session; options are those of `POST /sessions`."""
        live, api_key, control_key = await asyncio.to_thread(self.sessions.open, SessionOptions(**options))
        return GatewaySession(live, f"{self.url}/sessions/{live.id}/v1", api_key, control_key)
