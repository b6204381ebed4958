from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Chunk, Engine, Tokens
from branchline.engines.continuation import CancellableStream, GenerationState
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import PROMPT, collect, continuation, float32, ids_of, logprobs_of, params, run
from tests.engines.fake_servers import FakeVllm
from tests.engines.fake_transport import HEAD, InMemoryServer, yield_to_loop
from tests.engines.hearing import IDS, URL, Consumer
from tests.engines.replica_servers import replica_servers


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dies_after", range(9))
def test_a_call_of_a_dead_replica_goes_on_elsewhere_as_if_nothing_had_been(
    dies_after: int, whole: bool
) -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            servers[0].die_after = dies_after
            engine: Engine = replicas
            chunks = await collect(engine.generate(PROMPT, params(8, whole=whole), session="s"))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            if dies_after < 8:
                (rest,) = servers[1].bodies
                # What the server sent and we did not read before it died is sampled again.
                produced = len(rest["prompt"]) - len(PROMPT)
                assert produced <= dies_after
                assert rest["prompt"] == [*PROMPT, *ids[:produced]]
                assert rest["max_tokens"] == 8 - produced
                assert replicas.failing == ("0",)

    run(main())


@settings(max_examples=40, deadline=None)
@given(
    deaths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    per_event=st.integers(1, 3),
    whole=st.booleans(),
)
def test_any_number_of_deaths_loses_and_repeats_nothing(
    deaths: list[int], per_event: int, whole: bool
) -> None:
    async def main() -> None:
        async with replica_servers(len(deaths) + 1) as (replicas, servers):
            for server, death in zip(servers, deaths, strict=False):
                server.die_after, server.ids_per_event = death, per_event
            chunks = await collect(replicas.generate(PROMPT, params(12, whole=whole)))
            assert ids_of(chunks) == continuation(PROMPT, 12)[0]
            assert len(logprobs_of(chunks)) == 12

    run(main())


def test_a_stop_id_that_was_handed_out_ends_a_call_even_if_its_replica_died() -> None:
    async def main() -> None:
        async with replica_servers(2) as (replicas, servers):
            ids, _ = continuation(PROMPT, 3)

            class Forgetful(VllmEngine):
                """Ends every stream without saying that it ended."""

                async def generate(self, *args: Any, **more: Any) -> Any:
                    async for chunk in super().generate(*args, **more):
                        yield type(chunk)(chunk.ids, chunk.logprobs, 6)

            await replicas.remove("0")
            await replicas.remove("1")
            await replicas.add(Forgetful(servers[0].url))
            chunks = await collect(replicas.generate(PROMPT, params(9, stop_ids=(ids[-1],))))
            assert ids_of(chunks) == ids
            assert (chunks[-1].finish_reason, chunks[-1].version) == ("stop", 6)
            chunks = await collect(replicas.generate(PROMPT, params(2)))
            assert (ids_of(chunks), chunks[-1].finish_reason) == (ids[:2], "length")

    run(main())


class QueuedStream:
    """A stream that gives what it is told to give."""

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


def test_a_cut_ends_the_stream_and_not_its_consumer() -> None:
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
        await stream.close()

    run(main())


def test_a_cut_between_two_reads_ends_the_stream_at_the_next() -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        source.queue.put_nowait(ONE)
        assert await anext(stream) is ONE
        stream.cancel()
        assert await collect(stream) == []
        assert not source.closed
        await stream.close()
        assert source.closed

    run(main())


@pytest.mark.parametrize("first", ["cut", "cancel"])
def test_a_consumer_that_is_cancelled_while_its_stream_is_cut_is_cancelled(first: str) -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        reading = asyncio.create_task(collect(stream))
        await source.is_waiting.wait()
        if first == "cancel":
            reading.cancel()
        stream.cancel()
        if first == "cut":
            reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reading.cancelling() == 1
        await stream.close()

    run(main())


