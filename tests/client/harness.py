"""Both clients under one interface, and a proxy that loses responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from branchline import AsyncClient, Client
from branchline.client.client import ClientSession
from tests.hang import HANG_S

KINDS = ("async", "sync")
CLIENT_THREADS = ThreadPoolExecutor(16)
"""Not the threads of the gateway, which would wait for these."""


class Threaded:
    """A sync object whose methods run in a thread, so that one test serves both clients."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name == "session" or not callable(value):
            return value if name != "session" else lambda *args, **kwargs: Threaded(value(*args, **kwargs))

        async def call(*args: Any, **kwargs: Any) -> Any:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(CLIENT_THREADS, partial(value, *args, **kwargs))
            return Threaded(result) if isinstance(result, ClientSession) else result

        return call


@asynccontextmanager
async def open_client(kind: str, url: str, admin_key: str = "", **options: Any) -> AsyncIterator[Any]:
    if kind == "async":
        async with AsyncClient(url, admin_key, **options) as client:
            yield client
    else:
        sync_client = Client(url, admin_key, **options)
        try:
            yield Threaded(sync_client)
        finally:
            await asyncio.to_thread(sync_client.close)


@dataclass
class DroppingProxy:
    """Forwards requests, and closes the connection instead of sending the first responses to each request."""

    target: str
    drops: int = 1
    """How many responses to one request are lost; they are identified by method, path and body."""
    seen: dict[tuple[str, str, bytes], int] = field(default_factory=dict)
    url: str = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[DroppingProxy]:
        async with httpx.AsyncClient(timeout=HANG_S) as self._http:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                server.close()
                await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = dict(line.split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.pop("content-length", 0)))
                response = await self._http.request(method, self.target + path, headers=headers, content=body)
                request = (method, path, body)
                self.seen[request] = self.seen.get(request, 0) + 1
                if self.seen[request] <= self.drops:
                    break
                status = (
                    f"HTTP/1.1 {response.status_code} X\r\ncontent-length: {len(response.content)}\r\n\r\n"
                )
                writer.write(status.encode() + response.content)
                await writer.drain()
        writer.transport.abort()
