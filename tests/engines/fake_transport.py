"""Connections without sockets: the test decides which bytes arrive, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from branchline.engines.client import HttpConnection
from tests.engines.fake_servers import FakeServer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """A transport in memory."""

    def __init__(self, protocol: HttpConnection, server: InMemoryServer | None = None) -> None:
        super().__init__()
        self.protocol: HttpConnection | None = protocol
        self._server = server
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
    """A server without a socket. All connections of the running loop lead to it; control paths are 404."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake_server = fake
        """Makes the events of a response."""
        self.transports: list[FakeTransport] = []
        """The transport of each generation request."""
        self.bodies: list[dict[str, Any]] = []
        self._request_received = asyncio.Event()
        loop: Any = asyncio.get_running_loop()
        loop.create_connection = self._connect

    async def next_request_events(self) -> list[bytes]:
        """Waits for the next request and returns the encoded events of its response."""
        await self._request_received.wait()
        self._request_received.clear()
        return [sse_event(event) async for event in self.fake_server.events(self.bodies[-1])]

    def send_chunks(self, *pieces: bytes) -> None:
        """Delivers pieces of the response's body, one HTTP chunk each, in one read."""
        self.send(b"".join([http_chunk(piece) for piece in pieces if piece]))

    def send(self, data: bytes) -> None:
        protocol = self.transports[-1].protocol
        assert protocol is not None, "the connection is closed"
        protocol.data_received(data)

    def drop_connection(self, error: Exception | None = None) -> None:
        """Ends the last connection."""
        transport = self.transports[-1]
        protocol, transport.protocol = transport.protocol, None
        assert protocol is not None, "the connection is closed"
        protocol.connection_lost(error)

    @property
    def is_closed(self) -> bool:
        return self.transports[-1].is_closing()

    async def _connect(self, factory: Any, *_: Any, **__: Any) -> tuple[FakeTransport, HttpConnection]:
        protocol = factory()
        return FakeTransport(protocol, self), protocol

    def handle_request(self, transport: FakeTransport, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.split(b" ")[1] != self.fake_server.generate_path.encode():
            assert transport.protocol is not None
            asyncio.get_running_loop().call_soon(transport.protocol.data_received, NOT_FOUND)
            return
        self.transports.append(transport)
        self.bodies.append(json.loads(body))
        self._request_received.set()


def sse_event(event: dict[str, Any]) -> bytes:
    """An encoded server-sent event."""
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def http_chunk(piece: bytes) -> bytes:
    """A piece as one chunk of a chunked body."""
    return b"%X\r\n%b\r\n" % (len(piece), piece)


def chunked_body(pieces: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return chunks + b"0\r\n" + trailer + b"\r\n"
