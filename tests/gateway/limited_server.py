"""A server with limits and an app that echoes, for tests of connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from branchline.gateway.config import GatewayConfig
from branchline.gateway.server_connection import ServerConnection
from branchline.gateway.uvicorn_server import UvicornServer, bind_socket
from tests.engines.manual_clock import advance, yield_to_loop

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass
class EchoApp:
    """Answers with the body of a request, if `reads_body` is set after it has arrived."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    stops_halfway: bool = False
    reads_body: bool = True
    scopes: list[Any] = field(default_factory=list)
    disconnects: int = 0
    is_complete: bool = False
    """The body of a request has arrived."""
    answer: bytes | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body, more = b"", self.reads_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.is_complete = True
        await self.may_answer.wait()
        content = body if self.answer is None else self.answer
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        if self.stops_halfway:
            await send(
                {"type": "http.response.body", "body": content[: len(content) // 2], "more_body": True}
            )
            assert (await receive())["type"] == "http.disconnect"
            return
        await send({"type": "http.response.body", "body": content})


class CountingConnection(ServerConnection):
    """Counts what the server has received."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        assert isinstance(self._owner, CountingServer)
        self._owner.received_bytes += len(data)


class CountingServer(UvicornServer):
    def __init__(self, app: Any, limits: GatewayConfig) -> None:
        super().__init__(app, limits)
        self.config.http = partial(CountingConnection, self)  # type: ignore[assignment]
        self.received_bytes = 0


@dataclass
class LimitedServer:
    app: EchoApp
    server: CountingServer
    port: int
    task: asyncio.Task[None]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    clients: list[socket.socket] = field(default_factory=list)

    async def connect(self) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    async def wait_for_bytes(self, count: int) -> None:
        """Returns when the server has received this many bytes, on all connections."""
        await self.wait_until(lambda: self.server.received_bytes >= count)

    async def pass_time(self, seconds: float) -> None:
        """Moves the clock; the server then looks for overdue connections."""
        await advance(seconds)
        await self.server._close_overdue()
        await yield_to_loop()


@asynccontextmanager
async def limited_server(*, answers: bool = True, **limits: Any) -> AsyncIterator[LimitedServer]:
    app, listener = EchoApp(), bind_socket("127.0.0.1", 0)
    # Whatever the kernel's defaults are, an answer of megabytes does not fit.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    if answers:
        app.may_answer.set()
    limited, port = CountingServer(app, GatewayConfig(**limits)), listener.getsockname()[1]
    task = asyncio.create_task(limited.serve(sockets=[listener]))
    while not limited.started:
        await asyncio.sleep(0)
    running = LimitedServer(app, limited, port, task)
    try:
        yield running
    finally:
        for writer in running.writers:
            writer.transport.abort()
        for client in running.clients:
            client.close()
        app.may_answer.set()
        await running.wait_until(lambda: running.connections == 0)
        limited.stop()
        limited.force_exit = True
        await asyncio.wait({task})


async def read_response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)
