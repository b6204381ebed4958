"""A proxy that only copies bytes: the lower bound of the cost of any gateway in Python.

It opens a connection to the engine for each client connection and copies bytes between the two. It parses no
HTTP, has no sessions and stores nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast
from urllib.parse import urlsplit

import msgspec

from benchmarks.gateway.server_process import answer_commands
from branchline.gateway.process import run_server


class ProxyEnd(asyncio.Protocol):
    """One end of a pair of connections."""

    def __init__(self, other: ProxyEnd | None = None) -> None:
        self.other = other
        self.early: list[bytes] = []
        """Data that arrived before the other end was connected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class ClientEnd(ProxyEnd):
    """The connection of a client."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._address = host, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        _, self.other = await loop.create_connection(lambda: ProxyEnd(self), *self._address)
        self.other.transport.writelines(self.early)


async def main(engine_url: str) -> None:
    url = urlsplit(engine_url)
    host, port = url.hostname or "", url.port or 80
    server = await asyncio.get_running_loop().create_server(lambda: ClientEnd(host, port), "127.0.0.1", 0)
    await answer_commands({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}, {})


if __name__ == "__main__":
    run_server(main(msgspec.json.decode(sys.argv[1].encode())["engine_url"]))  # the same event loop as ours
