"""A fake vLLM server in its own process, with faults that the test switches on and off.

    python -m tests.faults.replica_process

prints its URL. `POST /fault {"kind": …}` sets what it does to every generation request: nothing (""), `fail`
answers 500, `hang` stops after some tokens, `lie` sends output that cannot be right. `GET /counts` returns
the number of generation requests, without checks.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, get_args

import httpx

from tests.engines.fake_servers import FakeVllm, Lie

ROOT = Path(__file__).parents[2]
TOKENS_PER_ANSWER = 8


class FaultyVllm(FakeVllm):
    """A server with one kind of fault at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.json_by_path = {
            "/health": None,
            "/v1/models": {"data": [{"id": "fake", "root": "fake", "max_model_len": 100_000}]},
        }
        self._rng = Random(1)
        self._fault = ""

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if self._fault == "lie":
            self.lie = self._rng.choice(get_args(Lie))
            self.lie_at = self._rng.randrange(TOKENS_PER_ANSWER)
        if self._fault == "hang":
            self.hold_after = self._rng.randrange(TOKENS_PER_ANSWER)
        async for event in super().events(body):
            yield event
            await asyncio.sleep(0.005)  # Later events arrive after earlier ones were read.

    def _send_response(
        self, writer: asyncio.StreamWriter, path: str, refusal: tuple[int, bytes] | None
    ) -> None:
        if path == "/fault":
            self._fault = self.requests[-1][1]["kind"]
            self.refusal = (500, b"CUDA error: device-side assert") if self._fault == "fail" else None
            self.lie = self.hold_after = None
            self.proceed.set()  # Requests that hang end; new ones hang at a new event.
            self.proceed = asyncio.Event()
            self.json_by_path[path] = {}
        if path == "/counts":
            self.json_by_path[path] = sum(len(body["prompt"]) > 1 for body in self.bodies)
        super()._send_response(writer, path, refusal)


@contextmanager
def replica_process() -> Iterator[Replica]:
    command = [sys.executable, "-m", "tests.faults.replica_process"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Replica(process.stdout.readline().strip())
        finally:
            process.kill()


class Replica:
    """A running process."""

    def __init__(self, url: str) -> None:
        self.url = url

    def set_fault(self, kind: str) -> None:
        httpx.post(f"{self.url}/fault", json={"kind": kind}).raise_for_status()

    def count_requests(self) -> int:
        count: int = httpx.get(f"{self.url}/counts").raise_for_status().json()
        return count


async def serve() -> None:
    async with FaultyVllm() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
