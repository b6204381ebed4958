"""Tokens that are heard: with those that are given out they are what was sampled, each once and in order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.runs import as_ids
from branchline.engines.base import Tokens
from branchline.engines.http import HttpEngine
from branchline.engines.sglang import SglangEngine
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeServer, FakeSglang, FakeVllm
from tests.engines.hearing import URL, Consumer
from tests.engines.model import (
    PROMPT,
    assert_sampled_by,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    round_trip,
    run,
    versions_of,
)
from tests.engines.wire import END, HEAD, Line, chunked, sent, ticks


class IncrementalSglang(FakeSglang):
    incremental = True


KINDS: list[tuple[Callable[..., HttpEngine], type[FakeServer]]] = [
    (VllmEngine, FakeVllm),
    (SglangEngine, FakeSglang),
    (SglangEngine, IncrementalSglang),
]


@pytest.mark.parametrize(("engine_of", "fake"), KINDS)
def test_lone_tokens_are_heard_and_only_the_end_is_given_out(
    engine_of: Callable[..., HttpEngine], fake: type[FakeServer]
) -> None:
    async def main() -> None:
        async with fake() as server:
            engine, consumer = engine_of(server.url, version=3), Consumer()
            await consumer.follow(engine.generate(PROMPT, params(5, hear=consumer.hear)))
            ids, logprobs = continuation(PROMPT, 5)
            assert consumer.heard == [
                Tokens([one], [logprob], 3) for one, logprob in zip(ids[:4], logprobs[:4], strict=True)
            ]
            (last,) = consumer.given
            assert (ids_of([last]), last.version, last.finish) == (ids[4:], 3, "length")
            await engine.close()

    run(main())


@pytest.mark.parametrize(("engine_of", "fake"), KINDS)
@settings(max_examples=60)
@given(
    count=st.integers(1, 12),
    per_event=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 4)), max_size=25),
    answers=st.lists(st.booleans(), max_size=6),
    rests=st.lists(st.integers(0, 4), max_size=4),
)
def test_any_cut_of_the_bytes_and_any_answers_give_all_ids_once_and_in_order(
    engine_of: Callable[..., HttpEngine],
    fake: type[FakeServer],
    count: int,
    per_event: int,
    sizes: list[int],
    cuts: list[tuple[int, int]],
    answers: list[bool],
    rests: list[int],
) -> None:
    async def main() -> None:
        line = Line(fake())
        line.fake.per_event = per_event
        engine, consumer = engine_of(URL, version=3), Consumer(answers, rests)
        stream = engine.generate(PROMPT, params(count, hear=consumer.hear))
        task = asyncio.create_task(consumer.follow(stream))
        events = await line.asked()
        said = HEAD + chunked([*_grouped(events, sizes), b": a comment\n\ndata: [DONE]\n\n"])
        places = sorted((cut % (len(said) + 1), wait) for cut, wait in cuts)
        for (start, wait), (end, _) in pairwise([(0, 0), *places, (len(said), 0)]):
            await ticks(wait)
            line.arrive(said[start:end])
        await task
        ids, logprobs = continuation(PROMPT, count)
        assert ids_of(consumer.got) == ids
        assert logprobs_of(consumer.got) == float32(logprobs)
        assert versions_of(consumer.got) == [3] * count
        assert consumer.given[-1].finish == "length"
        assert len(line.bodies) == 1
        await engine.close()

    run(main())


def _grouped(events: list[bytes], sizes: list[int]) -> list[bytes]:
    """So many events a piece."""
    pieces: list[bytes] = []
    while events:
        size = sizes[len(pieces) % len(sizes)]
        pieces, events = [*pieces, b"".join(events[:size])], events[size:]
    return pieces


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.booleans(), max_size=4)), min_size=1, max_size=4
    ),
    swaps=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=5),
    per_event=st.integers(1, 3),
    piece=st.sampled_from([0, 1, 50]),
)
def test_whenever_weights_change_every_id_is_sampled_behind_all_that_was_heard_or_given(
    calls: list[tuple[int, list[bool]]], swaps: list[tuple[int, bool]], per_event: int, piece: int
) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.breathes, server.per_event, server.piece = True, per_event, piece
            engine = VllmEngine(server.url)
            prompts = [[number + 1] for number in range(len(calls))]
            consumers = [Consumer(answers) for _, answers in calls]
            tasks = [
                asyncio.create_task(one.follow(engine.generate(as_ids(prompt), params(count, hear=one.hear))))
                for one, prompt, (count, _) in zip(consumers, prompts, calls, strict=True)
            ]
            for wait, is_new in swaps:
                await ticks(wait)
                await engine.pause()
                server.weights += is_new
                await engine.resume(server.weights)
            await asyncio.gather(*tasks)
            for one, prompt, (count, _) in zip(consumers, prompts, calls, strict=True):
                assert_sampled_by(one.got, prompt)
                assert len(ids_of(one.got)) == len(logprobs_of(one.got)) == count
                assert one.given[-1].finish == "length"
            await engine.close()

    run(main())


@pytest.mark.parametrize(("engine_of", "fake"), KINDS)
def test_a_held_generation_goes_on_behind_what_was_heard(
    engine_of: Callable[..., HttpEngine], fake: type[FakeServer]
) -> None:
    async def main() -> None:
        async with fake() as server:
            server.hold_after = 3
            engine, consumer = engine_of(server.url, version=4), Consumer()
            stream = engine.generate(PROMPT, params(8, hear=consumer.hear))
            task = asyncio.create_task(consumer.follow(stream))
            await server.held.wait()
            await round_trip(engine)
            before, _ = continuation(PROMPT, 3)
            assert consumer.heard_ids == [[one] for one in before]
            await engine.pause()
            server.hold_after, server.weights = None, 1
            await engine.resume(5)
            await task
            after, logprobs = continuation([*PROMPT, *before], 5, weights=1)
            assert ids_of(consumer.got) == before + after
            assert logprobs_of(consumer.got)[3:] == float32(logprobs)
            assert versions_of(consumer.got) == [4] * 3 + [5] * 5
            assert consumer.given_ids == [after[-1:]]
            rest = server.bodies[1]
            asked = rest.get("sampling_params", {"max_new_tokens": rest.get("max_tokens")})
            assert asked["max_new_tokens"] == 5
            assert rest.get("prompt", rest.get("input_ids")) == [*PROMPT, *before]
            await engine.close()

    run(main())


def test_a_version_that_changes_without_a_pause_is_that_of_what_is_heard_from_then_on() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 3
            engine, consumer = VllmEngine(server.url, version=4), Consumer()
            stream = engine.generate(PROMPT, params(6, hear=consumer.hear))
            task = asyncio.create_task(consumer.follow(stream))
            await server.held.wait()
            await round_trip(engine)
            await engine.resume(5)
            server.go.set()
            await task
            assert [tokens.version for tokens in consumer.heard] == [4] * 3 + [5] * 2
            assert ids_of(consumer.got) == continuation(PROMPT, 6)[0]
            await engine.close()

    run(main())


def test_all_that_was_asked_for_may_have_been_heard_when_a_pause_cuts_it() -> None:
    async def main() -> None:
        line = Line(FakeVllm())
        engine, consumer = VllmEngine(URL, version=4), Consumer()
        task = asyncio.create_task(consumer.follow(engine.generate(PROMPT, params(3, hear=consumer.hear))))
        events = await line.asked()
        line.arrive(HEAD)
        line.say(*[event.replace(b'"length"', b"null") for event in events])
        assert ids_of(consumer.got) == continuation(PROMPT, 3)[0]
        await engine.pause()
        await engine.resume(5)
        await task
        (last,) = consumer.given
        assert (len(last.ids), last.version, last.finish) == (0, 4, "length")
        assert len(line.bodies) == 1
        await engine.close()

    run(main())


def test_an_end_that_says_no_ids_is_given_out_behind_what_was_heard() -> None:
    async def main() -> None:
        line = Line(FakeVllm())
        engine, consumer = VllmEngine(URL), Consumer()
        task = asyncio.create_task(consumer.follow(engine.generate(PROMPT, params(9, hear=consumer.hear))))
        events = await line.asked()
        line.arrive(HEAD)
        line.say(*events[:2])
        end = {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "stop"}
        line.say(sent({"choices": [end]}))
        line.arrive(END)
        await task
        assert consumer.heard_ids == [[one] for one in continuation(PROMPT, 2)[0]]
        assert (consumer.given_ids, consumer.given[0].finish) == ([[]], "stop")
        await engine.close()

    run(main())


@pytest.mark.parametrize("engine_of", [VllmEngine, SglangEngine])
def test_an_answer_that_nobody_watches_is_not_told(engine_of: Callable[..., HttpEngine]) -> None:
    async def main() -> None:
        async with (FakeVllm if engine_of is VllmEngine else FakeSglang)() as server:
            server.breathes = True
            engine, consumer = engine_of(server.url), Consumer()
            stream = engine.generate(PROMPT, params(40, whole=True, hear=consumer.hear))
            await consumer.follow(stream)
            assert (consumer.told, consumer.given_ids) == ([], [continuation(PROMPT, 40)[0]])
            await engine.close()

    run(main())


class Ear:
    def hear(self, tokens: Tokens) -> bool:
        return bool(tokens.ids)


def test_a_generation_that_has_ended_leaves_nothing_to_a_garbage_collector() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine, ear = VllmEngine(server.url), Ear()
            known: weakref.ref[Any] = weakref.ref(ear)
            chunks = [chunk async for chunk in engine.generate(PROMPT, params(5, hear=ear.hear))]
            assert len(chunks) == 1
            del ear
            assert known() is None
            await engine.close()

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        run(main())
    finally:
        if was_enabled:
            gc.enable()
