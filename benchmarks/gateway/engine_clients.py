"""What one reply costs the process that asks an HTTP engine for it, without a gateway around it.

Beside our engine stands the least that can be done with httpx: the lines of the same stream, each event
decoded, nothing checked, nothing kept for a pause.
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

RequestFunction = Callable[[], Awaitable[int]]
"""Asks for a reply and says in how many pieces it came."""


@dataclass
class EngineCost:
    """What a reply came to, the best of all rounds."""

    cpu_s: float = float("inf")
    pieces: float = 0.0


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"CPU of a process that asks an HTTP engine for a reply of {REPLY_TOKENS} tokens",
        ["reply", "asked by", "pieces", "CPU ms", "of httpx"],
        [
            f"process_time, the best of {_ROUNDS} rounds of {_REPLIES} replies, {_IN_FLIGHT} in flight, to a "
            f"prompt of {len(_PROMPT):,} ids; the engine is the mock.",
            f"Whole: nobody reads along, so {STREAM_INTERVAL} tokens come in an event; our engine reads them at the "
            "end. A token a ms: each comes alone.",
        ],
    )
    for reply, pause_s, whole in (
        ("whole, at once", 0.0, True),
        ("whole, an event a ms", _PACE_S, True),
        ("streamed, at once", 0.0, False),
        ("streamed, a token a ms", _PACE_S, False),
    ):
        found = asyncio.run(_measure(pause_s, whole))
        for name, one in found.items():
            share = one.cpu_s / found["httpx"].cpu_s
            report.add_row(reply, name, f"{one.pieces:.0f}", format_ms(one.cpu_s), f"{share:.2f}")
    return report


async def _measure(pause_s: float, whole: bool) -> dict[str, EngineCost]:
    ids = list(range(2000, 2000 + REPLY_TOKENS))
    options = MockOptions(ids, [f"token{one}" for one in ids], [], pause_s=pause_s)
    params = SamplingParams(flush_s=BUFFERED_FLUSH_S if whole else 0.0)
    async with server_process("mock_vllm", msgspec.to_builtins(options)) as mock, httpx.AsyncClient() as client:
        engine, other = VllmEngine(mock.url, model="mock"), VllmEngine(mock.url, model="mock")
        asks: dict[str, RequestFunction] = {
            "httpx": lambda: _by_httpx(client, mock.url, STREAM_INTERVAL if whole else 1),
            "our engine": lambda: _by_engine(engine, params),
            "our engine, as a replica": lambda: _by_engine(replicas, params),
        }
        replicas = Replicas([other])
        found = {name: EngineCost() for name in asks}
        for _ in range(_ROUNDS):
            for name, ask in asks.items():
                cpu_s, pieces = await _round(ask)
                found[name] = min(found[name], EngineCost(cpu_s, pieces), key=lambda one: one.cpu_s)
        await engine.close()
        await replicas.close()
    return found


async def _round(ask: RequestFunction) -> tuple[float, float]:
    await ask()
    places = iter(range(_REPLIES))
    pieces = 0

    async def work() -> None:
        nonlocal pieces
        for _ in places:
            came = await ask()
            pieces += came

    start = time.process_time()
    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
    return (time.process_time() - start) / _REPLIES, pieces / _REPLIES


async def _by_engine(engine: Engine, params: SamplingParams) -> int:
    chunks = [chunk async for chunk in engine.generate(_PROMPT, params)]
    assert sum(len(chunk.ids) for chunk in chunks) == REPLY_TOKENS
    return len(chunks)


async def _by_httpx(client: httpx.AsyncClient, url: str, interval: int) -> int:
    asked = {"prompt": _PROMPT.tolist(), "stream": True, "stream_interval": interval}
    body = msgspec.json.encode(asked)
    read, ids, pieces = msgspec.json.Decoder(VllmEvent).decode, 0, 0
    async with client.stream("POST", f"{url}/v1/completions", content=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids += sum(len(choice.token_ids or ()) for choice in read(line[6:]).choices or ())
                pieces += 1
    assert ids == REPLY_TOKENS
    return pieces
