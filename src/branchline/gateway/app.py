"""The gateway as an ASGI application: the model API for agents, the control API for everybody else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from branchline.core.errors import SessionError
from branchline.engines.base import Engine
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.access import AccessControl, require_local_origin
from branchline.gateway.asgi_request import AsgiRequest, Receive, Scope, Send
from branchline.gateway.config import GatewayConfig
from branchline.gateway.control_api import ControlApi
from branchline.gateway.fork_logger import ForkLogger
from branchline.gateway.http_errors import error_code, http_error
from branchline.gateway.metrics import GatewayMetrics
from branchline.gateway.model_api import ModelApi, ModelRoute
from branchline.gateway.protocols.chat import error_body
from branchline.runtime.call_record import CallObserver
from branchline.runtime.managed_session import SessionObserver
from branchline.runtime.router import Router
from branchline.runtime.session_store import SessionStore

_CANCEL_TIMEOUT_S = 5.0
"""How long what was cut may take to note what it has; a client that reads nothing must not hold up an end."""


class GatewayApp:
    """Routes of one gateway."""

    def __init__(
        self,
        fleet: Router | Engine | UpstreamChat,
        sessions: SessionStore,
        config: GatewayConfig | None = None,
        observers: tuple[CallObserver, ...] = (),
        on_session_end: tuple[SessionObserver, ...] = (),
    ) -> None:
        self.config = config or GatewayConfig()
        self.router = fleet if isinstance(fleet, Router) else Router(fleet)
        self.sessions = sessions
        self.metrics = GatewayMetrics()
        access = AccessControl(sessions, self.config.admin_key, self.config.auth)
        watch = (ForkLogger(sessions).record_call,) if self.config.explain_forks else ()
        self.model_api = ModelApi(
            self.router, access, self.config, (self.metrics.record_call, *observers, *watch)
        )
        self.metrics.in_flight.set_function(lambda: self.model_api.in_flight)
        self.control_api = ControlApi(self.router, sessions, access, self.metrics, self.config)
        router = self.router
        sessions.on_session_end += [lambda managed: router.release_session(managed.id), *on_session_end]
        sessions.on_session_end_in_thread.append(self.metrics.record_session_end)
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._is_cancelling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.control_api.asgi(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        exchange = AsgiRequest(scope, receive, send)
        self._request_tasks.add(task)
        try:
            if not self.config.auth:
                require_local_origin(exchange.headers, self.config.public_url)
            place = ModelRoute.parse(scope["path"])
            if place is None:
                await self.control_api.asgi(scope, receive, send)
            else:
                await self.model_api.handle(place, exchange)
        except SessionError as refused:
            status, message, field, headers = http_error(refused)
            await exchange.send_json(error_body(status, message, field, error_code(refused)), status, headers)
        except asyncio.CancelledError:
            if not self._is_cancelling:
                raise
            with suppress(RuntimeError):  # its answer had begun already, and is broken off
                await exchange.send_json(
                    error_body(503, "the gateway is stopping"), 503, {"retry-after": "1"}
                )
        finally:
            self._request_tasks.discard(task)

    async def cancel_all(self) -> None:
        """Ends every request that is under way; calls are kept as far as they came."""
        self._is_cancelling = True
        running = list(self._request_tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)
