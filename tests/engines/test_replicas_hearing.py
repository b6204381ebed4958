"""Several engines as one for a consumer that hears: calls move behind what was heard too."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import EngineError
from branchline.engines.base import Tokens
from tests.engines.farm import arrival, asked, farm
from tests.engines.hearing import Consumer
from tests.engines.model import (
    PROMPT,
    assert_sampled_by,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    run,
    versions_of,
)

FAILURE = {"error": {"message": "engine core died", "code": 500}}


@pytest.mark.parametrize("answers", [[True], [False], [True, True, False]])
@pytest.mark.parametrize("fails_after", range(8))
def test_a_call_of_a_failed_replica_goes_on_elsewhere_behind_what_was_heard(
    fails_after: int, answers: list[bool]
) -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].event_after = (fails_after, FAILURE)
            consumer = Consumer(answers)
            await consumer.follow(replicas.generate(PROMPT, params(8, hear=consumer.hear), session="s"))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(consumer.got) == ids
            assert logprobs_of(consumer.got) == float32(logprobs)
            assert consumer.given[-1].finish == "length"
            (rest,) = servers[1].bodies
            assert rest["prompt"] == [*PROMPT, *ids[:fails_after]]
            assert rest["max_tokens"] == 8 - fails_after
            assert replicas.failing == ("0",)

    run(main())


@settings(max_examples=40)
@given(
    deaths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    per_event=st.integers(1, 3),
    piece=st.sampled_from([0, 1, 50]),
    answers=st.lists(st.booleans(), max_size=5),
)
def test_any_number_of_deaths_loses_and_repeats_nothing_that_was_heard(
    deaths: list[int], per_event: int, piece: int, answers: list[bool]
) -> None:
    async def main() -> None:
        async with farm(len(deaths) + 1) as (replicas, servers):
            for server, death in zip(servers, deaths, strict=False):
                server.die_after, server.per_event, server.piece = death, per_event, piece
            consumer = Consumer(answers)
            await consumer.follow(replicas.generate(PROMPT, params(12, hear=consumer.hear)))
            ids, logprobs = continuation(PROMPT, 12)
            assert ids_of(consumer.got) == ids
            assert logprobs_of(consumer.got) == float32(logprobs)

    run(main())


def test_a_removed_replicas_call_goes_on_behind_what_was_heard() -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].hold_after = 3
            consumer = Consumer()
            stream = replicas.generate(PROMPT, params(8, hear=consumer.hear), session="a")
            task = asyncio.create_task(consumer.follow(stream))
            await servers[0].held.wait()
            await arrival(replicas)
            assert len(consumer.heard) == 3
            await replicas.remove("0")
            await task
            ids, _ = continuation(PROMPT, 8)
            assert ids_of(consumer.got) == ids
            assert consumer.given_ids == [ids[-1:]]
            assert [body["max_tokens"] for body in servers[1].bodies] == [5]

    run(main())


@pytest.mark.parametrize("answers", [[True], [True, False]])
def test_a_cut_replicas_call_goes_on_behind_what_was_heard_and_what_was_left(answers: list[bool]) -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].hold_after = 4
            consumer = Consumer(answers)
            stream = replicas.generate(PROMPT, params(8, hear=consumer.hear, left=consumer.leave))
            task = asyncio.create_task(consumer.follow(stream))
            await servers[0].held.wait()
            await arrival(replicas)
            servers[0].broken, servers[1].weights = {"/update_weight_version"}, 1
            await replicas.pause()
            await replicas.resume(1)
            await task
            assert replicas.behind == ("0",)
            assert versions_of(consumer.got) == [0] * 4 + [1] * 4
            assert_sampled_by(consumer.got)
            assert [len(body["prompt"]) for body in servers[1].bodies] == [len(PROMPT) + 4]
            assert consumer.left == [], "nobody went"

    run(main())


def test_one_who_goes_is_left_what_a_replica_had_and_nobody_heard() -> None:
    async def main() -> None:
        async with farm(1) as (replicas, servers):
            servers[0].hold_after = 4
            consumer = Consumer([True, True, False])

            def hear(tokens: Tokens) -> bool:
                if not consumer.hear(tokens):
                    task.cancel()
                    return False
                return True

            stream = replicas.generate(PROMPT, params(8, hear=hear, left=consumer.leave))
            task = asyncio.create_task(consumer.follow(stream))
            with pytest.raises(asyncio.CancelledError):
                await task
            ids, _ = continuation(PROMPT, 4)
            assert consumer.heard_ids == [ids[:1], ids[1:2]]
            assert ids_of(consumer.left)[:1] == ids[2:3]
            assert ids_of(consumer.got) == ids[: len(ids_of(consumer.got))]
            assert replicas.in_flight == {"0": 0}
            await servers[0].aborted.wait()

    run(main())


def test_a_replica_that_failed_is_asked_again_once_another_was_heard() -> None:
    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].refusal = (500, b"not yet")
            servers[1].event_after = (2, FAILURE)
            consumer = Consumer()

            def hear(tokens: Tokens) -> bool:
                servers[0].refusal = None
                return consumer.hear(tokens)

            await consumer.follow(replicas.generate(PROMPT, params(6, hear=hear)))
            assert ids_of(consumer.got) == continuation(PROMPT, 6)[0]
            assert asked(servers) == [2, 1]

    run(main())


def test_a_replica_that_failed_behind_what_was_heard_is_not_asked_again_at_once() -> None:
    async def main() -> None:
        async with farm(1) as (replicas, servers):
            servers[0].event_after = (2, FAILURE)
            consumer = Consumer()
            with pytest.raises(EngineError, match=r"no replica is left to ask: .*engine core died"):
                await consumer.follow(replicas.generate(PROMPT, params(6, hear=consumer.hear)))
            assert ids_of(consumer.got) == continuation(PROMPT, 2)[0]
            assert asked(servers) == [1]

    run(main())


@pytest.mark.parametrize("error", [ValueError("deaf"), EngineError("deaf"), ConnectionError("deaf")])
def test_what_the_hearer_raises_is_no_replicas_failure(error: Exception) -> None:
    def hear(_: Tokens) -> bool:
        raise error

    async def main() -> None:
        async with farm(2) as (replicas, servers):
            servers[0].hold_after = 2
            with pytest.raises(type(error), match="deaf") as raised:
                await collect(replicas.generate(PROMPT, params(6, hear=hear)))
            assert raised.value is error
            assert (replicas.failing, asked(servers)) == ((), [1, 0])
            await servers[0].aborted.wait()

    run(main())
