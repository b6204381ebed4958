"""CPU time of one reply from an HTTP engine, without a gateway.

VllmEngine is compared with a minimal httpx client, which reads the lines of the same stream and decodes each
event, but checks nothing and supports no pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from benchmarks.gateway.mock_engine import REPLY_TOKENS, MockOptions
from benchmarks.gateway.server_process import server_process
from benchmarks.measure import BenchmarkTable, format_ms
from branchline.engines.base import BUFFERED_FLUSH_S, Engine, SamplingParams
from branchline.engines.http import STREAM_INTERVAL
from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine, VllmEvent

_PROMPT = np.arange(1000, 5500, dtype=np.int32)
_ROUNDS, _REPLIES, _IN_FLIGHT = 3, 40, 4
_PACE_S = 0.001
_FLUSH_S = 0.02

RequestFunction = Callable[[], Awaitable[int]]
"""Requests a reply; returns the number of pieces in which it arrived."""


@dataclass
class EngineCost:
    """The cost of a reply, the best of all rounds."""

    cpu_s: float = float("inf")
    pieces: float = 0.0


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"CPU time of a reply of {REPLY_TOKENS} tokens from an HTTP engine",
        ["reply", "client", "pieces", "CPU ms", "of httpx"],
        [
            f"process_time, the best of {_ROUNDS} rounds of {_REPLIES} replies, {_IN_FLIGHT} in flight, to a "
            f"prompt of {len(_PROMPT):,} ids; the engine is the mock.",
            f"Buffered: {STREAM_INTERVAL} tokens per event, flush_s {BUFFERED_FLUSH_S:g}.",
            f"Streamed: one token per event, flush_s {_FLUSH_S:g}.",
        ],
    )
    for reply, pause_s, flush_s in (
        ("buffered, at once", 0.0, BUFFERED_FLUSH_S),
        ("buffered, an event per ms", _PACE_S, BUFFERED_FLUSH_S),
        ("streamed, at once", 0.0, _FLUSH_S),
        ("streamed, a token per ms", _PACE_S, _FLUSH_S),
    ):
        costs = asyncio.run(_measure(pause_s, flush_s))
        for client, cost in costs.items():
            ratio = cost.cpu_s / costs["httpx"].cpu_s
            report.add_row(reply, client, f"{cost.pieces:.0f}", format_ms(cost.cpu_s), f"{ratio:.2f}")
    return report


async def _measure(pause_s: float, flush_s: float) -> dict[str, EngineCost]:
    ids = list(range(2000, 2000 + REPLY_TOKENS))
    options = MockOptions(ids, [f"token{token_id}" for token_id in ids], [], pause_s=pause_s)
    params = SamplingParams(flush_s=flush_s)
    interval = STREAM_INTERVAL if flush_s == BUFFERED_FLUSH_S else 1
    async with (
        server_process("mock_vllm", msgspec.to_builtins(options)) as mock,
        httpx.AsyncClient() as client,
    ):
        engine, other = VllmEngine(mock.url, model="mock"), VllmEngine(mock.url, model="mock")
        requests: dict[str, RequestFunction] = {
            "httpx": lambda: _by_httpx(client, mock.url, interval),
            "VllmEngine": lambda: _by_engine(engine, params),
            "VllmEngine as a replica": lambda: _by_engine(replicas, params),
        }
        replicas = Replicas([other])
        costs = {name: EngineCost() for name in requests}
        for _ in range(_ROUNDS):
            for name, request in requests.items():
                cost = await _round(request)
                costs[name] = min(costs[name], cost, key=lambda cost: cost.cpu_s)
        await engine.close()
        await replicas.close()
    return costs


async def _round(request: RequestFunction) -> EngineCost:
    await request()
    remaining = iter(range(_REPLIES))
    pieces = 0

    async def work() -> None:
        nonlocal pieces
        for _ in remaining:
            count = await request()
            pieces += count

    start = time.process_time()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    return EngineCost((time.process_time() - start) / _REPLIES, pieces / _REPLIES)


async def _by_engine(engine: Engine, params: SamplingParams) -> int:
    chunks = [chunk async for chunk in engine.generate(_PROMPT, params)]
    assert sum(len(chunk.ids) for chunk in chunks) == REPLY_TOKENS
    return len(chunks)


async def _by_httpx(client: httpx.AsyncClient, url: str, interval: int) -> int:
    body = msgspec.json.encode({"prompt": _PROMPT.tolist(), "stream": True, "stream_interval": interval})
    decode, ids, pieces = msgspec.json.Decoder(VllmEvent).decode, 0, 0
    async with client.stream("POST", f"{url}/v1/completions", content=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids += sum(len(choice.token_ids or ()) for choice in decode(line[6:]).choices or ())
                pieces += 1
    assert ids == REPLY_TOKENS
    return pieces
