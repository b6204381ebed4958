"""A consumer that hears: what it was told and what it was given, in the order it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from branchline.engines.base import Chunk, Tokens
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeVllm
from tests.engines.model import PROMPT, continuation, ids_of, params
from tests.engines.wire import HEAD, Line, ticks

URL = "http://127.0.0.1:1"
"""Of a `Line`: nothing is asked of it."""
IDS, _ = continuation(PROMPT, 9)
"""What is sampled in a scene."""


class Consumer:
    """Takes what it hears, unless its answers say otherwise; the answers begin again at their end."""

    def __init__(self, answers: Iterable[bool] = (), rests: Iterable[int] = ()) -> None:
        self.got: list[Chunk] = []
        """All of it, heard or given."""
        self.heard: list[Tokens] = []
        self.told: list[Tokens] = []
        """What it took, and what it did not."""
        self.given: list[Chunk] = []
        self.left: list[Chunk] = []
        self._answers = list(answers) or [True]
        self._rests = list(rests) or [0]
        """How long it does something else before it waits again."""
        self._waits = False

    def hear(self, tokens: Tokens) -> bool:
        assert self._waits, "told while it did not wait"
        is_taken = self._answers[len(self.told) % len(self._answers)]
        self.told.append(tokens)
        if is_taken:
            self.heard.append(tokens)
            self.got.append(tokens.chunk())
        return is_taken

    def leave(self, chunk: Chunk) -> None:
        self.left.append(chunk)
        self.got.append(chunk)

    async def next(self, stream: AsyncIterator[Chunk]) -> Chunk:
        self._waits = True
        try:
            chunk = await anext(stream)
        finally:
            self._waits = False
        self.given.append(chunk)
        self.got.append(chunk)
        return chunk

    async def follow(self, stream: AsyncIterator[Chunk]) -> None:
        """To the end: the first chunk with a finish reason, and nothing behind it."""
        while (await self.next(stream)).finish is None:
            await ticks(self._rests[len(self.given) % len(self._rests)])
        async for chunk in stream:
            raise AssertionError(f"behind the last chunk came {chunk}")

    @property
    def heard_ids(self) -> list[list[int]]:
        return [tokens.ids for tokens in self.heard]

    @property
    def given_ids(self) -> list[list[int]]:
        return [ids_of([chunk]) for chunk in self.given]


class Scene:
    """A consumer that follows an answer of nine events, one id each; its head has arrived."""

    def __init__(self, line: Line, engine: VllmEngine, consumer: Consumer, **more: Any) -> None:
        self.line, self.engine, self.consumer = line, engine, consumer
        more = {"hear": consumer.hear, "left": consumer.leave, **more}
        self.stream = engine.generate(PROMPT, params(9, **more))
        self.events: list[bytes] = []

    async def begin(self) -> asyncio.Task[None]:
        return await self._answered(asyncio.create_task(self.consumer.follow(self.stream)))

    async def begin_with_one(self) -> asyncio.Task[Any]:
        return await self._answered(asyncio.create_task(self.consumer.next(self.stream)))

    async def _answered(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self.events = await self.line.asked()
        self.line.arrive(HEAD)
        return task


@asynccontextmanager
async def scene(*answers: bool, **more: Any) -> AsyncGenerator[Scene, None]:
    engine = VllmEngine(URL)
    yield Scene(Line(FakeVllm()), engine, Consumer(answers), **more)
    await engine.close()
