"""The HTTP side of a gateway: uvicorn's protocol, told to stop instead of looking whether it should.

uvicorn's server looks ten times a second whether it shall stop and, stopping, whether everybody has left.
This one wakes once a second, for the date that answers carry, and a stop takes as long as those it waits
for. What it overrides (`main_loop`, `shutdown`, `capture_signals`; of a connection `on_headers_complete`,
`connection_lost`) and uses (`servers`, `server_state`, `on_tick`, `cycle`; of a request `flow`, `transport`,
`disconnected`, `response_complete`, `message_event`, `chunked_encoding`) is the same in every uvicorn since
0.30.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_TICK_S = 1.0


class UvicornServer(uvicorn.Server):
    """Answers on its sockets until it is told to stop; leaves signals to whoever runs it."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_HttpProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                log_config=None,
                access_log=False,
            )
        )
        self._stop_requested = asyncio.Event()
        self._changed = asyncio.Event()
        self._connections = _ConnectionSet(self._changed)
        self._requests = _NotifyingSet(self._changed)
        self.server_state.connections = self._connections
        self.server_state.tasks = self._requests

    def stop(self) -> None:
        """Takes nobody in any more; requests that are under way are answered, however long they take."""
        self.should_exit = True
        self._stop_requested.set()

    def exit_now(self) -> None:
        """Stops waiting for them."""
        self.force_exit = True
        self._changed.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # every tenth tick writes the date
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        self._connections.close()
        while (self._connections or self._requests) and not self.force_exit:
            self._changed.clear()
            await self._changed.wait()


class _NotifyingSet(set[Any]):
    """Who is there; says when somebody leaves."""

    def __init__(self, changed: asyncio.Event) -> None:
        super().__init__()
        self._changed = changed

    def discard(self, one: Any) -> None:
        super().discard(one)
        self._changed.set()


class _ConnectionSet(_NotifyingSet):
    """Once closed, they end with what they are answering; those that were being accepted end at once."""

    _is_closed = False

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self):
            connection.shutdown()

    def add(self, connection: Any) -> None:
        super().add(connection)
        if self._is_closed:  # it is not made yet: it enters itself while it is being made
            asyncio.get_running_loop().call_soon(connection.shutdown)


class _HttpProtocol(HttpToolsProtocol):
    """A client that leaves has left all of its requests.

    uvicorn says so to the last one that came. Where a client sends the next before it has its answer, the one
    that is being answered would never hear of it, and go on talking to nobody.
    """

    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests that may be under way."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = (*[one for one in self._cycles if not one.response_complete], self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles = ()
        super().connection_lost(exc)


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on one address, or on all of both kinds for `::`."""
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    # Accepted connections inherit it; without it every answer waits some 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
