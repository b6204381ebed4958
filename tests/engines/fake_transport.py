"""Connections whose other end is the test: what it says arrives when it says it, cut where it cuts it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from branchline.engines.connection import HttpConnection
from tests.engines.fake_servers import FakeServer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ABSENT = b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """A transport that ends in memory."""

    def __init__(self, protocol: HttpConnection, line: InMemoryServer | None = None) -> None:
        super().__init__()
        self.protocol: HttpConnection | None = protocol
        self._server = line
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if self._server is not None:
            self._server.handle_request(self, bytes(data))

    def abort(self) -> None:
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            asyncio.get_running_loop().call_soon(protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        return self.protocol is None


class InMemoryServer:
    """A server without a socket. Whatever the running loop connects to is this; it has no control paths."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake_server = fake
        """Knows what is generated, and how it is said."""
        self.transports: list[FakeTransport] = []
        """Those on which something is to be generated, once for each request."""
        self.bodies: list[dict[str, Any]] = []
        self._request_received = asyncio.Event()
        asyncio.get_running_loop().create_connection = self._connect

    async def next_request_events(self) -> list[bytes]:
        """The events that answer the next request, each as it is sent."""
        await self._request_received.wait()
        self._request_received.clear()
        return [sse_event(event) async for event in self.fake_server.events(self.bodies[-1])]

    def send_chunks(self, *pieces: bytes) -> None:
        """Pieces of the answer's body, a chunk each, which arrive at once."""
        self.send(b"".join([http_chunk(piece) for piece in pieces if piece]))

    def send(self, data: bytes) -> None:
        protocol = self.transports[-1].protocol
        assert protocol is not None, "the connection is closed"
        protocol.data_received(data)

    def drop_connection(self, error: Exception | None = None) -> None:
        """The server is gone."""
        wire = self.transports[-1]
        protocol, wire.protocol = wire.protocol, None
        assert protocol is not None, "the connection is closed"
        protocol.connection_lost(error)

    @property
    def is_closed(self) -> bool:
        return self.transports[-1].is_closing()

    async def _connect(self, factory: Any, *_: Any, **__: Any) -> tuple[FakeTransport, HttpConnection]:
        protocol = factory()
        return FakeTransport(protocol, self), protocol

    def handle_request(self, wire: FakeTransport, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.split(b" ")[1] != self.fake_server.generate_path.encode():
            assert wire.protocol is not None
            asyncio.get_running_loop().call_soon(wire.protocol.data_received, ABSENT)
            return
        self.transports.append(wire)
        self.bodies.append(json.loads(body))
        self._request_received.set()


def sse_event(event: dict[str, Any]) -> bytes:
    """An event as servers send it."""
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def http_chunk(piece: bytes) -> bytes:
    """A piece as a chunk of an answer."""
    return b"%X\r\n%b\r\n" % (len(piece), piece)


def chunked_body(pieces: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    said = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return said + b"0\r\n" + trailer + b"\r\n"


async def yield_to_loop(count: int = 5) -> None:
    """Lets whoever can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)
