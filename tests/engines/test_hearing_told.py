"""Who is told, and when: one who waits, of what comes; what nobody took is left to one who goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.engines.base import Tokens
from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeVllm
from tests.engines.hearing import IDS, URL, Consumer, scene
from tests.engines.model import PROMPT, ids_of, logprobs_of, params, run
from tests.engines.wire import END, HEAD, Line, ticks


def test_nobody_is_told_who_does_not_wait() -> None:
    async def main() -> None:
        async with scene(False, True) as here:
            task = await here.begin_with_one()
            here.line.say(here.events[0])
            await task
            here.line.say(here.events[1])
            here.line.say(here.events[2])
            await ticks()
            assert [tokens.ids for tokens in here.consumer.told] == [IDS[:1]]
            await here.consumer.next(here.stream)
            assert here.consumer.given_ids == [IDS[:1], IDS[1:3]], "kept for the next wait"
            going_on = asyncio.create_task(here.consumer.follow(here.stream))
            await ticks()
            here.line.say(here.events[3])
            assert here.consumer.heard_ids == [IDS[3:4]]
            here.line.say(*here.events[4:])
            here.line.arrive(END)
            await going_on
            assert ids_of(here.consumer.got) == IDS

    run(main())


def test_who_cannot_hear_now_may_hear_later() -> None:
    async def main() -> None:
        async with scene(False, True) as here:
            task = await here.begin()
            here.line.say(here.events[0])
            assert here.consumer.got == [], "the wait ends first"
            await ticks()
            assert here.consumer.given_ids == [IDS[:1]]
            here.line.say(here.events[1])
            assert here.consumer.heard_ids == [IDS[1:2]]
            here.line.say(here.events[2])
            await ticks()
            here.line.say(*here.events[3:])
            here.line.arrive(END)
            await task
            assert ids_of(here.consumer.got) == IDS

    run(main())


def test_events_of_one_piece_are_told_together() -> None:
    async def main() -> None:
        async with scene() as here:
            task = await here.begin()
            here.line.say(b"".join(here.events[:3]) + here.events[3][:10])
            here.line.say(here.events[3][10:] + here.events[4])
            assert here.consumer.heard_ids == [IDS[:3], IDS[3:5]]
            here.line.say(b"".join(here.events[5:]))
            here.line.arrive(END)
            await task
            assert here.consumer.given_ids == [IDS[5:]], "tokens beside the last are given out with it"

    run(main())


@pytest.mark.parametrize("takes", [False, True])
def test_a_hearer_that_ends_the_wait_itself_loses_nothing(takes: bool) -> None:
    def hear(tokens: Tokens) -> bool:
        told.append(tokens.ids)
        tasks[0].cancel()
        return takes

    told: list[list[int]] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        async with scene(hear=hear) as here:
            tasks.append(await here.begin())
            here.line.say(*here.events[:3])
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert told == [IDS[:1]]
            assert ids_of(here.consumer.left) == (IDS[1:3] if takes else IDS[:3])
            assert here.line.is_closed

    run(main())


def test_only_what_was_neither_heard_nor_given_is_left_to_one_who_goes() -> None:
    async def main() -> None:
        async with scene(True, False) as here:
            task = await here.begin()
            here.line.say(*here.events[:3])
            assert here.consumer.heard_ids == [IDS[:1]]
            task.cancel()
            here.line.say(here.events[3] + here.events[4][:9])
            with pytest.raises(asyncio.CancelledError):
                await task
            assert here.consumer.given == []
            assert ids_of(here.consumer.left) == IDS[1:4]
        async with scene(False) as here:
            task = await here.begin_with_one()
            here.line.say(here.events[0])
            await task
            here.line.say(here.events[1])
            await here.stream.aclose()
            assert (here.consumer.given_ids, ids_of(here.consumer.left)) == ([IDS[:1]], IDS[1:2])
        async with scene() as here:
            task = await here.begin()
            here.line.say(*here.events[:3])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (here.consumer.left, here.consumer.heard_ids) == ([], [[one] for one in IDS[:3]])

    run(main())


def test_a_last_token_that_had_arrived_is_left_with_its_finish() -> None:
    async def main() -> None:
        async with scene() as here:
            task = await here.begin()
            here.line.say(*here.events)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (last,) = here.consumer.left
            assert (ids_of([last]), last.finish) == (IDS[-1:], "length")
            assert ids_of(here.consumer.got) == IDS

    run(main())


@pytest.mark.parametrize("behind", [lambda engine: engine, lambda engine: Replicas([engine])])
@settings(max_examples=100)
@given(
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 4)), max_size=12),
    arrives=st.integers(0, 10_000),
    late=st.integers(0, 500),
    answers=st.lists(st.booleans(), max_size=5),
    rests=st.lists(st.integers(0, 4), max_size=4),
)
def test_whoever_goes_at_whatever_moment_has_got_all_that_had_arrived(
    behind: Callable[[VllmEngine], VllmEngine | Replicas],
    places: list[tuple[int, int]],
    arrives: int,
    late: int,
    answers: list[bool],
    rests: list[int],
) -> None:
    async def main() -> None:
        line, consumer = Line(FakeVllm()), Consumer(answers, rests)
        engine = behind(VllmEngine(URL))

        async def follow() -> None:
            asked = params(9, hear=consumer.hear, left=consumer.leave)
            async with aclosing(engine.generate(PROMPT, asked)) as stream:
                await consumer.follow(stream)

        task = asyncio.create_task(follow())
        events = await line.asked()
        line.arrive(HEAD)
        said = b"".join(events)
        arrived = arrives % (len(said) + 1)
        cuts = sorted((place % (arrived + 1), wait) for place, wait in places)
        for (start, wait), (end, _) in pairwise([(0, 0), *cuts, (arrived, 0)]):
            await ticks(wait)
            line.say(said[start:end])
        task.cancel()
        line.say(said[arrived : arrived + late])
        with pytest.raises(asyncio.CancelledError):
            await task
        whole = said[: arrived + late].count(b"\n\n")
        assert ids_of(consumer.got) == IDS[:whole]
        assert len(logprobs_of(consumer.got)) == whole
        assert line.is_closed
        await engine.close()

    run(main())
