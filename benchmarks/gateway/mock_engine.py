"""Precomputed replies, and an engine that returns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from random import Random

import msgspec
import numpy as np

from benchmarks.codec.conversations import AGENT, MessageWriter
from branchline import Message
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, LogprobKind, SamplingParams
from branchline.testing.reply_encoder import TemplateReplyEncoder

REPLY_TOKENS = 300
LOGPROB = -0.25
STREAMED = "stream-"
"""Sessions with this name prefix get one token per chunk, all others one chunk per reply."""


class MockOptions(msgspec.Struct, frozen=True):
    """The responses of the HTTP mock."""

    ids: list[int]
    texts: list[str]
    """The text of each id."""
    prompt_ids: list[int]
    is_old: bool = False
    """Ignores `stream_interval`, as vLLM before 0.27.0: always one token per event."""
    pause_s: float = 0.0
    """Pause between two events of a stream; 0: none."""


class MockEngine:
    """Returns the same replies to each session in turn, at once."""

    name = "mock"
    version = 0
    logprob_kind: LogprobKind = "raw"
    logprobs_after_truncation: bool | None = True
    greedy_logprob_temperature: float | None = 1.0
    max_context: int | None = None
    supports_images = False
    supported_fields: frozenset[str] = frozenset()
    constrains_raw_logprobs: bool = False

    def __init__(self, replies: Sequence[Ids]) -> None:
        self._replies = replies
        self._calls: Counter[str] = Counter()

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        reply = self._replies[self._calls[session] % len(self._replies)]
        self._calls[session] += 1
        size = 1 if session.startswith(STREAMED) else len(reply)
        for start in range(0, len(reply), size):
            part = reply[start : start + size]
            is_last = start + size >= len(reply)
            yield Chunk(part, np.full(len(part), LOGPROB, np.float32), 0, "stop" if is_last else None)

    async def ready(self) -> None: ...

    def release_session(self, session: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self, version: int | None = None) -> None: ...

    async def close(self) -> None: ...


def plain_reply(codec: GenericCodec) -> Ids:
    """A plain text reply of REPLY_TOKENS tokens, the stop token included."""
    text = Message("assistant", MessageWriter(AGENT, seed=0).user(2 * REPLY_TOKENS).content)
    ids = TemplateReplyEncoder(codec, Random(0), vary_tokenization=False).encode_reply(text)
    return np.concatenate((ids[: REPLY_TOKENS - 1], ids[-1:]))


def agent_replies(codec: GenericCodec, count: int, seed: int = 0) -> list[Ids]:
    """An agent's replies: mostly a sentence and a tool call, sometimes only a sentence."""
    writer = MessageWriter(AGENT, seed)
    encoder = TemplateReplyEncoder(codec, Random(seed), vary_tokenization=False)
    every = AGENT.user_every
    return [encoder.encode_reply(writer.reply(calls=turn % every > 0)) for turn in range(1, count + 1)]
