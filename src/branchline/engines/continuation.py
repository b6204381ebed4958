"""A generation that is made of several requests: paused, moved to another replica, continued after its ids.

`remaining_request` returns the request for exactly the rest: a token that was yielded is never sampled again.
`CancellableStream` lets other code end a stream between two chunks, without a task or a queue between the
stream and its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams


def remaining_request(
    prompt_ids: Ids, params: SamplingParams, yielded: Sequence[Chunk], version: int
) -> tuple[Ids, SamplingParams] | Chunk:
    """Returns the prompt and the parameters of the request that continues a generation after the chunks that
    it has yielded. If no token is left to sample, returns the final chunk, which the engine did not report;
    `version` is its version if nothing was yielded.

    Raises EngineError if a grammar prevents a continuation: an engine matches it against the output of one
    request, and would begin again. Penalties on the output alone do not count tokens from before a
    continuation; `repetition_penalty` counts prompt and output and so includes them.
    """
    ids = np.concatenate([prompt_ids, *[chunk.ids for chunk in yielded]]) if yielded else prompt_ids
    produced = len(ids) - len(prompt_ids)
    version = yielded[-1].version if yielded else version
    if produced and int(ids[-1]) in params.stop_ids:
        return Chunk(version=version, finish_reason="stop")
    if produced >= params.max_tokens:
        return Chunk(version=version, finish_reason="length")
    if not produced:
        return prompt_ids, params
    if params.grammar is not None:
        raise EngineError(f"cannot continue after {produced} ids: the grammar would begin again")
    return ids, params.for_continuation(produced)


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
