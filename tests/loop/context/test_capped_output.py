"""Outputs under caps, held against what the model was asked and answered without any cap."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.message import Message
from branchline.core.sample import Sample
from branchline.loop.agents import run_agent
from branchline.loop.context.context_loop import ContextOptions
from branchline.loop.output import LoopOutput, build_output
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import CancelToken
from branchline.runtime.compaction import DropOldest, Summarize
from tests.loop.context.harness import ContextHarness, answer, call, context_harness
from tests.loop.context.test_context_property import FINISH, first_prompt_tokens, scripts, toy_codecs
from tests.loop.harness import move_clock, run

caps = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(0, 4000),
        "max_samples": st.none() | st.integers(1, 4),
        "keep": st.sampled_from(["last", "random"]),
        "seed": st.integers(0, 9),
        "shares": st.sampled_from(["split", "first", "all"]),
        "include_inexact": st.just(True),
    },
)
loop_caps = st.fixed_dictionaries(
    {},
    optional={
        "response_length": st.integers(1, 3000),
        "max_new_tokens": st.integers(1, 300),
        "max_assistant_turns": st.integers(1, 6),
    },
)


def trains(sample: Sample, prompt: list[int], ids: list[int]) -> bool:
    """Whether a sample trains all of an answer after exactly its prompt."""
    tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    mask = [*[0] * len(sample.prompt_ids), *sample.response_mask.tolist()]
    end = len(prompt) + len(ids)
    return tokens[:end] == [*prompt, *ids] and mask[len(prompt) : end] == [1] * len(ids)


def check(s: ContextHarness, state: LoopState, output: LoopOutput) -> None:
    replies = {reply.call_id: reply for reply in s.model.replies}
    assert list(replies) == state.call_ids
    for sample in output.outputs:
        spans = [(one.start, one.end) for one in sample.answers]
        spans += [(one.start, one.end) for one in sample.rewards]
        for start, end in spans:
            assert 0 <= start <= end <= len(sample.response_ids)
    # Turns: all that some sample holds whole, and no other.
    held = []
    for one in state.answers:
        reply = replies[one.call_id]
        prompt, ids = reply.prompt_ids.tolist(), reply.ids.tolist()
        if any(trains(sample, prompt, ids) for sample in output.outputs):
            held.append(one.call_id)
    assert [turn.call_id for turn in output.turns] == held
    assert output.missing_turns == len(state.answers) - len(held)
    for turn in output.turns:
        reply, sample = replies[turn.call_id], output.outputs[turn.sample_index]
        assert 0 <= turn.start <= turn.end <= len(sample.response_ids)
        assert turn.prompt_ids.tolist() == reply.prompt_ids.tolist()
        assert sample.response_ids[turn.start : turn.end].tolist() == reply.ids.tolist()
        assert sample.response_mask[turn.start : turn.end].all()
    # Tokens: each that was sampled is trained or counted.
    sampled = sum(len(reply.ids) for reply in replies.values())
    trained = {span.call: span.end - span.start for one in output.outputs for span in one.answers}
    assert sum(output.left_out.values()) == sampled - sum(trained.values())
    assert all(count > 0 for count in output.left_out.values())
    assert output.is_complete == (int(output.response_mask.sum()) == sampled)


@settings(max_examples=40, deadline=None)
@given(
    scripts,
    st.sampled_from(toy_codecs),
    st.sampled_from(["template", "verbatim"]),
    st.none() | st.integers(100, 2500),
    st.sampled_from([None, DropOldest(2), Summarize(keep_last=2)]),
    loop_caps,
    st.lists(caps, min_size=1, max_size=4),
)
def test_indexes_lie_in_their_samples_and_nothing_is_missing_uncounted_under_any_cap(
    script: list[Message],
    codec: Any,
    history: str,
    room: int | None,
    compaction: Any,
    limits: dict[str, Any],
    policies: list[dict[str, Any]],
) -> None:
    async def test() -> None:
        model_length = None if room is None else first_prompt_tokens(codec) + room
        async with context_harness(
            [*script, *[FINISH] * (len(script) + 3)],
            codec=codec,
            limits=LoopLimits(model_length=model_length, **limits),
            options=ContextOptions(compaction=compaction if room is not None else None),
            history=history,
        ) as s:
            state = await s.run()
            check(s, state, await s.output(state))
            for policy in policies:
                check(s, state, await s.output(state, **policy))

    run(test)


TWO_SAMPLES = [
    answer(call("echo", text="w " * 20), text="one"),
    answer(call("deleteContext", message_ids=[3]), text="two"),
    answer(call("echo", text="v"), text="three"),
    FINISH,
]


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
def test_a_cap_on_samples_or_tokens_makes_an_output_incomplete_and_says_what_is_missing(setup: str) -> None:
    async def test() -> None:
        async with context_harness(TWO_SAMPLES, setup) as s:
            state = await s.run()
            full = await s.output(state)
            assert (len(full.outputs), full.is_complete, full.left_out) == (2, False, {})
            assert (len(full.turns), full.missing_turns) == (4, 0)
            # One of two samples: the flat fields look whole and are not.
            capped = await s.output(state, max_samples=1)
            tokens = [one.tokens for one in state.answers]
            assert (capped.is_complete, capped.left_out) == (False, {"capped": tokens[1]})
            assert (len(capped.turns), capped.missing_turns) == (3, 1)
            # Cut in the middle of the third answer.
            third = full.turns[2]
            length = len(third.prompt_ids) + 2
            cut = await s.output(state, max_tokens=length)
            assert [turn.call_id for turn in cut.turns] == [turn.call_id for turn in full.turns[:2]]
            assert cut.missing_turns == 2
            assert cut.left_out == {"over_length": tokens[2] - 2 + tokens[3]}

    run(test)


def test_outputs_without_any_sample_are_not_complete() -> None:
    async def test() -> None:
        async with context_harness(TWO_SAMPLES) as s:
            state = await s.run()
            sampled = s.managed.sampled_tokens
            nothing = await s.output(state, max_tokens=0)
            assert (nothing.outputs, nothing.is_complete) == ((), False)
            assert nothing.left_out == {"over_length": sampled}
            assert (nothing.turns, nothing.missing_turns) == ((), 4)
        async with context_harness(TWO_SAMPLES, eval=True) as s:
            state = await s.run()
            output = await s.output(state)
            assert (output.outputs, output.is_complete) == ((), False)
            assert output.left_out == {"evaluation": s.managed.sampled_tokens}
        async with context_harness(TWO_SAMPLES) as s:
            output = await s.output(LoopState.begin(s.task()))
            assert (output.outputs, output.is_complete, output.left_out) == ((), True, {})

    run(test)


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_the_tokens_of_a_cancelled_answer_are_counted_under_a_cap(setup: str, keep: int) -> None:
    async def test() -> None:
        points = [(), (5,)]
        async with context_harness(
            [answer(call("echo", text="x")), answer(text="a long answer")], setup, cancel_points=points
        ) as s:
            state, cancel = LoopState.begin(s.task(), "t"), CancelToken()
            task = asyncio.create_task(run_agent(state, s.context(cancel)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            state = await task
            full = await build_output(state, s.model)
            assert (full.partial_tokens, full.is_complete, full.left_out) == (5, True, {})
            length = len(full.prompt_ids) + len(full.response_ids) - 5 + keep
            cut = await build_output(state, s.model, policy={"max_tokens": length})
            assert (cut.partial_tokens, cut.is_complete) == (keep, False)
            assert cut.left_out == {"over_length": 5 - keep}
            tail = cut.response_ids[len(cut.response_ids) - keep :]
            assert "a long answer".startswith(s.codec.decode(tail))
            assert np.array_equal(cut.response_ids, full.response_ids[: len(cut.response_ids)])

    run(test)


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
def test_tokens_of_an_answer_that_was_given_up_are_missing(setup: str) -> None:
    """The time of the trajectory ended in the middle of an answer."""

    async def test() -> None:
        limits = LoopLimits(wall_clock_s=60.0)
        async with context_harness(
            [answer(call("echo", text="x")), answer(text="a long answer")],
            setup,
            limits=limits,
            cancel_points=[(), (5,)],
        ) as s:
            state = LoopState.begin(s.task(), "t")
            task = asyncio.create_task(run_agent(state, s.context()))
            await s.engine.at_cancel_point.wait()
            move_clock(61)
            state = await task
            output = await s.output(state)
            assert str(state.stop_reason) == "wall_clock"
            assert output.left_out == {"cancelled": 5}
            assert (output.is_complete, output.partial_tokens) == (False, 0)

    run(test)


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
def test_tokens_of_an_answer_that_could_not_be_resumed_are_missing(setup: str) -> None:
    """It was cancelled, and asked for again with other tools."""

    async def test() -> None:
        answers = [answer(text="a long answer"), answer(text="another")]
        async with context_harness(answers, setup, cancel_points=[(5,)]) as s:
            state, cancel = LoopState.begin(s.task(), "t"), CancelToken()
            task = asyncio.create_task(run_agent(state, s.context(cancel)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            state = await task
            state.task = msgspec.structs.replace(state.task, tools=("echo", "finish"))
            state = LoopState.decode((await run_agent(state, s.context())).encode())
            output = await s.output(state)
            assert s.codec.decode(output.response_ids) == "another<end>"
            assert (output.is_complete, output.left_out) == (False, {"cancelled": 5})

    run(test)
