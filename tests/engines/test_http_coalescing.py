"""Tokens are coalesced by time: the first chunk and the end at once, then one chunk per `flush_s`.

The server is in memory and the clock is moved by hand, so each test decides what arrives and when.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.engines.base import Chunk
from branchline.engines.http import EngineRequest, HttpEngine
from branchline.engines.sglang import SglangEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    PROMPT,
    assert_sampled_by,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    versions_of,
)
from tests.engines.fake_servers import FakeServer, FakeSglang, FakeVllm
from tests.engines.fake_transport import END, HEAD, InMemoryServer, chunked_body, sse_event
from tests.engines.manual_clock import advance, run_with_frozen_clock, yield_to_loop

URL = "http://host:1"
FLUSH_S = 10.0
COUNT = 9
IDS, LOGPROBS = continuation(PROMPT, COUNT)
INVALID = sse_event({"choices": [{"token_ids": [1]}]})
"""An id without its logprob."""


class IncrementalSglang(FakeSglang):
    incremental = True


KINDS: list[tuple[Callable[..., HttpEngine], type[FakeServer]]] = [
    (VllmEngine, FakeVllm),
    (SglangEngine, FakeSglang),
    (SglangEngine, IncrementalSglang),
]


class Generation:
    """A generation whose chunks are collected by a task as they are yielded."""

    def __init__(
        self, engine: Callable[..., HttpEngine] = VllmEngine, server: type[FakeServer] = FakeVllm, **more: Any
    ) -> None:
        self.server = InMemoryServer(server())
        self.engine = engine(URL)
        self.chunks: list[Chunk] = []
        self.stream = self.engine.generate(PROMPT, params(COUNT, **{"flush_s": FLUSH_S, **more}))
        self.task = asyncio.create_task(self._collect())
        self.events: list[bytes] = []

    async def begin(self) -> Generation:
        """Waits for the request, and sends the head of its response."""
        self.events = await self.server.next_request_events()
        self.server.send(HEAD)
        return self

    async def send(self, *pieces: bytes) -> None:
        self.server.send_chunks(*pieces)
        await yield_to_loop()

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each chunk so far."""
        return [chunk.ids.tolist() for chunk in self.chunks]

    async def _collect(self) -> None:
        async for chunk in self.stream:
            self.chunks.append(chunk)


def test_first_chunk_comes_at_once_and_later_tokens_once_per_interval() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        assert generation.ids == [IDS[:1]]
        for event in generation.events[1:4]:
            await generation.send(event)
        await advance(FLUSH_S - 1)
        assert generation.ids == [IDS[:1]]
        await advance(1)
        assert generation.ids == [IDS[:1], IDS[1:4]]
        await generation.send(generation.events[4])
        await advance(FLUSH_S - 1)
        assert len(generation.ids) == 2
        await advance(1)
        assert generation.ids == [IDS[:1], IDS[1:4], IDS[4:5]]
        await generation.engine.close()
        with pytest.raises(EngineError):
            await generation.task

    run_with_frozen_clock(main())


def test_token_that_arrives_after_the_interval_is_yielded_at_once() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        await advance(FLUSH_S + 1)
        await generation.send(generation.events[1])
        assert generation.ids == [IDS[:1], IDS[1:2]]
        await generation.engine.close()
        with pytest.raises(EngineError):
            await generation.task

    run_with_frozen_clock(main())


def test_interval_counts_from_the_last_chunk_and_not_from_the_last_read() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        first, second, *_ = generation.events
        await generation.send(b": a comment\n\n")
        await generation.send(first[:7])
        await generation.send(first[7:])
        assert generation.ids == [IDS[:1]], "nothing was yielded before"
        await generation.send(b": a comment\n\n")
        await advance(FLUSH_S)
        await generation.send(second)
        assert generation.ids == [IDS[:1], IDS[1:2]], "a comment is no chunk"
        await generation.engine.close()
        with pytest.raises(EngineError):
            await generation.task

    run_with_frozen_clock(main())


def test_interval_counts_from_when_the_consumer_received_the_chunk() -> None:
    async def main() -> None:
        server = InMemoryServer(FakeVllm())
        engine = VllmEngine(URL)
        stream = engine.generate(PROMPT, params(COUNT, flush_s=FLUSH_S))
        reading = asyncio.ensure_future(anext(stream))
        events = await server.next_request_events()
        server.send(HEAD)
        server.send_chunks(events[0])
        await reading
        server.send_chunks(events[1])
        await advance(FLUSH_S + 1)  # The consumer is busy for longer than the interval.
        server.send_chunks(events[2])
        reading = asyncio.ensure_future(anext(stream))
        await yield_to_loop()
        assert ids_of([reading.result()]) == IDS[1:3]
        server.send_chunks(events[3])
        reading = asyncio.ensure_future(anext(stream))
        await advance(FLUSH_S - 1)
        assert not reading.done()
        await advance(1)
        assert ids_of([reading.result()]) == IDS[3:4]
        await stream.aclose()
        await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(("engine", "server"), KINDS)
