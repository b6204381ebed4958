"""The HTTP server: uvicorn with limits on what a connection may send and how long it may keep silent.

A connection that exceeds a limit is answered with an error and closed, so that a client without a key cannot
stall others or use up the connections. Each limit is a field of `GatewayConfig`; a line is logged when one
applies.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import open_file_limit
from branchline.gateway.protocols.base import ErrorInfo
from branchline.gateway.protocols.chat import error_body

log = logging.getLogger("branchline.gateway")

_TICK_S = 1.0
"""How often the date header is set and overdue connections are closed."""
_LIMIT_LOG_S = 10.0
_LINGER_S = 2.0
"""How long a refused connection stays open for its client to read the answer."""
_RESERVED_FILES = 64
"""Open files that are not connections: the journal, logs, the event loop."""
_SHUTDOWN_POLL_S = 0.005


class UvicornServer(uvicorn.Server):
    """Serves an app until `stop`; leaves signals to the program; enforces the limits on connections.

    Three methods are overridden, because uvicorn handles signals itself and needs up to 0.2 s to stop: it
    polls ten times a second. The methods and attributes used, here and in `_HttpProtocol`, are the same from
    uvicorn 0.30 on.
    """

    def __init__(self, app: Any, limits: GatewayConfig | None = None) -> None:
        self.limits = limits or GatewayConfig()
        self.max_connections = _connection_limit(self.limits.max_connections)
        options: dict[str, Any] = {"log_level": "warning", "log_config": None, "access_log": False}
        options["timeout_keep_alive"] = self.limits.connection_idle_s
        protocol = partial(_HttpProtocol, self)
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
            for connection in self._connections:
                connection.close_if_overdue()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        is_busy = True
        while is_busy and not self.force_exit:
            # In every round: a connection may have been accepted just before the listener was closed.
            for connection in self._connections:
                connection.shutdown()
            await asyncio.sleep(_SHUTDOWN_POLL_S)
            is_busy = bool(self.server_state.connections or self.server_state.tasks)

    @property
    def _connections(self) -> list[_HttpProtocol]:
        connections: list[Any] = list(self.server_state.connections)
        return connections

    def close_idle(self) -> None:
        """Closes the connections without a request that have been idle longest. Several at once, so that a
        flood of connections does not sort them each time."""
        idle = sorted([one for one in self._connections if one.is_idle], key=lambda one: one.active_at)
        for connection in idle[: 1 + len(idle) // 16]:
            self.server_state.connections.discard(connection)
            connection.transport.abort()

    def log_limit(self, limit: str, problem: str, client: tuple[str, int] | None) -> None:
        """Logs that a connection was closed by a limit, at most once in ten seconds for each limit."""
        now = time.monotonic()
        if now - self._logged_at.get(limit, -_LIMIT_LOG_S) < _LIMIT_LOG_S:
            self._unlogged[limit] += 1
            return
        self._logged_at[limit] = now
        more, address = self._unlogged.pop(limit, 0), client[0] if client else "unknown"
        log.warning(
            "%s: %s; a connection from %s was closed, %d others since the last such line",
            limit,
            problem,
            address,
            more,
            extra={"limit": limit, "client": address, "others": more},
        )


class _HttpProtocol(HttpToolsProtocol):
    """One connection: limits the head of a request, and closes a connection that makes the server wait.

    The parser collects the request line and the headers without a limit and in quadratic time. So bytes that
    arrive while a head is incomplete are counted here, and those of the trailers after a chunked body.

    A disconnect is reported to every request in progress. uvicorn reports it only to the last request of a
    connection. If a client sends its next request before it has the answer to the first and then disconnects,
    the first call would count as delivered.
    """

    def __init__(self, uvicorn_server: UvicornServer, **options: Any) -> None:
        super().__init__(**options)
        self._uvicorn_server = uvicorn_server
        self._limits = uvicorn_server.limits
        self._open_cycles: tuple[RequestResponseCycle, ...] = ()
        self.active_at = self.loop.time()
        """When the connection was made or last received bytes."""
        self._is_in_head = True
        """Whether the request line and headers of a request are awaited, or have begun and are incomplete."""
        self._head_begun_at = self.active_at
        self._head_bytes = 0
        """Bytes received that completed no head and belong to no body."""
        self._answered_at: float | None = None
        """When a request was found to be answered before its body had arrived."""
        self._blocked_at: float | None = None
        """Since when the client has not read what was sent."""
        self._is_refused = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return all(cycle.response_complete for cycle in self._open_cycles)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._uvicorn_server.max_connections
        if len(self.connections) > limit:
            self.connections.discard(self)
            self._uvicorn_server.close_idle()
            is_full = len(self.connections) >= limit
            self.connections.add(self)
            if is_full:
                self._refuse(503, "max_connections", f"got {limit + 1}, expected at most {limit}")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self.active_at = self.loop.time()
        scope, cycle, received = self.scope, self.cycle, len(self.cycle.body) if self.cycle else 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._continue_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLargeError):
                self._refuse_head(error.__context__.size)
            else:
                self._refuse(400, "request", f"Invalid HTTP request received: {error}")
            return
        self._is_in_head = self.cycle is None or self.cycle.scope is not self.scope
        if self.scope is not scope:
            # A head begins; these bytes may have ended the body before it, so they do not count.
            self._head_begun_at, self._head_bytes = self.active_at, 0
        elif self._is_in_head or (
            # Trailers, and what is around the parts of a chunked body.
            self.cycle is cycle
            and cycle.more_body
            and not cycle.response_complete
            and len(cycle.body) == received
        ):
            self._head_bytes += len(data)
        else:
            self._head_bytes = 0
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_head(self._head_bytes)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > self._limits.max_header_bytes:
            raise _HeadTooLargeError(size)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            unfinished = [cycle for cycle in self._open_cycles if not cycle.response_complete]
            self._open_cycles = (*unfinished, self.cycle)
            self._answered_at = None

    def _should_upgrade(self) -> bool:
        return True  # for a request that asks for it; `data_received` then reads it again without that

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """Reads a request that asks for another protocol (h2c, WebSocket) as plain HTTP/1.1.

        The parser has stopped after its head; `rest` is its body, or the beginning of it.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "request", "got method CONNECT, expected a method for a path")
            return
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join([token for token in tokens if token.lower() != b"upgrade"])
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as uvicorn does it; httptools before 0.6.3 does not have it
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_at = None

    def close_if_overdue(self) -> None:
        """Closes the connection if its client has let the server wait for too long; called every second."""
        limits, now, cycle = self._limits, self.loop.time(), self.cycle
        silent_s = now - self.active_at
        if self._is_refused:
            return
        if self._blocked_at is not None and now - self._blocked_at > limits.write_timeout_s:
            problem = f"the client did not read for {limits.write_timeout_s:g} s"
            self._uvicorn_server.log_limit("write_timeout_s", problem, self.client)
            self.transport.abort()
        elif self._is_in_head:
            if now - self._head_begun_at > limits.header_timeout_s:
                problem = f"no complete headers within {limits.header_timeout_s:g} s"
                self._refuse(408, "header_timeout_s", problem)
        elif not self.is_idle:
            if cycle.more_body and not self.flow.read_paused and silent_s > limits.body_timeout_s:
                problem = f"no byte of the body for {limits.body_timeout_s:g} s"
                self._refuse(408, "body_timeout_s", problem)
        elif cycle.more_body and self.timeout_keep_alive_task is None:
            # Answered, and the rest of the body is not wanted; a client may finish sending before it reads.
            self._answered_at = self._answered_at or now
            waited_s = max(silent_s, now - self._answered_at)
            if waited_s > limits.body_timeout_s:
                self.transport.abort()

    def _refuse_head(self, size: int) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(431, "max_header_bytes", f"got {size} bytes and more, expected at most {limit}")

    def _refuse(self, status: int, limit: str, problem: str) -> None:
        """Answers with an error, reads no more, and closes the connection after a moment: one that is closed
        with unread bytes is reset, and its client may never see the answer."""
        self._is_refused = True
        self._uvicorn_server.log_limit(limit, problem, self.client)
        unfinished = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        if self.transport.is_closing() or any(cycle.response_started for cycle in unfinished):
            self.transport.abort()
            return
        for cycle in unfinished:  # this is their answer
            cycle.disconnected = True
            cycle.message_event.set()
        body = msgspec.json.encode(error_body(ErrorInfo(status, f"{limit}: {problem}", code=limit)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(
            f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.pause_reading()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles = ()
        super().connection_lost(exc)


class _HeadTooLargeError(Exception):
    """The request line and headers of a request exceed the limit."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


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
    listener = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    # Accepted connections inherit it; without it every response waits about 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
