"""One HTTP connection: uvicorn's, with limits on what its client may send and how long it may keep silent.

Two rules keep a connection from reaching another. Nothing that it raises leaves it: it is logged, and this
connection alone is closed. And it is late only if nothing of it waits to be read: the server looks twice
(`find_overdue`), and between the two its event loop reads what has arrived.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from branchline.gateway.config import GatewayConfig
from branchline.gateway.protocols.base import ErrorInfo
from branchline.gateway.protocols.chat import error_body

_LINGER_S = 2.0
"""How long a refused connection stays open for its client to read the answer."""


class ConnectionOwner(Protocol):
    """The server of a connection."""

    limits: GatewayConfig
    max_connections: int
    receive_buffer: memoryview
    """Where the event loop puts what a connection has received, until that connection has read it."""

    def close_idle(self) -> None:
        """Makes room for a new connection, if one can be closed."""

    def log_limit(self, limit: str, problem: str, client: tuple[str, int] | None) -> None:
        """Logs that a connection was closed by a limit."""

    def log_fault(self, error: Exception, client: tuple[str, int] | None) -> None:
        """Logs that a connection was closed by an error of its own."""


@dataclass(frozen=True)
class Overdue:
    """A client that has let the server wait for too long."""

    limit: str
    problem: str = ""
    """For the log and the answer; empty if the client did nothing wrong."""
    status: int | None = None
    """The status of the answer; None if the connection is closed without one."""


class ServerConnection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Limits the head of a request, and closes a connection that makes the server wait.

    The parser collects the request line and the headers without a limit and in quadratic time. So bytes that
    arrive while a head is incomplete are counted here, and those of the trailers after a chunked body.

    A disconnect is reported to every request in progress. uvicorn reports it only to the last request of a
    connection. If a client sends its next request before it has the answer to the first and then disconnects,
    the first call would count as delivered.

    asyncio receives into a buffer that all connections share. For a plain protocol it allocates 256 KiB for
    each read and gives all but the bytes received back: what a session keeps then lies scattered between the
    gaps, and the memory of a gateway that runs for days grows without anything leaking. (uvloop has such a
    buffer of its own.)
    """

    def __init__(self, owner: ConnectionOwner, **options: Any) -> None:
        super().__init__(**options)
        self._owner = owner
        self._limits = owner.limits
        self._open_cycles: tuple[RequestResponseCycle, ...] = ()
        self.active_at = self.loop.time()
        """When the connection was made or last received bytes."""
        self._is_in_head = True
        """Whether the request line and headers of a request are awaited, or have begun and are incomplete."""
        self._head_begun_at = self.active_at
        self._head_bytes = 0
        """Bytes received that completed no head and belong to no body."""
        self._answered_at = self.active_at
        """When a response was last completed."""
        self._is_idle_time_over = False
        """Whether the time for the next request is over; bytes of it may wait to be read."""
        self._unread_since: float | None = None
        """Since when the client has read nothing of what is left to send, which is `_unsent_bytes`."""
        self._unsent_bytes = 0
        self._is_refused = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return all(cycle.response_complete for cycle in self._open_cycles)

    def describe_unfinished(self) -> list[str]:
        """What is not over on this connection, for a log."""
        client = "unknown" if self.client is None else "{}:{}".format(*self.client)
        unfinished = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        lines = [
            f"{cycle.scope['method']} {cycle.scope['path']} from {client}"
            + (", whose body is incomplete" if cycle.more_body else "")
            for cycle in unfinished
        ]
        unread = self.transport.get_write_buffer_size()
        return [*lines, f"{client}, which has {unread} bytes to read"] if unread else lines

    def fail(self, error: Exception) -> None:
        """Logs an error of this connection and closes it."""
        self._is_refused = True
        self._owner.log_fault(error, self.client)
        try:
            self.transport.abort()
        except Exception:  # it can no longer be closed; a stop shall not wait for it
            self.connections.discard(self)

    # -- what the event loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        try:
            super().connection_made(transport)
            self._require_room()
        except Exception as error:
            self.fail(error)

    def _require_room(self) -> None:
        limit = self._owner.max_connections
        if len(self.connections) > limit:
            self.connections.discard(self)
            self._owner.close_idle()
            is_full = len(self.connections) >= limit
            self.connections.add(self)
            if is_full:
                self._refuse(503, "max_connections", f"got {limit + 1}, expected at most {limit}")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._owner.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._owner.receive_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(data)
        except Exception as error:
            self.fail(error)

    def _receive(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._is_idle_time_over = False
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

    def _should_upgrade(self) -> bool:
        return True  # for a request that asks for it; `data_received` then reads it again without that

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """Reads a request that asks for another protocol (h2c, WebSocket) as plain HTTP/1.1.

        The parser has stopped after its head; `rest` is its body, or the beginning of it. That a WebSocket
        was asked for stays in the headers: the app refuses it where clients then use HTTP.
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
            if name != b"upgrade" or value.lower() == b"websocket":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as uvicorn does it; httptools before 0.6.3 does not have it
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._receive(b"\r\n".join([*lines, b"", rest]))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def timeout_keep_alive_handler(self) -> None:
        # The bytes of the next request may have arrived while the event loop was busy.
        self._is_idle_time_over = True

    def on_response_complete(self) -> None:
        self._answered_at = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles = ()
        super().connection_lost(exc)

    # -- what the server calls every second ----------------------------------------------------------

    def find_overdue(self) -> Overdue | None:
        """Returns what the client has let the server wait for too long, None if nothing."""
        if self._is_refused:
            return None
        limits, now = self._limits, self.loop.time()
        self._note_unsent(now)
        if self._unread_since is not None:
            if now - self._unread_since > limits.write_timeout_s:
                return Overdue("write_timeout_s", f"the client did not read for {limits.write_timeout_s:g} s")
        elif self.transport.is_closing():
            return None
        elif self._is_idle_time_over and self.timeout_keep_alive_task is not None:
            return Overdue("connection_idle_s")
        if self.flow.read_paused:
            return None  # what it has sent is not read yet
        if self._is_in_head:
            if now - self._head_begun_at > limits.header_timeout_s:
                problem = f"no complete headers within {limits.header_timeout_s:g} s"
                return Overdue("header_timeout_s", problem, 408)
        elif self.cycle.more_body:
            silent_s = now - self.active_at
            if not self.is_idle and silent_s > limits.body_timeout_s:
                problem = f"no byte of the body for {limits.body_timeout_s:g} s"
                return Overdue("body_timeout_s", problem, 408)
            # Answered, and the rest of the body is not wanted; a client may finish sending before it reads.
            is_unwanted = self.is_idle and self.timeout_keep_alive_task is None
            if is_unwanted and max(silent_s, now - self._answered_at) > limits.body_timeout_s:
                return Overdue("body_timeout_s")
        return None

    def _note_unsent(self, now: float) -> None:
        """Sets since when the client reads nothing. Only while nothing is added to what is left to send: so
        less of it means that the client reads, if slowly."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent_bytes
        self._unsent_bytes = unsent
        if unsent == 0 or not (self.flow.write_paused or self.is_idle):
            self._unread_since = None
        elif self._unread_since is None or unsent < before:
            self._unread_since = now

    def close_overdue(self) -> None:
        """Closes the connection if it is still there and overdue."""
        overdue = self.find_overdue() if self in self.connections else None
        if overdue is None:
            return
        if overdue.status is not None:
            self._refuse(overdue.status, overdue.limit, overdue.problem)
            return
        if overdue.problem:
            self._owner.log_limit(overdue.limit, overdue.problem, self.client)
        self.transport.abort()

    def _refuse_head(self, size: int) -> None:
        limit = self._limits.max_header_bytes
        self._refuse(431, "max_header_bytes", f"got {size} bytes and more, expected at most {limit}")

    def _refuse(self, status: int, limit: str, problem: str) -> None:
        """Answers with an error, reads no more, and closes the connection after a moment: one that is closed
        with unread bytes is reset, and its client may never see the answer."""
        self._is_refused = True
        self._owner.log_limit(limit, problem, self.client)
        unfinished = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        if self.transport.is_closing() or any(cycle.response_started for cycle in unfinished):
            self.transport.abort()
            return
        for cycle in unfinished:  # this is their answer
            cycle.disconnected = True
            cycle.message_event.set()
        body = msgspec.json.encode(error_body(ErrorInfo(status, f"{limit}: {problem}", code=limit)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        try:
            self.transport.write(
                f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
            )
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.transport.pause_reading()
        except (OSError, RuntimeError):  # the client is gone, which is found out here
            self.transport.abort()
            return
        self.loop.call_later(_LINGER_S, self.transport.abort)


class _HeadTooLargeError(Exception):
    """The request line and headers of a request exceed the limit."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
