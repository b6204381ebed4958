"""A generation that is made of several requests: paused, moved to another replica, continued after its ids.

`GenerationState` holds what was yielded, so that the next request asks for exactly the rest: a token that was
yielded is never sampled again. `CancellableStream` lets other code end a stream between two chunks, without a
task or a queue between the stream and its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, FinishReason, SamplingParams


class GenerationState:
    """What a generation has yielded, and the request for the rest.

    Penalties on the output alone do not count tokens from before a continuation; `repetition_penalty` counts
    prompt and output and so includes them.
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
        """The prompt and all ids yielded so far."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    @property
    def remaining_params(self) -> SamplingParams:
        """The parameters of the next request. Raises EngineError if a grammar prevents a continuation: an
        engine matches it against the output of one request, and would begin again."""
        if not self.produced:
            return self._params
        if self._params.grammar is not None:
            raise EngineError(f"cannot continue after {self.produced} ids: the grammar would begin again")
        return self._params.for_continuation(self.produced)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why no token is left to sample, for an engine that was stopped before it reported it."""
        if self.produced and int(self._parts[-1][-1]) in self._params.stop_ids:
            return "stop"
        return "length" if self.produced >= self._params.max_tokens else None

    def final_chunk(self, finish_reason: FinishReason, version: int) -> Chunk:
        """The last chunk of a generation whose engine did not report its end."""
        version = version if self.version is None else self.version
        return Chunk(version=version, finish_reason=finish_reason)


class CancellableStream:
    """A stream that is read in its consumer's task, and that other code can end while the consumer waits.

    `cancel` cancels the wait and not the task: to the consumer the stream has ended. A stream that ends
    without a finish reason and without `cancel` raises EngineError.
    """

    def __init__(self, stream: AsyncGenerator[Chunk, None]) -> None:
        self._stream = stream
        self._is_cancelled = self._is_finished = False
        self._waiting_task: asyncio.Task[Any] | None = None
        self._cancelled_task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Ends the stream after the chunks it has yielded; its consumer closes it."""
        if not self._is_cancelled:
            self._is_cancelled, self._cancelled_task = True, self._waiting_task
            if self._cancelled_task is not None:
                self._cancelled_task.cancel()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> CancellableStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_cancelled:
            raise StopAsyncIteration
        self._waiting_task = task = asyncio.current_task()
        assert task is not None, "streams are read in tasks"
        cancelling = task.cancelling()
        try:
            chunk = await anext(self._stream)
        except StopAsyncIteration:
            if not self._is_finished:
                raise EngineError("the stream ended before its generation did") from None
            raise
        except asyncio.CancelledError:
            # The stream ends, unless the consumer's task was cancelled as well.
            if self._cancelled_task is not None and task.cancelling() <= cancelling + 1:
                raise StopAsyncIteration from None
            raise
        finally:
            self._waiting_task = None
            if self._cancelled_task is not None:
                self._cancelled_task.uncancel()
        self._is_finished = chunk.finish_reason is not None
        return chunk
