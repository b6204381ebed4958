"""A minimal HTTP/1.1 client on one kept-alive connection.

It must be cheap, because it shares the machine with the measured gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

_LINE_BYTES = 2**20


@dataclass(frozen=True)
class HttpAnswer:
    """A complete response, and the time from the first byte sent to the last byte received."""

    status: int
    body: bytes
    took_s: float

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def events(self) -> list[Any]:
        """The events of a stream."""
        lines = self.body.split(b"\n\n")
        return [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]


class Connection:
    """One connection to a server, for one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    async def post(self, path: str, body: bytes | Mapping[str, Any], key: str = "") -> HttpAnswer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._request("POST", path, data, key)

    async def get(self, path: str, key: str = "") -> HttpAnswer:
        return await self._request("GET", path, b"", key)

    async def _request(self, method: str, path: str, data: bytes, key: str) -> HttpAnswer:
        assert self._writer is not None
        credentials = f"authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\n{credentials}"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        start = time.perf_counter()
        self._writer.writelines((head.encode(), data))
        await self._writer.drain()
        status, body = await self._read()
        return HttpAnswer(status, body, time.perf_counter() - start)

    async def _read(self) -> tuple[int, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        if b"transfer-encoding: chunked" not in head:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            return status, await self._reader.readexactly(length)
        parts: list[bytes] = []
        while size := int(await self._reader.readline(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return status, b"".join(parts)
