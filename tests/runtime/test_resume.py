"""A cancelled call is resumed from its own ids, and its tokens count once."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Journal, Message, ToyCodec
from branchline.core.errors import EngineError, MessageError, SessionError
from branchline.engines.base import SamplingParams
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.runtime.call_record import CallResult, new_call_id
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.session_store import SessionStore
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


async def _resume(managed: ManagedSession, engine: ScriptedEngine, call_id: str) -> CallResult:
    return (await complete_call(managed, engine, call_request(resume_call_id=call_id)))[1]


async def _complete_named(
    managed: ManagedSession, engine: ScriptedEngine, name: str, prompt: str = "p"
) -> CallResult:
    call_id = new_call_id(managed, name=name)
    return (await complete_call(managed, engine, call_request(prompt), call_id))[1]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_a_call_cancelled_any_number_of_times_gives_the_complete_answer_once(counts: list[int]) -> None:
    async def test() -> None:
        managed, engine, call_id = open_session(), resumable_engine(), ""
        for taken in accumulate(counts):
            call_id = await cancel_call(managed, engine, taken, call_request(resume_call_id=call_id))
        deltas, result = await complete_call(managed, engine, call_request(resume_call_id=call_id))
        assert (result.message.content, result.finish_reason) == (ANSWER, "stop")
        assert "".join(part.content for delta in deltas for part in delta.deltas) == ANSWER
        export = managed.export()
        assert export.report.sampled_tokens == export.report.trained_tokens == len(ANSWER) + 1
        assert not export.report.dropped
        (sample,) = export.samples
        assert sample.response_ids.tolist() == result.ids.tolist()
        assert all(sample.response_mask)
        # Each request continued the ids before it, so nothing was sampled twice.
        for prompt_ids, taken in zip(engine.received_prompts[1:], accumulate(counts), strict=True):
            assert bytes(prompt_ids.tolist()[-taken:]).decode() == ANSWER[:taken]
        assert managed.sampled_tokens == len(ANSWER) + 1

    run(test)


def test_a_call_that_left_nothing_is_sampled_from_the_start() -> None:
    async def test() -> None:
        result = await _resume(open_session(), resumable_engine(), "chatcmpl-unknown")
        assert result.message.content == ANSWER

    run(test)


def test_only_a_cancelled_call_is_resumed_with_the_same_prompt_and_once() -> None:
    async def test() -> None:
        managed, engine = open_session(), resumable_engine()
        call_id = await cancel_call(managed, engine, 5)
        with pytest.raises(SessionError, match="another prompt"):
            await complete_call(managed, engine, call_request("another", resume_call_id=call_id))
        with pytest.raises(MessageError, match="one answer"):
            await complete_call(managed, engine, call_request(resume_call_id=call_id, n=2))
        result = await _resume(managed, engine, call_id)
        with pytest.raises(SessionError, match="resumed already"):
            await _resume(managed, engine, call_id)
        with pytest.raises(SessionError, match="no cancelled call"):
            await _resume(managed, engine, result.call_id)

    run(test)


def test_a_call_is_resumed_by_one_call_at_a_time() -> None:
    async def test() -> None:
        managed, engine = open_session(), resumable_engine()
        call_id = await cancel_call(managed, engine, 5)
        events, _ = start_call(managed, engine, call_request(resume_call_id=call_id))
        await anext(events)
        with pytest.raises(SessionError, match="being resumed already"):
            await _resume(managed, engine, call_id)
        await events.aclose()

    run(test)


@pytest.mark.parametrize("max_tokens", [3, 5])
def test_a_resumed_call_samples_only_the_rest_of_its_tokens(max_tokens: int) -> None:
    async def test() -> None:
        managed, engine = open_session(), resumable_engine()
        call_id = await cancel_call(managed, engine, 3)
        params = SamplingParams(max_tokens=max_tokens)
        request = call_request(resume_call_id=call_id, params=params)
        _, result = await complete_call(managed, engine, request)
        assert (result.message.content, result.finish_reason) == (ANSWER[:max_tokens], "length")
        assert result.sampled_tokens == max_tokens
        assert len(engine.received_prompts) == (1 if max_tokens == 3 else 2)

    run(test)


# -- named calls -------------------------------------------------------------------------------------


def test_a_named_call_resumes_its_earlier_attempts() -> None:
    async def test() -> None:
        managed, engine = open_session(), resumable_engine()
        for taken in (4, 7):
            await cancel_call(managed, engine, taken, call_id=new_call_id(managed, name="mine"))
        result = await _complete_named(managed, engine, "mine")
        assert (result.call_id, result.message.content) == ("mine~3", ANSWER)
        report = managed.export().report
        assert report.sampled_tokens == report.trained_tokens == len(ANSWER) + 1
        lengths = [len(ids) for ids in engine.received_prompts]
        assert lengths == [lengths[0], lengths[0] + 4, lengths[0] + 7]

    run(test)


@pytest.mark.parametrize("codec", [ToyCodec(), ToyCodec.chatml()])
@pytest.mark.parametrize("max_tokens", [4, 100])
def test_a_completed_call_sent_again_is_answered_from_the_record(codec: ToyCodec, max_tokens: int) -> None:
    async def test() -> None:
        managed, engine = open_session(codec), ScriptedEngine(codec, replies("once", "twice"))
        request = call_request(params=SamplingParams(max_tokens=max_tokens))
        _, first = await complete_call(managed, engine, request, "mine")
        managed.attempt_counts["mine"] = 1
        deltas, again = await complete_call(managed, engine, request, new_call_id(managed, name="mine"))
        assert again.call_id == "mine~2"
        assert (again.message.content, again.finish_reason) == (first.message.content, first.finish_reason)
        assert "".join(part.content for delta in deltas for part in delta.deltas) == first.message.content
        assert len(engine.received_prompts) == 1
        export = managed.export()
        assert export.report.sampled_tokens == len(export.samples[0].response_ids)
        assert not export.report.dropped

    run(test)


def test_a_failed_attempt_leaves_the_earlier_one_to_be_resumed() -> None:
    async def test() -> None:
        managed, engine = open_session(), resumable_engine()
        await cancel_call(managed, engine, 5, call_id=new_call_id(managed, name="mine"))
        rule, engine.rule = engine.rule, replies(ValueError("broken"))
        with pytest.raises(EngineError):
            await _complete_named(managed, engine, "mine")
        engine.rule = rule
        assert (await _complete_named(managed, engine, "mine")).message.content == ANSWER
        assert not managed.export().report.dropped

    run(test)


def test_a_name_belongs_to_one_prompt_and_ends_when_the_conversation_continues() -> None:
    async def test() -> None:
        managed, engine = open_session(), ScriptedEngine(rule=replies("one", "two"))
        assert (await _complete_named(managed, engine, "mine")).message.content == "one"
        with pytest.raises(SessionError, match="another prompt"):
            await _complete_named(managed, engine, "mine", "another")
        later = (Message("assistant", "one"), Message("user", "q"))
        await complete_call(managed, engine, call_request("p", *later))
        with pytest.raises(SessionError, match="no cancelled call"):
            await _complete_named(managed, engine, "mine")

    run(test)


def test_names_are_distinct_and_validated() -> None:
    managed = open_session()
    assert [new_call_id(managed, name=name) for name in ("a", "a.b", "a")] == ["a", "a.b", "a~2"]
    assert new_call_id(managed, "resp_").startswith("resp_")
    assert new_call_id(managed) != new_call_id(managed)
    for name in ("a~2", "a b", "x" * 97):
        with pytest.raises(MessageError, match="x-branchline-call"):
            new_call_id(managed, name=name)


def test_a_named_call_is_resumed_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        with Journal(tmp_path / "journal") as journal:
            managed, engine = open_session(journal=journal, id="s"), resumable_engine()
            await cancel_call(managed, engine, 4, call_id=new_call_id(managed, name="mine"))
        with Journal(tmp_path / "journal") as journal:
            managed = SessionStore(engine.codec, journal=journal).get("s")
            result = await _complete_named(managed, engine, "mine")
            assert (result.call_id, result.message.content) == ("mine~2", ANSWER)
            assert engine.codec.decode(engine.received_prompts[1]).endswith(f"assistant:{ANSWER[:4]}")

    run(test)


def test_a_second_attempt_waits_for_the_first_one() -> None:
    async def test() -> None:
        managed = open_session()
        engine = ScriptedEngine(rule=replies("once", "twice"), gate=asyncio.Event())
        first = asyncio.create_task(_complete_named(managed, engine, "mine"))
        while not engine.received_prompts:
            await asyncio.sleep(0)
        second = asyncio.create_task(_complete_named(managed, engine, "mine"))
        while managed.attempt_counts["mine"] < 2:
            await asyncio.sleep(0)
        assert engine.gate is not None
        engine.gate.set()
        assert [(await task).message.content for task in (first, second)] == ["once", "once"]
        assert len(engine.received_prompts) == 1

    run(test)
