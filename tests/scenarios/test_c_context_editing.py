"""Scenarios C, context editing: with a toy and a real tokenizer, in process and over HTTP."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from branchline import export_samples, timelines_of
from branchline.core.context_edits import DELETED_CONTENT
from branchline.core.message import Message
from branchline.loop.context.context_loop import ContextOptions
from branchline.loop.output import LoopOutput
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits
from branchline.timelines.causes import Cause, classify_forks
from tests.loop.context.harness import SETUPS, ContextHarness, answer, call, codec_for, context_harness
from tests.loop.harness import run

setups = pytest.mark.parametrize("setup", SETUPS)
READ = [
    answer(call("buildIndex", chunk_size=200), text="first"),  # 2, result 3
    answer(call("searchEngine", keyword="item 41"), text="then"),  # 4, result 5
    answer(call("readChunk", chunk_id=0), text="read"),  # 6, result 7
]
DELETE = answer(call("deleteContext", message_ids=[4, 5, 7]), text="no longer needed")  # 8, result 9
FINISH = answer(call("finish", answer="287"), text="done")


@pytest.fixture(autouse=True)
def _skip_without_tokenizer(request: pytest.FixtureRequest) -> None:
    codec_for(request.node.callspec.params["setup"])


def contents(s: ContextHarness, turn: int) -> str:
    """The prompt of an assistant turn as text."""
    return s.codec.decode(s.model.replies[turn].prompt_ids)


def ids_of(s: ContextHarness, turn: int) -> list[int]:
    reply = s.model.replies[turn]
    return [*reply.prompt_ids.tolist(), *reply.ids.tolist()]


def causes(s: ContextHarness) -> list[Cause]:
    return [fork.cause for fork in classify_forks(s.tree).forks]


def result_fields(message: Message) -> dict[str, Any]:
    assert message.role == "tool"
    return json.loads(message.content)  # type: ignore[no-any-return]


def check_every_token_counts_once(s: ContextHarness) -> None:
    export = export_samples(s.tree)
    assert export.report.is_balanced
    assert not export.report.dropped
    sampled = sum(len(reply.ids) for reply in s.model.replies)
    assert export.report.trained_tokens == sampled
    assert sum(float(sample.shares.sum()) for sample in export.samples) == pytest.approx(sampled)


# -- C1 ----------------------------------------------------------------------------------------------


@setups
def test_c1_a_deletion_leaves_a_sample_and_the_next_answer_starts_another(setup: str) -> None:
    async def test() -> None:
        answers = [
            answer(call("echo", text="a long text")),
            answer(call("deleteContext", message_ids=[2, 3])),
            answer(text="end"),
        ]
        async with context_harness(answers, setup) as s:
            state = await s.run()
            state.score = 0.5
            await s.managed.post_rewards([{"score": 0.5}])
            first, second, third = s.model.replies
            sample, last = (await s.output(state)).outputs
            assert sample.prompt_ids.tolist() == first.prompt_ids.tolist()
            tool_tokens = len(second.prompt_ids) - len(first.prompt_ids) - len(first.ids)
            assert sample.response_mask.tolist() == [
                *[1] * len(first.ids),
                *[0] * tool_tokens,
                *[1] * len(second.ids),
            ]
            assert [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] == ids_of(s, 1)
            assert last.prompt_ids.tolist() == third.prompt_ids.tolist(), (
                "the re-rendered view and its result"
            )
            assert last.response_ids.tolist() == third.ids.tolist()
            assert last.response_mask.tolist() == [1] * len(third.ids)
            assert (sample.reward, last.reward) == (0.5, 0.5)
            assert causes(s) == [Cause.CONTEXT_DELETE]
            check_every_token_counts_once(s)

    run(test)


# -- C2 ----------------------------------------------------------------------------------------------


@setups
def test_c2_several_ids_and_one_id_are_accepted(setup: str) -> None:
    async def test() -> None:
        several = answer(call("deleteContext", message_ids=[4, 5, 5]))
        one = answer(call("deleteContext", msg_id=7))
        async with context_harness([*READ, several, one, FINISH], setup) as s:
            state = await s.run()
            assert result_fields(state.messages[9]) == {
                "msg_id": 9,
                "msg_id(invoking_assistant)": 8,
                "status": "success",
                "deleted_msg_id": [4, 5],
                "deleted_role": ["assistant", "tool"],
            }
            assert result_fields(state.messages[11]) == {
                "msg_id": 11,
                "msg_id(invoking_assistant)": 10,
                "status": "success",
                "deleted_msg_id": 7,
                "deleted_role": "tool",
            }
            assert contents(s, 4).count(DELETED_CONTENT) == 3, "text and arguments of 4, and 5"
            assert contents(s, 5).count(DELETED_CONTENT) == 4
            assert causes(s) == [Cause.CONTEXT_DELETE] * 2
            check_every_token_counts_once(s)

    run(test)


@setups
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"message_ids": [4, 99]}, "message_ids: got 99, expected ids from 0 to 8"),
        ({"msg_id": 0}, "message_ids: 0 is a system message, expected one of an assistant or a tool"),
        ({"message_ids": [1]}, "message_ids: 1 is a user message, expected one of an assistant or a tool"),
        ({"msg_id": 8}, "message_ids: 8 is the current message, expected an earlier message"),
        ({}, "message_ids: got none, expected the ids of messages to delete"),
    ],
)
def test_c2_a_deletion_that_is_not_possible_is_an_error_for_the_model(
    setup: str, arguments: dict[str, Any], problem: str
) -> None:
    async def test() -> None:
        async with context_harness([*READ, answer(call("deleteContext", **arguments)), FINISH], setup) as s:
            state = await s.run()
            fields = result_fields(state.messages[9])
            assert fields["status"] == "error"
            assert fields["message"] == f"Error executing tool 'deleteContext': {problem}"
            assert state.context is not None
            assert not state.context.deletions
            assert len(timelines_of(s.tree)) == 1, "no fork"
            assert DELETED_CONTENT not in contents(s, 4)

    run(test)


# -- C3 ----------------------------------------------------------------------------------------------


@setups
def test_c3_every_result_shows_its_ids_at_first_sight_and_in_every_later_prompt(setup: str) -> None:
    async def test() -> None:
        parallel = answer(call("echo", text="one"), call("echo", text="fail"), call("checkBudget"))
        async with context_harness([parallel, *READ, DELETE, FINISH], setup) as s:
            state = await s.run()
            tools = [(index, m) for index, m in enumerate(state.messages) if m.role == "tool"]
            for index, message in tools:
                fields = result_fields(message)
                assert list(fields)[:2] == ["msg_id", "msg_id(invoking_assistant)"]
                assert fields["msg_id"] == index
                invoking = state.messages[fields["msg_id(invoking_assistant)"]]
                assert message.tool_call_id in [one.id for one in invoking.tool_calls]
            invoking_ids = [result_fields(m)["msg_id(invoking_assistant)"] for m in state.messages[3:6]]
            assert invoking_ids == [2, 2, 2]
            for turn in range(1, len(s.model.replies)):
                prompt = contents(s, turn)
                for index, message in tools:
                    if index < len(state.messages) - 1 and message.content in prompt:
                        assert f'"msg_id":{index},' in prompt
            assert state.context is not None
            shown = state.context.view(state.messages).messages
            stubs = [result_fields(m)["msg_id"] for m in shown if DELETED_CONTENT in m.content]
            assert stubs == [4, 5, 7], "a deletion changes no id"

    run(test)


# -- C4 ----------------------------------------------------------------------------------------------


@setups
def test_c4_stubs_keep_tool_names_ids_and_status(setup: str) -> None:
    async def test() -> None:
        failing = answer(call("echo", text="fail"), call("echo", text="fine"), text="try", reasoning="hm")
        delete = answer(call("deleteContext", message_ids=[2, 3, 4]))
        async with context_harness([failing, delete, FINISH], setup) as s:
            state = await s.run()
            assert state.context is not None
            view = state.context.view(state.messages)
            stub, error, fine = view.messages[2:5]
            assert (stub.content, stub.reasoning_content) == (DELETED_CONTENT, "")
            assert [one.name for one in stub.tool_calls] == ["echo", "echo"]
            assert {one.arguments for one in stub.tool_calls} == {f'{{"message":"{DELETED_CONTENT}"}}'}
            assert [one.id for one in stub.tool_calls] == [one.id for one in state.messages[2].tool_calls]
            assert result_fields(error) == {
                "msg_id": 3,
                "msg_id(invoking_assistant)": 2,
                "status": "error",
                "message": DELETED_CONTENT,
                "original_tool": "echo",
            }
            assert result_fields(fine)["status"] == "success"
            prompt = contents(s, 2)
            assert error.content in prompt
            assert "no text" not in prompt
            assert "hm" not in prompt
            assert state.messages[3].content not in prompt

    run(test)


# -- C5 ----------------------------------------------------------------------------------------------


@setups
def test_c5_undo_and_redo_restore_the_view_and_lose_nothing(setup: str) -> None:
    async def test() -> None:
        undo, redo = answer(call("undoDelete"), text="undo"), answer(call("redoDelete"), text="redo")
        async with context_harness([*READ, DELETE, undo, redo, undo, FINISH], setup) as s:
            state = await s.run()
            assert state.context is not None
            assert contents(s, 4).count(DELETED_CONTENT) == 4
            assert DELETED_CONTENT not in contents(s, 5)
            assert ids_of(s, 3) == ids_of(s, 5)[: len(ids_of(s, 3))], "the path that the deletion left"
            assert ids_of(s, 4) == ids_of(s, 6)[: len(ids_of(s, 4))], "the path that the undo left"
            assert ids_of(s, 5) == ids_of(s, 7)[: len(ids_of(s, 5))]
            assert result_fields(state.messages[11])["restored_msg_id"] == [4, 5, 7]
            assert result_fields(state.messages[13])["deleted_msg_id"] == [4, 5, 7]
            paths = [line.ids.tolist() for line in timelines_of(s.tree)]
            for turn in range(len(s.model.replies)):
                ids = ids_of(s, turn)
                assert any(path[: len(ids)] == ids for path in paths)
            check_every_token_counts_once(s)

    run(test)


@setups
def test_c5_nothing_to_undo_or_redo_is_an_error_for_the_model(setup: str) -> None:
    async def test() -> None:
        answers = [answer(call("undoDelete")), answer(call("redoDelete")), FINISH]
        async with context_harness(answers, setup) as s:
            state = await s.run()
            assert "nothing to undo" in state.messages[3].content
            assert "nothing to redo" in state.messages[5].content
            assert len(timelines_of(s.tree)) == 1

    run(test)


# -- C6 ----------------------------------------------------------------------------------------------


@setups
def test_c6_a_context_that_is_too_long_ends_the_trajectory_with_a_penalty(setup: str) -> None:
    async def test() -> None:
        async with context_harness([*READ, *READ, FINISH], setup) as probe:
            await probe.run()
            length = len(probe.model.replies[4].prompt_ids) + 10
        for options, reward in ((None, -1.0), (ContextOptions(-0.25), -0.25), (ContextOptions(None), None)):
            limits = LoopLimits(model_length=length)
            async with context_harness([*READ, *READ, FINISH], setup, limits=limits, options=options) as s:
                state = await s.run()
                assert state.stop_reason is StopReason.MODEL_LENGTH
                assert state.metrics.context_length_exceeded
                assert state.reward_score == reward
                output = await s.output(state)
                assert output.metrics.context_length_exceeded
                assert output.reward_score == reward
                assert [sample.reward for sample in output.outputs] == [reward] * len(output.outputs)
                assert all(len(reply.prompt_ids) + len(reply.ids) <= length for reply in s.model.replies)

    run(test)


@setups
def test_c6_a_context_may_be_too_long_right_after_a_deletion(setup: str) -> None:
    async def test() -> None:
        answers = [
            answer(call("echo", text="short")),
            answer(call("deleteContext", msg_id=3), call("echo", text="long " * 400)),
            FINISH,
        ]
        async with context_harness([answers[0], answers[0], FINISH], setup) as probe:
            await probe.run()
            length = len(probe.model.replies[2].prompt_ids) + 300
        async with context_harness(answers, setup, limits=LoopLimits(model_length=length)) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.MODEL_LENGTH
            assert (state.assistant_turns, state.reward_score) == (2, -1.0)
            assert state.metrics.context_length_exceeded
            assert state.context is not None
            assert state.context.deletions
            check_every_token_counts_once(s)

    run(test)


@setups
@pytest.mark.parametrize("options", [ContextOptions(response_room=100), None])
def test_c6_the_room_for_an_answer_counts(setup: str, options: ContextOptions | None) -> None:
    async def test() -> None:
        async with context_harness([*READ, FINISH], setup) as probe:
            await probe.run()
            needed = max(len(reply.prompt_ids) for reply in probe.model.replies) + 100
        for length, reason in ((needed, StopReason.FINISH), (needed - 1, StopReason.MODEL_LENGTH)):
            limits = LoopLimits(model_length=length, max_new_tokens=None if options else 100)
            async with context_harness([*READ, FINISH], setup, limits=limits, options=options) as s:
                state = await s.run()
                assert state.stop_reason is reason
                assert state.metrics.context_length_exceeded == (reason is StopReason.MODEL_LENGTH)

    run(test)


@setups
def test_c6_an_answer_that_fills_the_context_may_still_delete(setup: str) -> None:
    async def test() -> None:
        async with context_harness([*READ, DELETE, FINISH], setup) as probe:
            await probe.run()
            full = len(ids_of(probe, 3))
        async with context_harness([*READ, DELETE, FINISH], setup, limits=LoopLimits(model_length=full)) as s:
            state = await s.run()
            assert len(ids_of(s, 3)) == full
            assert state.stop_reason is StopReason.FINISH

    run(test)


# -- C7 ----------------------------------------------------------------------------------------------


def check_turns(s: ContextHarness, state: LoopState, output: LoopOutput) -> None:
    assert len(output.turns) == state.assistant_turns == len(s.model.replies)
    for turn, reply in zip(output.turns, s.model.replies, strict=True):
        assert turn.call_id == reply.call_id
        assert turn.prompt_ids.tolist() == reply.prompt_ids.tolist()
        sample = output.outputs[turn.sample_index]
        assert sample.response_ids[turn.start : turn.end].tolist() == reply.ids.tolist()
        assert sample.response_mask[turn.start : turn.end].all()
        assert reply.logprobs is not None
        assert np.array_equal(sample.response_logprobs[turn.start : turn.end], reply.logprobs)


@setups
def test_c7_the_prompt_and_the_place_of_every_answer_can_be_read_back(setup: str) -> None:
    async def test() -> None:
        answers = [*READ, DELETE, answer(call("echo", text="x")), answer(call("undoDelete")), FINISH]
        async with context_harness(answers, setup, cancel_points=[(), (3,), (), (0, 2)]) as s:
            state = await s.run()
            assert s.cancel_count == 3
            check_turns(s, state, await s.output(state))
            check_turns(s, state, await s.output(state, shares="first"))

    run(test)


# -- C8 ----------------------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("keep", ["last", "random"])
def test_c8_a_cap_on_samples_always_keeps_the_final_one(setup: str, keep: str) -> None:
    async def test() -> None:
        deletions = [answer(call("deleteContext", msg_id=index)) for index in (3, 5, 7)]
        async with context_harness([*READ, *deletions, FINISH], setup) as s:
            state = await s.run()
            outputs = (await s.output(state)).outputs
            assert len(outputs) == 4
            for limit in (1, 2, 3):
                output = await s.output(state, max_samples=limit, keep=keep)
                assert len(output.outputs) == limit
                final = output.outputs[-1]
                assert final.response_ids.tolist() == outputs[-1].response_ids.tolist()
                assert output.turns[-1].call_id == state.answers[-1].call_id

    run(test)
