"""A generation that outlives the requests it is made of: paused, moved, continued behind its own ids.

`Progress` keeps what was emitted, so that the next request asks for exactly the rest: a chunk that was
handed out is never asked for again, and one that was not is sampled anew. `Pump` reads a stream in a task
of its own, so that it can be cut between any two chunks without its consumer's help.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import numpy as np

from branchline.core.errors import EngineError
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, Finish, SamplingParams


class Progress:
    """What a generation has emitted, and what is left to ask for.

    Penalties that count the output alone do not see the ids before a continuation; those that count
    prompt and output (`repetition_penalty`) do.
    """

    def __init__(self, prompt_ids: Ids, params: SamplingParams) -> None:
        self._parts = [prompt_ids]
        self._params = params
        self.produced = 0
        self.version: int | None = None

    def add(self, chunk: Chunk) -> None:
        if len(chunk.ids):
            self._parts.append(chunk.ids)
            self.produced += len(chunk.ids)
        self.version = chunk.version

    @property
    def prompt_ids(self) -> Ids:
        """What to go on behind."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    @property
    def params(self) -> SamplingParams:
        """What is left to ask for. Raises EngineError where an engine cannot be asked for the rest.

        A grammar and stop texts are matched against a request's own output: asked behind half of it, an
        engine would begin the grammar again, or miss a stop text that was half said.
        """
        if not self.produced:
            return self._params
        if self._params.grammar is not None:
            raise EngineError(f"cannot go on behind {self.produced} ids: the grammar would begin again")
        if self._params.stop:
            raise EngineError(f"cannot go on behind {self.produced} ids: a stop text may be half said")
        return self._params.continued(self.produced)

    @property
    def finish(self) -> Finish | None:
        """Why nothing is left to ask for, where an engine was cut before it could say so."""
        if self.produced and int(self._parts[-1][-1]) in self._params.stop_ids:
            return "stop"
        return "length" if self.produced >= self._params.max_tokens else None

    def end(self, finish: Finish, version: int) -> Chunk:
        """The last chunk of a generation whose engine did not say it."""
        return Chunk(version=version if self.version is None else self.version, finish=finish)


class Pump:
    """Iterates a stream ahead of its consumer. What was read before a cut is still handed out.

    A stream that ends with neither a finish reason nor a cut raises EngineError.
    """

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._chunks: deque[Chunk] = deque()
        self._arrived = asyncio.Event()
        self._cut = False
        self._task = asyncio.create_task(self._read(stream))
        self._task.add_done_callback(lambda _: self._arrived.set())

    async def _read(self, stream: AsyncIterator[Chunk]) -> None:
        finished = False
        try:
            async for chunk in stream:
                finished = chunk.finish is not None
                self._chunks.append(chunk)
                self._arrived.set()
        finally:
            # Closing the stream is what aborts; not every async iterator can be closed.
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        if not finished:
            raise EngineError("the stream ended before its generation did")

    async def cut(self) -> None:
        """Stops reading and closes the stream; returns when it is closed."""
        if not self._task.done():
            self._cut = True
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # Seen: asyncio does not report it as never retrieved.

    def __aiter__(self) -> Pump:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._task.done():
                if not self._cut:
                    self._task.result()
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._chunks.popleft()
