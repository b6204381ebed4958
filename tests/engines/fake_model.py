"""A model whose next id depends on all ids so far, and what tests ask of streams.

So a continuation behind the right ids gives what one request would have given, and nothing else does.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np

from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.http import HttpEngine

PROMPT = as_ids([5, 6, 7])
EOS = 2
TEST_TIMEOUT_S = 10.0
"""How long a test waits before it fails; nothing waits for time to pass."""


def next_token(ids: list[int], weights: int = 0) -> tuple[int, float]:
    """The next id behind these, and its logprob."""
    mixed = zlib.crc32(np.array([weights, *ids], np.int32).tobytes())
    return 100 + mixed % 50_000, -(mixed % 9973) / 1000


def continuation(prompt: Ids | list[int], count: int, weights: int = 0) -> tuple[list[int], list[float]]:
    ids = [int(one) for one in prompt]
    logprobs = []
    for _ in range(count):
        token, logprob = next_token(ids, weights)
        ids.append(token)
        logprobs.append(logprob)
    return ids[len(prompt) :], logprobs


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, TEST_TIMEOUT_S))


def params(count: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


async def round_trip(engine: HttpEngine) -> None:
    """Whatever could have been sent before this has arrived after it."""
    await engine.client.post_control("/nothing")


async def collect(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def take_tokens(stream: AsyncIterator[Chunk], count: int) -> list[Chunk]:
    """Chunks with so many ids together: what arrives at the same time may be one chunk."""
    chunks: list[Chunk] = []
    while len(ids_of(chunks)) < count:
        chunks.append(await anext(stream))
    return chunks


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [int(one) for chunk in chunks for one in chunk.ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [float(one) for chunk in chunks if chunk.logprobs is not None for one in chunk.logprobs]


def versions_of(chunks: list[Chunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.ids]


def float32(values: list[float]) -> list[float]:
    return [float(np.float32(value)) for value in values]


def assert_sampled_by(chunks: list[Chunk], prompt: list[int] | None = None) -> None:
    """Every id is what the weights of its version sample behind the ids before it."""
    ids = [int(one) for one in PROMPT] if prompt is None else list(prompt)
    for one, version in zip(ids_of(chunks), versions_of(chunks), strict=True):
        assert one == next_token(ids, version)[0]
        ids.append(one)
