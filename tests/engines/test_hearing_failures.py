"""What goes wrong while tokens are heard: all that was right is told or given once, and nothing behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.base import Tokens
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeVllm
from tests.engines.hearing import IDS, URL, Consumer, scene
from tests.engines.model import PROMPT, continuation, ids_of, params, run, versions_of
from tests.engines.wire import END, HEAD, Line, sent, ticks

BAD = sent({"choices": [{"token_ids": [1]}]})
"""An id without its logprob."""


@pytest.mark.parametrize("together", [False, True])
def test_a_wrong_event_is_an_error_behind_all_that_was_right_before_it(together: bool) -> None:
    async def main() -> None:
        async with scene() as here:
            task = await here.begin()
            here.line.say(here.events[0])
            right = [here.events[1], here.events[2]]
            for piece in [b"".join([*right, BAD])] if together else [*right, BAD]:
                here.line.say(piece)
            # It is not looked at: behind a gap no id stands in its place.
            here.line.say(here.events[3])
            with pytest.raises(EngineError, match="1 ids with 0 logprobs"):
                await task
            assert ids_of(here.consumer.got) == IDS[:3]
            assert here.line.is_closed

    run(main())


def test_nothing_behind_a_wrong_event_is_left_to_one_who_goes() -> None:
    async def main() -> None:
        async with scene() as here:
            task = await here.begin()
            here.line.say(here.events[0])
            here.line.say(here.events[1] + BAD)
            here.line.say(here.events[2])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (here.consumer.heard_ids, ids_of(here.consumer.left)) == ([IDS[:1]], IDS[1:2])

    run(main())


def test_nothing_behind_a_wrong_event_is_given_out_under_another_version() -> None:
    async def main() -> None:
        async with scene(hear=None) as here:
            task = await here.begin_with_one()
            here.line.say(here.events[0])
            await task
            for version, piece in enumerate([here.events[1] + BAD, here.events[2]], start=1):
                here.line.say(piece)
                await here.engine.resume(version)
            with pytest.raises(EngineError, match="1 ids with 0 logprobs"):
                await here.consumer.follow(here.stream)
            assert (ids_of(here.consumer.got), versions_of(here.consumer.got)) == (IDS[:2], [0, 0])

    run(main())


@pytest.mark.parametrize("more", [{}, {"hear": None}])
@pytest.mark.parametrize("together", [False, True])
def test_a_finish_is_not_lost_by_a_wrong_event_behind_it(together: bool, more: dict[str, Any]) -> None:
    async def main() -> None:
        async with scene(**more) as here:
            task = await here.begin()
            *before, last = here.events
            here.line.say(*before)
            for piece in [last + BAD] if together else [last, BAD]:
                here.line.say(piece)
                await ticks()
            await task
            assert ids_of(here.consumer.got) == IDS
            assert here.consumer.given[-1].finish == "length"

    run(main())


@pytest.mark.parametrize("ended", [False, True])
def test_a_connection_that_breaks_behind_what_was_heard_is_an_error(ended: bool) -> None:
    async def main() -> None:
        async with scene() as here:
            task = await here.begin()
            here.line.say(*here.events[:3])
            if ended:
                here.line.arrive(END)
            else:
                here.line.lose(ConnectionResetError("reset by peer"))
            with pytest.raises(EngineError, match="ended before its generation" if ended else "reset by"):
                await task
            assert (here.consumer.heard_ids, here.consumer.given) == ([[one] for one in IDS[:3]], [])

    run(main())


def test_what_could_not_be_heard_comes_before_the_break_behind_it() -> None:
    async def main() -> None:
        async with scene(True, False) as here:
            task = await here.begin()
            here.line.say(*here.events[:3])
            here.line.lose()
            with pytest.raises(EngineError, match="closed by the server"):
                await task
            assert ids_of(here.consumer.got) == IDS[:3]
            assert here.consumer.heard_ids == [IDS[:1]]

    run(main())


@pytest.mark.parametrize("error", [ValueError("deaf"), EngineError("deaf"), ConnectionError("deaf")])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_the_hearer_raises_is_raised_where_it_waits(error: Exception, breaks: bool) -> None:
    def hear(tokens: Tokens) -> bool:
        told.append(tokens.ids)
        if len(told) == 2:
            raise error
        return True

    told: list[list[int]] = []

    async def main() -> None:
        async with scene(hear=hear) as here:
            task = await here.begin()
            here.line.say(*here.events[:2])
            if breaks:
                here.line.lose()
            else:
                here.line.say(*here.events[2:4])
            with pytest.raises(type(error), match="deaf") as raised:
                await task
            assert raised.value is error
            assert told == [IDS[:1], IDS[1:2]]
            assert here.consumer.given == []
            assert here.line.is_closed

    run(main())


@pytest.mark.parametrize("status", [400, 500])
def test_a_refusal_is_raised_and_not_heard(status: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.refusal = (status, b"data: {}\n\n")
            engine, consumer = VllmEngine(server.url), Consumer()
            kind = EngineInputError if status == 400 else EngineError
            with pytest.raises(kind, match=f"status {status}"):
                await consumer.follow(engine.generate(PROMPT, params(hear=consumer.hear)))
            assert consumer.told == []
            await engine.close()

    run(main())


def test_a_kept_connection_that_the_server_closed_is_replaced_and_its_answer_heard() -> None:
    async def main() -> None:
        line = Line(FakeVllm())
        engine = VllmEngine(URL)
        for is_lost in (False, True):
            consumer = Consumer()
            task = asyncio.create_task(
                consumer.follow(engine.generate(PROMPT, params(3, hear=consumer.hear)))
            )
            events = await line.asked()
            if is_lost:
                assert line.wires[0] is line.wires[1]
                line.lose()
                events = await line.asked()
                assert line.wires[2] is not line.wires[1]
            line.arrive(HEAD)
            line.say(*events)
            line.arrive(END)
            await task
            ids, _ = continuation(PROMPT, 3)
            assert (consumer.heard_ids, consumer.given_ids) == ([[ids[0]], [ids[1]]], [[ids[2]]])
        await engine.close()

    run(main())