def test_end_of_the_response_is_yielded_at_once(
    engine: Callable[..., HttpEngine], server: type[FakeServer]
) -> None:
    async def main() -> None:
        generation = await Generation(engine, server).begin()
        for event in generation.events:
            await generation.send(event)
        assert len(generation.ids) == 1
        generation.server.send(END)
        await generation.task
        assert generation.ids == [IDS[:1], IDS[1:]]
        assert [chunk.finish_reason for chunk in generation.chunks] == [None, "length"]
        await generation.engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lost", "reset by peer"),
        ("ended", "ended before its generation"),
        ("closed", "closed"),
        ("invalid", "1 ids with 0 logprobs"),
    ],
)
def test_error_comes_at_once_after_the_tokens_that_arrived(how: str, message: str) -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        await generation.send(*generation.events[1:3])
        if how == "lost":
            generation.server.drop_connection(ConnectionResetError("reset by peer"))
        elif how == "ended":
            generation.server.send(END)
        elif how == "closed":
            await generation.engine.close()
        else:
            # The event after the invalid one is not read: its tokens would be at the wrong position.
            await generation.send(INVALID, generation.events[3])
            generation.server.send(END)
        with pytest.raises(EngineError, match=message):
            await generation.task
        assert generation.ids == [IDS[:1], IDS[1:3]]
        await generation.engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("together", [False, True])
def test_invalid_event_after_the_finish_reason_is_ignored(together: bool) -> None:
    async def main() -> None:
        generation = await Generation(flush_s=0.0).begin()
        *before, last = generation.events
        await generation.send(*before)
        for piece in [last + INVALID] if together else [last, INVALID]:
            await generation.send(piece)
        await generation.task
        assert ids_of(generation.chunks) == IDS
        assert generation.chunks[-1].finish_reason == "length"
        await generation.engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(("engine", "server"), KINDS)
def test_pause_within_an_interval_yields_what_arrived(
    engine: Callable[..., HttpEngine], server: type[FakeServer]
) -> None:
    async def main() -> None:
        generation = await Generation(engine, server).begin()
        await generation.send(generation.events[0])
        await generation.send(*generation.events[1:3])
        await generation.engine.pause()
        await yield_to_loop()
        assert generation.ids == [IDS[:1], IDS[1:3]]
        generation.server.fake_server.weights = 5
        await generation.engine.resume(5)
        await generation.begin()
        for event in generation.events:
            await generation.send(event)
        assert len(generation.ids) == 2, "the interval continues from the last chunk"
        generation.server.send(END)
        await generation.task
        assert versions_of(generation.chunks) == [0] * 3 + [5] * 6
        assert ids_of(generation.chunks)[3:] == continuation([*PROMPT, *IDS[:3]], 6, weights=5)[0]
        await generation.engine.close()

    run_with_frozen_clock(main())


def test_version_change_within_an_interval_splits_the_chunk() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        await generation.send(*generation.events[1:3])
        await generation.engine.resume(5)
        await generation.send(*generation.events[3:5])
        assert len(generation.ids) == 1
        await advance(FLUSH_S)
        assert generation.ids == [IDS[:1], IDS[1:3], IDS[3:5]]
        assert versions_of(generation.chunks) == [0] * 3 + [5] * 2
        await generation.engine.close()
        with pytest.raises(EngineError):
            await generation.task

    run_with_frozen_clock(main())


def test_no_token_after_an_invalid_event_is_yielded_under_another_version() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        for version, piece in enumerate([generation.events[1] + INVALID, generation.events[2]], start=5):
            await generation.send(piece)
            await generation.engine.resume(version)
        generation.server.send(END)
        with pytest.raises(EngineError, match="1 ids with 0 logprobs"):
            await generation.task
        assert (ids_of(generation.chunks), versions_of(generation.chunks)) == (IDS[:2], [0, 0])
        await generation.engine.close()

    run_with_frozen_clock(main())


def test_cancelled_generation_drops_what_arrived_and_aborts() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(generation.events[0])
        await generation.send(*generation.events[1:3])
        generation.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generation.task
        await generation.stream.aclose()
        assert generation.ids == [IDS[:1]]
        assert generation.server.is_closed
        await generation.engine.close()

    run_with_frozen_clock(main())


