"""The gateway as an ASGI application: the model API for agents, the control API for everybody else."""

from __future__ import annotations

from branchline.engines.base import Engine
from branchline.engines.openai import UpstreamChat
from branchline.gateway.access import Access
from branchline.gateway.config import GatewayConfig
from branchline.gateway.control import ControlApi
from branchline.gateway.exchange import Exchange, Receive, Scope, Send
from branchline.gateway.fleet import Fleet
from branchline.gateway.forks import ForkWatch
from branchline.gateway.metrics import Metrics
from branchline.gateway.model import ModelApi, Place
from branchline.gateway.record import Observer, SessionObserver
from branchline.gateway.sessions import Sessions


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = Place.find(scope["path"]) if scope["type"] == "http" else None
        if place is None:
            await self.control.asgi(scope, receive, send)
        else:
            await self.model.answer(place, Exchange(scope, receive, send))