@pytest.mark.parametrize("first", ["arrival", "cut"])
def test_a_cut_at_the_moment_of_an_arrival_leaves_no_trace_in_the_consumer(first: str) -> None:
    async def main() -> None:
        source = QueuedStream()
        stream = CancellableStream(source.stream())
        reading = asyncio.create_task(collect(stream))
        await source.is_waiting.wait()
        if first == "arrival":
            source.queue.put_nowait(ONE)
        stream.cancel()
        if first == "cut":
            source.queue.put_nowait(ONE)
        assert await reading == []
        assert reading.cancelling() == 0

    run(main())


def test_a_stream_that_ends_without_a_finish_is_an_error() -> None:
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

    run(main())


def test_what_was_heard_stands_in_its_place_among_what_was_given() -> None:
    told: list[Tokens] = []

    def hear(tokens: Tokens) -> bool:
        told.append(tokens)
        return tokens.ids != [13]

    asked = params(6, hear=hear, stop_ids=(16,))
    progress = GenerationState(PROMPT, asked)
    assert progress.hear is not None
    assert progress.hear(Tokens([10], [-0.5], 3))
    assert progress.hear(Tokens([11, 12], [-0.5, -0.5], 4))
    assert not progress.hear(Tokens([13], [-0.5], 5)), "comes again as a chunk"
    assert (progress.produced, progress.version) == (3, 4)
    progress.add(Chunk(as_ids([13]), version=5))
    assert progress.hear(Tokens([14], [-0.5], 6))
    assert progress.prompt_ids.tolist() == [*PROMPT, 10, 11, 12, 13, 14]
    assert (progress.remaining_params, progress.finish_reason) == (asked.for_continuation(5), None)
    assert progress.hear(Tokens([16], [-0.5], 7))
    assert (progress.finish_reason, progress.final_chunk("stop", 9)) == (
        "stop",
        Chunk(version=7, finish_reason="stop"),
    )
    assert len(told) == 5


def test_as_many_as_were_asked_for_are_enough_though_they_were_only_heard() -> None:
    progress = GenerationState(PROMPT, params(2, hear=lambda _: True))
    assert progress.hear is not None
    assert progress.hear(Tokens([10, 11], [-0.5, -0.5], 0))
    assert progress.finish_reason == "length"
    assert GenerationState(PROMPT, params(2)).hear is None


def test_a_hearer_that_failed_has_heard_nothing() -> None:
    error = ValueError("deaf")

    def hear(_: Tokens) -> bool:
        raise error

    progress = GenerationState(PROMPT, params(2, hear=hear))
    assert progress.hear is not None
    with pytest.raises(ValueError, match="deaf"):
        progress.hear(Tokens([10], [-0.5], 0))
    assert (progress.fault, progress.produced, progress.prompt_ids.tolist()) == (error, 0, PROMPT.tolist())


@pytest.mark.parametrize("answers", [[True], [False], [True, False], [False, True]])
@pytest.mark.parametrize("wait", range(4))
def test_a_cut_loses_nothing_that_was_heard_or_had_arrived(answers: list[bool], wait: int) -> None:
    async def main() -> None:
        line = InMemoryServer(FakeVllm())
        engine, consumer = VllmEngine(URL), Consumer(answers)
        stream = CancellableStream(
            engine.generate(PROMPT, params(9, hear=consumer.hear, left=consumer.leave))
        )

        async def read() -> None:
            with suppress(StopAsyncIteration):
                while True:
                    await consumer.next(stream)
            await stream.close()

        task = asyncio.create_task(read())
        events = await line.next_request_events()
        line.send(HEAD)
        line.send_chunks(*events[:2])
        await yield_to_loop(wait)
        line.send_chunks(*events[2:4])
        stream.cancel()
        line.send_chunks(events[4])
        await task
        assert ids_of(consumer.got) == IDS[:5]
        assert task.cancelling() == 0
        assert line.is_closed
        await engine.close()

    run(main())
