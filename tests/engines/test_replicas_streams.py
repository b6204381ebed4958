from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Chunk, Engine
from branchline.engines.replica_pool import CancellableStream
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import PROMPT, collect, continuation, float32, ids_of, logprobs_of, params
from tests.engines.manual_clock import run_with_frozen_clock
from tests.engines.replica_servers import replica_servers


@pytest.mark.parametrize("flush_s", [0, 60])
@pytest.mark.parametrize("dies_after", range(9))
def test_call_of_a_dead_replica_continues_on_another(dies_after: int, flush_s: float) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].die_after = dies_after
            engine: Engine = replicas
            chunks = await collect(engine.generate(PROMPT, params(8, flush_s=flush_s), session="s"))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            if dies_after < 8:
                (rest,) = servers[1].bodies
                # Tokens that the server sent and we did not read before it died are sampled again.
                produced = len(rest["prompt"]) - len(PROMPT)
                assert produced <= dies_after
                assert rest["prompt"] == [*PROMPT, *ids[:produced]]
                assert rest["max_tokens"] == 8 - produced
                assert chunks[-1].num_preempted == int(produced > 0)
                assert replicas.unavailable == ("0",)

    run_with_frozen_clock(main())


@settings(max_examples=40, deadline=None)
@given(
    deaths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    ids_per_event=st.integers(1, 3),
    flush_s=st.sampled_from([0, 60]),
)
def test_any_number_of_failures_loses_and_repeats_no_token(
    deaths: list[int], ids_per_event: int, flush_s: float
) -> None:
    async def main() -> None:
        async with replica_servers(len(deaths) + 1) as (replicas, servers):
            for server, death in zip(servers, deaths, strict=False):
                server.die_after, server.ids_per_event = death, ids_per_event
            chunks = await collect(replicas.generate(PROMPT, params(12, flush_s=flush_s)))
            assert ids_of(chunks) == continuation(PROMPT, 12)[0]
            assert len(logprobs_of(chunks)) == 12

    run_with_frozen_clock(main())


def test_yielded_stop_id_ends_a_call_whose_replica_failed() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            ids, _ = continuation(PROMPT, 3)

            class SilentEngine(VllmEngine):
                """Ends every stream without a finish reason."""

                async def generate(self, *args: Any, **more: Any) -> Any:
                    async for chunk in super().generate(*args, **more):
                        yield type(chunk)(chunk.ids, chunk.logprobs, 6)

            await replicas.remove("0")
            await replicas.remove("1")
            await replicas.add(SilentEngine(servers[0].url))
            chunks = await collect(replicas.generate(PROMPT, params(9, stop_ids=(ids[-1],))))
            assert ids_of(chunks) == ids
            assert (chunks[-1].finish_reason, chunks[-1].version) == ("stop", 6)
            chunks = await collect(replicas.generate(PROMPT, params(2)))
            assert (ids_of(chunks), chunks[-1].finish_reason) == (ids[:2], "length")

    run_with_frozen_clock(main())


class QueuedStream:
    """A stream of the chunks in a queue; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.is_waiting = asyncio.Event()
        self.closed = False

    async def stream(self) -> AsyncGenerator[Chunk, None]:
        try:
            while True:
                self.is_waiting.set()
                chunk = await self.queue.get()
                if chunk is None:
                    return
                yield chunk
        finally:
            self.closed = True


ONE = Chunk(as_ids([1]))
LAST = Chunk(as_ids([2]), finish_reason="stop")


def test_cancel_ends_the_stream_and_not_its_consumer() -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        source.queue.put_nowait(ONE)
        assert await anext(stream) is ONE
        source.is_waiting.clear()
        reading = asyncio.create_task(collect(stream))
        await source.is_waiting.wait()
        stream.cancel()
        stream.cancel()
        assert await reading == []
        assert reading.cancelling() == 0
        assert source.closed
        await stream.aclose()

    run_with_frozen_clock(main())


def test_cancel_between_two_reads_ends_the_stream_at_the_next() -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        source.queue.put_nowait(ONE)
        assert await anext(stream) is ONE
        stream.cancel()
        assert await collect(stream) == []
        assert not source.closed
        await stream.aclose()
        assert source.closed

    run_with_frozen_clock(main())


@pytest.mark.parametrize("first", ["stream", "consumer"])
def test_consumer_that_is_cancelled_together_with_its_stream_is_cancelled(first: str) -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        reading = asyncio.create_task(collect(stream))
        await source.is_waiting.wait()
        if first == "consumer":
            reading.cancel()
        stream.cancel()
        if first == "stream":
            reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reading.cancelling() == 1
        await stream.aclose()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("first", ["chunk", "cancel"])
def test_cancel_at_the_same_time_as_a_chunk_does_not_cancel_the_consumer(first: str) -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        reading = asyncio.create_task(collect(stream))
        await source.is_waiting.wait()
        if first == "chunk":
            source.queue.put_nowait(ONE)
        stream.cancel()
        if first == "cancel":
            source.queue.put_nowait(ONE)
        assert await reading == []
        assert reading.cancelling() == 0

    run_with_frozen_clock(main())


def test_stream_that_ends_without_a_finish_reason_is_an_error() -> None:
    async def main() -> None:
        source = QueuedStream()
        for chunk in (ONE, None):
            source.queue.put_nowait(chunk)
        stream = CancellableStream(source.stream())
        assert await anext(stream) is ONE
        with pytest.raises(EngineError, match="ended before its generation did"):
            await anext(stream)
        source = QueuedStream()
        for chunk in (ONE, LAST, None):
            source.queue.put_nowait(chunk)
        assert await collect(CancellableStream(source.stream())) == [ONE, LAST]

    run_with_frozen_clock(main())
