"""Concurrent calls of a session together never exceed its limits; bodies with too many values are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import MessageError, SessionError
from branchline.engines.base import SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.runtime.limits import check_json_values
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT
from tests.gateway.harness import run
from tests.runtime.harness import (
    ANSWER,
    call_request,
    cancel_call,
    complete_call,
    open_session,
    resumable_engine,
    start_call,
)


async def _refusal(call: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(SessionError) as refused:
        await call
    return refused.value.kind


def test_the_last_call_gets_the_tokens_that_are_left() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"tokens": 12}), ScriptedEngine(rule=replies("12345678"))
        lengths = [(await complete_call(managed, engine))[1].sampled_tokens for _ in range(2)]
        assert lengths == [9, 3]
        assert await _refusal(complete_call(managed, engine)) == "out_of_tokens"
        assert managed.sampled_tokens == 12

    run(test)


def test_running_calls_reserve_what_they_may_sample() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"tokens": 12, "calls": 3}), ScriptedEngine(rule=replies("ok"))
        events, _ = start_call(managed, engine, call_request(params=SamplingParams(max_tokens=9)))
        await anext(events)
        assert (managed.in_flight, managed.reserved_tokens) == (1, 9)
        too_many = call_request(params=SamplingParams(max_tokens=9), n=7)
        assert await _refusal(complete_call(managed, engine, too_many)) == "busy"
        _, result = await complete_call(managed, engine, call_request(params=SamplingParams(max_tokens=9)))
        assert result.sampled_tokens == 3
        await events.aclose()
        assert (managed.in_flight, managed.reserved_tokens) == (0, 0)
        assert await _refusal(complete_call(managed, engine, too_many)) == "out_of_tokens"

    run(test)


@pytest.mark.parametrize(("limit", "reserved"), [(100, 100), (10**6, 5 * 10**5)])
def test_a_call_without_a_limit_leaves_tokens_to_others(limit: int, reserved: int) -> None:
    async def test() -> None:
        managed = open_session(limits={"tokens": limit})
        engine = ScriptedEngine(rule=replies("ok"), max_context=10**9)
        events, _ = start_call(managed, engine, call_request(params=SamplingParams(max_tokens=NO_LIMIT)))
        await anext(events)
        assert managed.reserved_tokens == reserved
        await events.aclose()
        engine.max_context = None
        events, _ = start_call(managed, engine, call_request(params=SamplingParams(max_tokens=NO_LIMIT)))
        await anext(events)
        assert managed.reserved_tokens <= FALLBACK_MAX_TOKENS
        await events.aclose()

    run(test)


def test_a_call_counts_from_its_start() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"calls": 2}), ScriptedEngine(gate=asyncio.Event())
        running = [asyncio.create_task(complete_call(managed, engine)) for _ in range(2)]
        while managed.in_flight < 2:
            await asyncio.sleep(0)
        assert await _refusal(complete_call(managed, engine)) == "out_of_calls"
        assert engine.gate is not None
        engine.gate.set()
        await asyncio.gather(*running)
        assert await _refusal(complete_call(managed, engine)) == "out_of_calls"

    run(test)


# -- resumed calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "content", "finish_reason"), [(45, ANSWER, "stop"), (25, ANSWER[:25], "length")]
)
@pytest.mark.parametrize("cancels", [(20,), (20, 23)])
def test_tokens_of_a_resumed_call_count_once(
    cancels: tuple[int, ...], limit: int, content: str, finish_reason: str
) -> None:
    async def test() -> None:
        managed, engine, call_id = open_session(limits={"tokens": limit}), resumable_engine(), ""
        for taken in cancels:
            call_id = await cancel_call(managed, engine, taken, call_request(resume_call_id=call_id))
        _, result = await complete_call(managed, engine, call_request(resume_call_id=call_id))
        assert (result.message.content, result.finish_reason) == (content, finish_reason)
        assert managed.sampled_tokens == min(limit, len(ANSWER) + 1)
        assert managed.reserved_tokens == 0

    run(test)


def test_a_completed_call_is_repeated_in_a_session_without_tokens() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"tokens": 10}), resumable_engine()
        _, first = await complete_call(managed, engine, call_id="turn")
        _, again = await complete_call(managed, engine, call_id="turn~2")
        assert (first.message.content, first.finish_reason) == (ANSWER[:10], "length")
        assert (again.message.content, again.finish_reason) == (ANSWER[:10], "length")
        assert managed.sampled_tokens == 10
        assert len(engine.received_prompts) == 1

    run(test)


def test_a_resumed_call_reserves_only_what_it_has_not_sampled() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"tokens": 40}), resumable_engine()
        call_id = await cancel_call(managed, engine, 20)
        params = SamplingParams(max_tokens=32)
        events, _ = start_call(managed, engine, call_request(resume_call_id=call_id, params=params))
        await anext(events)
        assert (managed.sampled_tokens, managed.reserved_tokens) == (20, 12)
        _, other = await complete_call(managed, engine, call_request("q"))
        assert other.sampled_tokens == 8
        await events.aclose()

    run(test)


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_call_and_the_calls_that_resume_it_count_as_one(cancels: int) -> None:
    async def test() -> None:
        managed, engine, call_id = open_session(limits={"calls": 2}), resumable_engine(), ""
        for number in range(cancels):
            request = call_request(resume_call_id=call_id)
            call_id = await cancel_call(managed, engine, 3 * (number + 1), request)
        _, result = await complete_call(managed, engine, call_request(resume_call_id=call_id))
        assert result.message.content == ANSWER
        await complete_call(managed, engine, call_request("another"))
        assert await _refusal(complete_call(managed, engine, call_request("a third"))) == "out_of_calls"

    run(test)


def test_a_cancelled_call_counts_until_it_is_resumed() -> None:
    async def test() -> None:
        managed, engine = open_session(limits={"calls": 1}), resumable_engine()
        call_id = await cancel_call(managed, engine, 3)
        assert await _refusal(complete_call(managed, engine)) == "out_of_calls"
        _, result = await complete_call(managed, engine, call_request(resume_call_id=call_id))
        assert result.message.content == ANSWER

    run(test)


@given(
    st.lists(st.sampled_from(b",[{}]Z{|x\x0c\x1b\xfb"), max_size=40).map(bytes),
    st.integers(0, 3),
    st.booleans(),
)
def test_commas_and_opening_brackets_are_counted_in_every_part_of_a_body(
    data: bytes, megabytes: int, is_long_first: bool
) -> None:
    padding = b" " * (megabytes * 2**20 - 7 if megabytes else 0)
    body = padding + data if is_long_first else data + padding + data
    count = sum(body.count(character) for character in (b",", b"[", b"{"))
    check_json_values(body, count)
    if count:
        with pytest.raises(MessageError, match=f"more than {count - 1} commas and opening brackets"):
            check_json_values(body, count - 1)
