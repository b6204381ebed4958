"""The gateway as an ASGI application: the model API for agents, the control API for everybody else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from branchline.core.errors import SessionError
from branchline.engines.base import Engine
from branchline.engines.openai import UpstreamChat
from branchline.gateway.access import Access, require_local
from branchline.gateway.config import GatewayConfig
from branchline.gateway.control import ControlApi
from branchline.gateway.exchange import Exchange, Receive, Scope, Send
from branchline.gateway.fleet import Fleet
from branchline.gateway.forks import ForkWatch
from branchline.gateway.metrics import Metrics
from branchline.gateway.model import ModelApi, Place
from branchline.gateway.protocols.chat import error
from branchline.gateway.record import Observer, SessionObserver
from branchline.gateway.sessions import Sessions
from branchline.gateway.wire import code_of, error_of

_CUT_S = 5.0
"""How long what was cut may take to note what it has; a client that reads nothing must not hold up an end."""


class GatewayApp:
    """Routes of one gateway."""

    def __init__(
        self,
        fleet: Fleet | Engine | UpstreamChat,
        sessions: Sessions,
        config: GatewayConfig | None = None,
        observers: tuple[Observer, ...] = (),
        on_end: tuple[SessionObserver, ...] = (),
    ) -> None:
        self.config = config or GatewayConfig()
        self.fleet = fleet if isinstance(fleet, Fleet) else Fleet(fleet)
        self.sessions = sessions
        self.metrics = Metrics()
        access = Access(sessions, self.config.admin_key, self.config.auth)
        watch = (ForkWatch(sessions).note,) if self.config.explain_forks else ()
        self.model = ModelApi(self.fleet, access, self.config, (self.metrics.note_call, *observers, *watch))
        self.metrics.in_flight.set_function(lambda: self.model.in_flight)
        self.control = ControlApi(self.fleet, sessions, access, self.metrics, self.config, on_end)
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.control.asgi(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        exchange = Exchange(scope, receive, send)
        self._running.add(task)
        try:
            if not self.config.auth:
                require_local(exchange.headers, self.config.public_url)
            place = Place.find(scope["path"])
            if place is None:
                await self.control.asgi(scope, receive, send)
            else:
                await self.model.answer(place, exchange)
        except SessionError as refused:
            status, message, field, headers = error_of(refused)
            await exchange.respond(error(status, message, field, code_of(refused)), status, headers)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            with suppress(RuntimeError):  # its answer had begun already, and is broken off
                await exchange.respond(error(503, "the gateway is stopping"), 503, {"retry-after": "1"})
        finally:
            self._running.discard(task)

    async def cut(self) -> None:
        """Ends every request that is under way; calls are kept as far as they came."""
        self._is_cut = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CUT_S)
