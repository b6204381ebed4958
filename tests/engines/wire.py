"""Connections whose other end is the test: what it says arrives when it says it, cut where it cuts it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from branchline.engines.connection import Connection
from tests.engines.fake import FakeServer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ABSENT = b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that ends in memory."""

    def __init__(self, protocol: Connection, line: Line | None = None) -> None:
        super().__init__()
        self.protocol: Connection | None = protocol
        self._line = line
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if self._line is not None:
            self._line.take(self, bytes(data))

    def abort(self) -> None:
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            asyncio.get_running_loop().call_soon(protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        return self.protocol is None


class Line:
    """A server without a socket. Whatever the running loop connects to is this; it has no control paths."""

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        """Knows what is generated, and how it is said."""
        self.wires: list[Wire] = []
        """Those on which something is to be generated, once for each request."""
        self.bodies: list[dict[str, Any]] = []
        self._asked = asyncio.Event()
        asyncio.get_running_loop().create_connection = self._connect

    async def asked(self) -> list[bytes]:
        """The events that answer the next request, each as it is sent."""
        await self._asked.wait()
        self._asked.clear()
        return [sent(event) async for event in self.fake.events(self.bodies[-1])]

    def say(self, *pieces: bytes) -> None:
        """Pieces of the answer's body, a chunk each, which arrive at once."""
        self.arrive(b"".join([framed(piece) for piece in pieces if piece]))

    def arrive(self, data: bytes) -> None:
        protocol = self.wires[-1].protocol
        assert protocol is not None, "the connection is closed"
        protocol.data_received(data)

    def lose(self, error: Exception | None = None) -> None:
        """The server is gone."""
        wire = self.wires[-1]
        protocol, wire.protocol = wire.protocol, None
        assert protocol is not None, "the connection is closed"
        protocol.connection_lost(error)

    @property
    def is_closed(self) -> bool:
        return self.wires[-1].is_closing()

    async def _connect(self, factory: Any, *_: Any, **__: Any) -> tuple[Wire, Connection]:
        protocol = factory()
        return Wire(protocol, self), protocol

    def take(self, wire: Wire, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.split(b" ")[1] != self.fake.generate_path.encode():
            assert wire.protocol is not None
            asyncio.get_running_loop().call_soon(wire.protocol.data_received, ABSENT)
            return
        self.wires.append(wire)
        self.bodies.append(json.loads(body))
        self._asked.set()


def sent(event: dict[str, Any]) -> bytes:
    """An event as servers send it."""
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def framed(piece: bytes) -> bytes:
    """A piece as a chunk of an answer."""
    return b"%X\r\n%b\r\n" % (len(piece), piece)


def chunked(pieces: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    said = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return said + b"0\r\n" + trailer + b"\r\n"


async def ticks(count: int = 5) -> None:
    """Lets whoever can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)
