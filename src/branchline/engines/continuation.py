"""A generation that outlives the requests it is made of: paused, moved, continued behind its own ids.

`Progress` keeps what was emitted, so that the next request asks for exactly the rest: a chunk that was
handed out is never asked for again, and one that was not is sampled anew. `Cuttable` lets somebody else end
a stream between any two chunks, without a task or a queue between it and its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, FinishReason, SamplingParams


class GenerationState:
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
    def remaining_params(self) -> SamplingParams:
        """What is left to ask for. Raises EngineError where an engine cannot be asked for the rest.

        A grammar and stop texts are matched against a request's own output: asked behind half of it, an
        engine would begin the grammar again, or miss a stop text that was half said.
        """
        if not self.produced:
            return self._params
        if self._params.grammar is not None:
            raise EngineError(f"cannot go on behind {self.produced} ids: the grammar would begin again")
        return self._params.for_continuation(self.produced)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why nothing is left to ask for, where an engine was cut before it could say so."""
        if self.produced and int(self._parts[-1][-1]) in self._params.stop_ids:
            return "stop"
        return "length" if self.produced >= self._params.max_tokens else None

    def final_chunk(self, finish: FinishReason, version: int) -> Chunk:
        """The last chunk of a generation whose engine did not say it."""
        return Chunk(version=version if self.version is None else self.version, finish_reason=finish)


class CancellableStream:
    """A stream that is read in its consumer's own task, and can be cut from outside while it is waited for.

    Who cuts cancels the wait, not the task: the consumer finds its stream ended. A stream that ends with
    neither a finish reason nor a cut raises EngineError.
    """

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._stream = stream
        self._is_cancelled = self._is_finished = False
        self._waiting_task: asyncio.Task[Any] | None = None
        self._cancelled_task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Ends the stream where it is; its consumer closes it."""
        if not self._is_cancelled:
            self._is_cancelled, self._cancelled_task = True, self._waiting_task
            if self._cancelled_task is not None:
                self._cancelled_task.cancel()

    async def close(self) -> None:
        """Closing is what aborts; not every async iterator can be closed."""
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()

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
            # By the cut alone, or by the consumer's own wish too?
            if self._cancelled_task is not None and task.cancelling() <= cancelling + 1:
                raise StopAsyncIteration from None
            raise
        finally:
            self._waiting_task = None
            if self._cancelled_task is not None:
                self._cancelled_task.uncancel()
        self._is_finished = chunk.finish_reason is not None
        return chunk
