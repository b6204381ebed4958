"""The HTTP server: uvicorn with limits on what a connection may send and how long it may keep silent.

A connection that exceeds a limit is answered with an error and closed, so that a client without a key cannot
stall others or use up the connections. Each limit is a field of `GatewayConfig`; a line is logged when one
applies. The server serves until it is told to stop, whatever a connection does.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn

from branchline.core.errors import AddressError
from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import open_file_limit
from branchline.gateway.server_connection import ServerConnection

log = logging.getLogger("branchline.gateway")

_TICK_S = 1.0
"""How often the date header is set and overdue connections are closed."""
_LIMIT_LOG_S = 10.0
_MAX_DESCRIBED = 5
_RESERVED_FILES = 64
"""Open files that are not connections: the journal, logs, the event loop."""
_SHUTDOWN_POLL_S = 0.005
_RECEIVE_BYTES = 256 * 1024
_LOOP_PASSES = 2
"""After this many passes of the event loop it has polled the sockets and handled what it found: asyncio runs
a task before the I/O of the same pass."""


class UvicornServer(uvicorn.Server):
    """Serves an app until `stop`; leaves signals to the program; enforces the limits on connections.

    `main_loop`, `shutdown` and `capture_signals` are overridden, because uvicorn handles signals itself and
    needs up to 0.2 s to stop: it polls ten times a second. The methods and attributes used, here and in
    `ServerConnection`, are the same from uvicorn 0.30 on.
    """

    def __init__(self, app: Any, limits: GatewayConfig | None = None) -> None:
        self.limits = limits or GatewayConfig()
        self.max_connections = _connection_limit(self.limits.max_connections)
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        options: dict[str, Any] = {"log_level": "warning", "log_config": None, "access_log": False}
        options["timeout_keep_alive"] = self.limits.connection_idle_s
        protocol = partial(ServerConnection, self)
        super().__init__(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", **options))  # type: ignore[arg-type]
        self._stop_requested = asyncio.Event()
        self._logged_at: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def stop(self) -> None:
        """Closes the listening sockets; `serve` returns when the requests in progress are answered."""
        self.should_exit = True
        self._stop_requested.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the date header
            await self._close_overdue()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), _TICK_S)

    async def _close_overdue(self) -> None:
        """Closes the connections whose clients are late, after all that has arrived was read: the event loop
        may have been busy while it arrived."""
        late = [connection for connection in self._connections if self._is_overdue(connection)]
        if late:
            for _ in range(_LOOP_PASSES):
                await asyncio.sleep(0)
            self._for_each(late, ServerConnection.close_overdue)

    def _is_overdue(self, connection: ServerConnection) -> bool:
        try:
            return connection.find_overdue() is not None
        except Exception as error:
            connection.fail(error)
            return False

    def _for_each(
        self, connections: Iterable[ServerConnection], act: Callable[[ServerConnection], None]
    ) -> None:
        """Does the same with each connection; what one raises closes that one."""
        for connection in connections:
            try:
                act(connection)
            except Exception as error:
                connection.fail(error)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        except BaseException:  # no connection is served by half: their clients notice
            for server in getattr(self, "servers", ()):
                server.close()
            for listener in sockets or ():
                listener.close()
            self._for_each(self._connections, lambda connection: connection.transport.abort())
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        is_busy = True
        while is_busy and not self.force_exit:
            # In every round: a connection may have been accepted just before the listener was closed.
            self._for_each(self._connections, ServerConnection.shutdown)
            await asyncio.sleep(_SHUTDOWN_POLL_S)
            is_busy = bool(self.server_state.connections or self.server_state.tasks)

    def describe_unfinished(self) -> list[str]:
        """What a stop waits for: each request in progress, and each connection with an unread answer."""
        lines = [line for connection in self._connections for line in connection.describe_unfinished()]
        if not lines:
            return [f"{len(self.server_state.tasks)} requests whose clients are gone"]
        more = len(lines) - _MAX_DESCRIBED
        return lines if more <= 0 else [*lines[:_MAX_DESCRIBED], f"and {more} others"]

    @property
    def _connections(self) -> list[ServerConnection]:
        connections: list[Any] = list(self.server_state.connections)
        return connections

    def close_idle(self) -> None:
        """Closes the connections without a request that have been idle longest. Several at once, so that a
        flood of connections does not sort them each time."""
        idle = sorted([one for one in self._connections if one.is_idle], key=lambda one: one.active_at)
        oldest = idle[: 1 + len(idle) // 16]
        self.server_state.connections.difference_update(oldest)
        self._for_each(oldest, lambda connection: connection.transport.abort())

    def log_limit(self, limit: str, problem: str, client: tuple[str, int] | None) -> None:
        """Logs that a connection was closed by a limit, at most once in ten seconds for each limit."""
        self._log_closed(logging.WARNING, limit, problem, client)

    def log_fault(self, error: Exception, client: tuple[str, int] | None) -> None:
        """Logs that a connection was closed by an error, at most once in ten seconds for each type."""
        self._log_closed(logging.ERROR, type(error).__name__, str(error), client, error)

    def _log_closed(
        self,
        level: int,
        reason: str,
        problem: str,
        client: tuple[str, int] | None,
        error: Exception | None = None,
    ) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(reason, -_LIMIT_LOG_S) < _LIMIT_LOG_S:
            self._unlogged[reason] += 1
            return
        self._logged_at[reason] = now
        more, address = self._unlogged.pop(reason, 0), client[0] if client else "unknown"
        log.log(
            level,
            "%s: %s; a connection from %s was closed, %d others since the last such line",
            reason,
            problem,
            address,
            more,
            exc_info=error,
            extra={"limit": reason, "client": address, "others": more},
        )


def _connection_limit(max_connections: int) -> int:
    """The limit, lowered to what the process may open: a call needs a connection on each side."""
    files = open_file_limit()
    if files is None or files >= 2 * max_connections + _RESERVED_FILES:
        return max_connections
    limit = max(1, (files - _RESERVED_FILES) // 2)
    log.warning(
        "max_connections: lowered from %d to %d, because the process may open %d files (ulimit -n)",
        max_connections,
        limit,
        files,
    )
    return limit


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on one address; `::` listens on all addresses, IPv4 included."""
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _address_error(host, port, error) from error
    # Accepted connections inherit it; without it every response waits about 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _address_error(host: str, port: int, error: Exception) -> AddressError:
    """What is wrong with an address that nothing can listen on."""
    # That of a gaierror is no number of the system.
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    if isinstance(error, OverflowError):
        problem = f"port: got {port}, expected 0 to 65535"
    elif number == errno.EADDRINUSE:
        problem = f"port: got {port}, which is in use on {host}, expected a free one, or 0 for any"
    elif number == errno.EACCES:
        problem = f"port: got {port}, which this user may not use, expected one from 1024 on"
    else:
        reason = (isinstance(error, OSError) and error.strerror) or error
        problem = (
            f"host: got {host!r}, expected an address of this machine, without a port, such as 127.0.0.1, "
            f"or 0.0.0.0 for all ({reason})"
        )
    return AddressError(problem, number)
