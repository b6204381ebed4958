"""A loopback server that sends recorded responses, in writes of any size."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Self


class RecordedServer:
    """Answers each request with the next recording; the request must equal the recorded one.

    async with RecordedServer(folder, "pause", "resume") as server: …
    """

    def __init__(self, folder: Path, *names: str, write_size: int = 0) -> None:
        self._folder = folder
        self._names = list(names)
        self._write_size = write_size
        """Bytes of each write; 0: all at once."""
        self.problems: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not self.problems
        assert kind is not None or not self._names, f"not requested: {self._names}"

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                name = self._names.pop(0)
                self._compare(name, json.loads(body or b"null"))
                reply = (self._folder / f"{name}.reply").read_bytes()
                for start in range(0, len(reply), self._write_size or len(reply)):
                    writer.write(reply[start : start + (self._write_size or len(reply))])
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _compare(self, name: str, sent: Any) -> None:
        """Every recorded field must have been sent with the recorded value; further fields may be sent."""
        recorded = json.loads((self._folder / f"{name}.request").read_bytes())
        if isinstance(recorded, dict) and isinstance(sent, dict):
            sent = {key: value for key, value in sent.items() if key in recorded}
        if sent != recorded:
            self.problems.append(f"{name}: sent {sent}, recorded {recorded}; scripts/record_vllm.py records")
