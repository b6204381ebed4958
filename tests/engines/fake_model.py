"""A model whose next id depends on all ids so far, and helpers that read streams.

A continuation after the right ids gives what one request would have given; after any other ids it does not.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.http import HttpEngine

PROMPT = as_ids([5, 6, 7])
EOS = 2


def next_token(ids: list[int], weights: int = 0) -> tuple[int, float]:
    """The id that follows these, and its logprob."""
    mixed = zlib.crc32(np.array([weights, *ids], np.int32).tobytes())
    return 100 + mixed % 50_000, -(mixed % 9973) / 1000


def continuation(prompt: Ids | list[int], count: int, weights: int = 0) -> tuple[list[int], list[float]]:
    """The ids and logprobs that the model samples after a prompt."""
    ids = [int(id_) for id_ in prompt]
    logprobs = []
    for _ in range(count):
        token, logprob = next_token(ids, weights)
        ids.append(token)
        logprobs.append(logprob)
    return ids[len(prompt) :], logprobs


def params(count: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


async def round_trip(engine: HttpEngine) -> None:
    """Everything sent before this has arrived when it returns."""
    await engine.client.post_control("/nothing")


async def collect(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def take_tokens(stream: AsyncIterator[Chunk], count: int) -> list[Chunk]:
    """Reads chunks until they hold this many ids."""
    chunks: list[Chunk] = []
    while len(ids_of(chunks)) < count:
        chunks.append(await anext(stream))
    return chunks


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [int(id_) for chunk in chunks for id_ in chunk.ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [float(value) for chunk in chunks if chunk.logprobs is not None for value in chunk.logprobs]


def versions_of(chunks: list[Chunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.ids]


def float32(values: list[float]) -> list[float]:
    return [float(np.float32(value)) for value in values]


def assert_sampled_by(chunks: list[Chunk], prompt: list[int] | None = None) -> None:
    """Every id is the one that the weights of its version sample after the ids before it."""
    ids = PROMPT.tolist() if prompt is None else list(prompt)
    for sampled, version in zip(ids_of(chunks), versions_of(chunks), strict=True):
        assert sampled == next_token(ids, version)[0]
        ids.append(sampled)
