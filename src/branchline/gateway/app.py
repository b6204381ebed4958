"""The gateway as an ASGI application: the model API for agents, the control API for all other requests.

It runs under any ASGI server; `server.Gateway` runs it under uvicorn.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from branchline.core.errors import SessionError
from branchline.engines.base import Engine
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.access import AccessControl, require_local_origin
from branchline.gateway.asgi import AsgiRequest, Receive, Scope, Send, to_error_info
from branchline.gateway.config import GatewayConfig
from branchline.gateway.control_api import ControlApi
from branchline.gateway.episode_check import EpisodeCheck
from branchline.gateway.logs import ForkLogger
from branchline.gateway.metrics import GatewayMetrics
from branchline.gateway.model_api import ModelApi, ModelRoute
from branchline.gateway.protocols.base import ErrorInfo
from branchline.gateway.protocols.chat import error_body
from branchline.runtime.call_record import CallObserver
from branchline.runtime.managed_session import SessionObserver
from branchline.runtime.router import Router
from branchline.runtime.session_store import SessionStore

_CANCEL_TIMEOUT_S = 5.0
"""How long cancelled requests may take to end; a client that does not read must not block a stop."""


class GatewayApp:
    """Routes requests to the two APIs and keeps track of those in progress."""

    def __init__(
        self,
        engine: Router | Engine | UpstreamChat,
        sessions: SessionStore,
        config: GatewayConfig | None = None,
        observers: tuple[CallObserver, ...] = (),
        on_session_end: tuple[SessionObserver, ...] = (),
    ) -> None:
        self.config = config or GatewayConfig()
        self.router = engine if isinstance(engine, Router) else Router(engine)
        self.sessions = sessions
        self.metrics = GatewayMetrics()
        access = AccessControl(sessions, self.config.admin_key, self.config.auth)
        fork_logger = (ForkLogger(sessions).record_call,) if self.config.explain_forks else ()
        self.episode_check = EpisodeCheck(sessions)
        own_observers = (self.metrics.record_call, self.episode_check.record_call, *fork_logger)
        self.model_api = ModelApi(self.router, access, self.config, (*own_observers, *observers))
        self.metrics.in_flight.set_function(lambda: self.model_api.in_flight)
        self.control_api = ControlApi(self.router, sessions, access, self.metrics, self.config)
        sessions.on_session_end += [lambda managed: self.router.release_session(managed.id), *on_session_end]
        sessions.on_session_end_in_thread.append(self.metrics.record_session_end)
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._is_cancelling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.control_api.asgi(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        http = AsgiRequest(scope, receive, send)
        self._request_tasks.add(task)
        try:
            if not self.config.auth:
                require_local_origin(http.headers, self.config.public_url)
            route = ModelRoute.parse(scope["path"])
            if route is None:
                await self.control_api.asgi(scope, receive, send)
            else:
                await self.model_api.handle(route, http)
        except SessionError as error:
            info = to_error_info(error)
            await http.send_json(error_body(info), info.status, info.headers)
        except asyncio.CancelledError:
            if not self._is_cancelling:
                raise
            with suppress(RuntimeError):  # the response had started; the connection is closed instead
                await http.send_json(
                    error_body(ErrorInfo(503, "the gateway is stopping")), 503, {"retry-after": "1"}
                )
        finally:
            self._request_tasks.discard(task)

    async def cancel_all(self) -> None:
        """Cancels every request in progress; their calls are recorded as cancelled, with what was sampled."""
        self._is_cancelling = True
        running = list(self._request_tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)