def test_generation_whose_tokens_all_arrived_before_a_pause_is_not_continued() -> None:
    async def main() -> None:
        generation = await Generation().begin()
        await generation.send(*[event.replace(b'"length"', b"null") for event in generation.events])
        await generation.engine.pause()
        await generation.engine.resume(5)
        await generation.task
        assert generation.ids == [IDS, []]
        assert (generation.chunks[-1].version, generation.chunks[-1].finish_reason) == (0, "length")
        assert len(generation.server.bodies) == 1
        await generation.engine.close()

    run_with_frozen_clock(main())


def test_reused_connection_that_the_server_closed_is_replaced() -> None:
    async def main() -> None:
        generation = Generation()
        for is_lost in (False, True):
            if is_lost:
                generation.task = asyncio.create_task(generation._collect())
                generation.chunks.clear()
                await generation.server.next_request_events()
                first, second = generation.server.transports
                assert first is second
                generation.server.drop_connection()
            await generation.begin()
            await generation.send(*generation.events)
            generation.server.send(END)
            await generation.task
            assert ids_of(generation.chunks) == IDS
            generation.stream = generation.engine.generate(PROMPT, params(COUNT))
        assert generation.server.transports[2] is not generation.server.transports[1]
        await generation.engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(("engine", "server"), KINDS)
@settings(max_examples=60)
@given(
    flush_s=st.sampled_from([0.0, 2.0]),
    ids_per_event=st.integers(1, 3),
    events_per_chunk=st.integers(1, 3),
    cuts=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3)), max_size=25),
)
def test_any_split_of_the_bytes_at_any_time_gives_the_same_tokens(
    engine: Callable[..., HttpEngine],
    server: type[FakeServer],
    flush_s: float,
    ids_per_event: int,
    events_per_chunk: int,
    cuts: list[tuple[int, int]],
) -> None:
    async def main() -> None:
        generation = Generation(engine, server, flush_s=flush_s)
        generation.server.fake_server.ids_per_event = ids_per_event
        events = await generation.server.next_request_events()
        data = HEAD + chunked_body([*grouped(events, events_per_chunk), b": a comment\n\ndata: [DONE]\n\n"])
        positions = sorted((cut % (len(data) + 1), seconds) for cut, seconds in cuts)
        for (start, seconds), (end, _) in pairwise([(0, 0), *positions, (len(data), 0)]):
            await advance(seconds)
            generation.server.send(data[start:end])
        await generation.task
        assert ids_of(generation.chunks) == IDS
        assert logprobs_of(generation.chunks) == float32(LOGPROBS)
        assert versions_of(generation.chunks) == [0] * COUNT
        assert generation.chunks[-1].finish_reason == "length"
        assert len(generation.server.bodies) == 1
        await generation.engine.close()

    run_with_frozen_clock(main())


def grouped(events: Sequence[bytes], size: int) -> list[bytes]:
    return [b"".join(events[start : start + size]) for start in range(0, len(events), size)]


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 3)),
            st.tuples(st.just("wait"), st.integers(1, 3)),
            st.tuples(st.just("update"), st.just(0)),
        ),
        max_size=20,
    )
)
def test_every_token_is_sampled_after_the_tokens_yielded_before_it(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        generation = await Generation(flush_s=2.0).begin()
        fake = generation.server.fake_server
        sent = 0
        for action, amount in steps:
            if action == "send":
                events, sent = generation.events[sent : sent + amount], sent + amount
                await generation.send(*events)
            elif action == "wait":
                await advance(amount)
            elif sent < len(generation.events):
                await generation.engine.pause()
                fake.weights += 1
                await generation.engine.resume(fake.weights)
                await generation.begin()
                sent = 0
        await generation.send(*generation.events[sent:])
        generation.server.send(END)
        await generation.task
        assert_sampled_by(generation.chunks)
        assert len(ids_of(generation.chunks)) == len(logprobs_of(generation.chunks)) == COUNT
        await generation.engine.close()

    run_with_frozen_clock(main())


def test_finished_generation_leaves_no_reference_cycle() -> None:
    requests: list[weakref.ref[EngineRequest]] = []

    class TrackingEngine(VllmEngine):
        def build_request(self, *arguments: Any, **options: Any) -> EngineRequest:
            request = super().build_request(*arguments, **options)
            requests.append(weakref.ref(request))
            return request

    async def main() -> None:
        generation = await Generation(TrackingEngine).begin()
        await generation.send(*generation.events)
        generation.server.send(END)
        await generation.task
        assert [request() for request in requests] == [None]
        await generation.engine.close()

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        run_with_frozen_clock(main())
    finally:
        if was_enabled:
            gc.enable()
