from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from branchline import ToyCodec, export_samples
from branchline.chat.toy import END_CALL
from branchline.core.errors import ContextLengthError, EngineError, InputError, SessionError
from branchline.core.message import Message
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.http_model import HttpModel
from branchline.loop.interaction import BaseInteraction, InteractionConfig, InteractionResponse
from branchline.loop.output import build_output
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection, media_from_bytes
from branchline.runtime.managed_session import SessionLimits
from tests.chat.families import load_codec
from tests.loop.harness import (
    LoopScript,
    ResumableScriptedEngine,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    encode_answers,
    loop_harness,
    move_clock,
    run,
)

TOOL_TURN = ScriptedTurn("let me see", tool_calls=(ScriptedToolCall(result="seen"),))


def roles(state: LoopState) -> list[str]:
    return [message.role for message in state.messages]


# -- lengths -----------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_is_not_asked() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            for limit in (10, 20):
                state = await s.run_once(limits=LoopLimits(model_length=limit))
                assert (state.stop_reason, state.assistant_turns) == (StopReason.MODEL_LENGTH, 0)
            size = await s.model.count_tokens(s.task().messages, tools=[s.tool.schema])
            state = await s.run_once(limits=LoopLimits(model_length=size))
            assert (state.stop_reason, state.stop_detail) == (
                StopReason.MODEL_LENGTH,
                f"{size} tokens of {size}",
            )
            assert not s.engine.requests
            state = await s.run_once(limits=LoopLimits(model_length=size + 1))
            assert (state.stop_reason, len(s.model.replies[0].ids)) == (StopReason.MODEL_LENGTH, 1)

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_engine_that_has_no_room_ends_the_trajectory(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, ScriptedTurn("end"))), over_http=over_http) as s:
            await s.run_once()
            size = len(s.model.replies[1].prompt_ids)
            for most, detail in (
                (size, f"{size} tokens leave the engine room for none"),
                (size - 1, str(ContextLengthError.for_prompt(size, size - 1))),
            ):
                s.engine.max_context = most
                s.engine.requests.clear()
                state = await s.run_once(model=await s.open_another())
                assert (state.stop_reason, state.stop_detail) == (StopReason.MODEL_LENGTH, detail)
                assert (roles(state)[-1], state.assistant_turns) == ("tool", 1)
                assert len(s.engine.requests) == 1

    run(test)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (LoopLimits(max_new_tokens=2), StopReason.LENGTH),
        (LoopLimits(response_length=2), StopReason.RESPONSE_LENGTH),
        (LoopLimits(response_length=3, max_new_tokens=2), StopReason.LENGTH),
        (LoopLimits(response_length=2, max_new_tokens=3), StopReason.RESPONSE_LENGTH),
        (LoopLimits(response_length=4), StopReason.STOP),
    ],
)
def test_a_cut_answer_says_which_limit_cut_it(limits: LoopLimits, reason: StopReason) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            state = await s.run_once(limits=limits)
            assert state.stop_reason is reason
            assert len(s.model.replies[0].ids) == min(2 if reason is not StopReason.STOP else 4, 4)

    run(test)


def test_each_answer_has_the_room_that_is_left_of_the_response() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, TOOL_TURN, ScriptedTurn("a long goodbye")))) as s:
            await s.run_once()
            lengths = [len(reply.prompt_ids) for reply in s.model.replies]
            room = lengths[2] - lengths[0] + 3
            model = await s.open_another()
            state = await s.run_once(model=model, limits=LoopLimits(response_length=room))
            assert state.stop_reason is StopReason.RESPONSE_LENGTH
            assert state.messages[-1].content == "a l"
            assert len((await build_output(state, model)).response_ids) == room

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("room", [None, 4500, 6000])
def test_without_a_limit_an_answer_has_the_room_that_the_engine_has(
    room: int | None, over_http: bool
) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("word " * 900),)), over_http=over_http) as s:
            s.engine.max_context = room
            state = await s.run_once(limits=LoopLimits())
            (reply,) = s.model.replies
            if room is None:
                assert (state.stop_reason, len(reply.ids)) == (StopReason.LENGTH, 4096), (
                    "nobody knows the room"
                )
            elif room == 4500:
                assert state.stop_reason is StopReason.LENGTH
                assert len(reply.prompt_ids) + len(reply.ids) == room
            else:
                assert (state.stop_reason, len(reply.ids)) == (StopReason.STOP, len(s.engine.answers[0]))

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_sessions_own_sampling_lifts_no_limit_and_may_set_a_lower_one(over_http: bool) -> None:
    async def test() -> None:
        for most, length in ((200, 10), (4, 4)):
            async with loop_harness(
                LoopScript((ScriptedTurn("a rather long answer"),)),
                over_http=over_http,
                sampling={"max_tokens": most},
            ) as s:
                state = await s.run_once(limits=LoopLimits(response_length=10))
                assert len((await build_output(state, s.model)).response_ids) == length
                assert state.stop_reason is (
                    StopReason.RESPONSE_LENGTH if length == 10 else StopReason.LENGTH
                )

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize(
    ("limits", "reason", "words"),
    [
        (SessionLimits(calls=1), StopReason.SESSION_CALLS, "may make 1 calls and has made them"),
        (SessionLimits(tokens=41), StopReason.SESSION_TOKENS, "may sample 41 tokens and has sampled them"),
    ],
)
def test_a_session_that_is_spent_ends_the_trajectory_and_it_is_judged(
    limits: SessionLimits, reason: StopReason, words: str, over_http: bool
) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, ScriptedTurn("end"))), over_http=over_http) as s:
            assert len(s.engine.answers[0]) == 41
            s.managed.options = structs.replace(s.managed.options, limits=limits)
            state = await s.run_once()
            assert (state.stop_reason, roles(state)[-1]) == (reason, "tool")
            assert state.stop_detail.endswith(words)
            assert (state.is_finished, state.final_rewards) == (True, {"act": 0.5})
            # Judged is judged: there is nothing to go on with.
            assert (await s.run_once(state)).stop_reason is reason

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_session_that_was_closed_is_an_error(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),)), over_http=over_http) as s:
            await s.managed.set_state("finalized")
            with pytest.raises(SessionError) as closed:
                await s.run_once()
            assert closed.value.kind == "closed"

    run(test)


def test_a_gateway_that_takes_no_longer_prompt_ends_the_trajectory_and_it_is_judged() -> None:
    async def test() -> None:
        codec, script, prompt = (
            ToyCodec.chatml(),
            LoopScript((TOOL_TURN, ScriptedTurn("end"))),
            (Message("user", "Begin."),),
        )
        most = codec.count_tokens(prompt, [ScriptedTool.schema]) + len(encode_answers(codec, script)[0])
        config = GatewayConfig(max_prompt_tokens=most)
        async with Gateway(
            engine=ResumableScriptedEngine(encode_answers(codec, script)), codec=codec, config=config
        ) as gateway:
            session = await gateway.session()
            async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
                state = LoopState.begin(Task(prompt))
                async with AgentLoop(model, state, tools=ToolSelection((ScriptedTool(script),))) as loop:
                    await loop.run()
        assert (state.stop_reason, roles(state)) == (StopReason.MODEL_LENGTH, ["user", "assistant", "tool"])
        assert f"> {most} maximum" in state.stop_detail
        assert state.final_rewards == {"act": 0.5}

    run(test)


# -- the last turn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("kind", ["assistant", "user", "length"])
def test_the_last_answer_that_a_limit_allows_is_judged_and_nobody_answers_it(
    kind: str, over_http: bool
) -> None:
    async def test() -> None:
        script = LoopScript(
            (ScriptedTurn("one"), ScriptedTurn("two"), ScriptedTurn("three")), user_messages=("and", "so")
        )
        async with loop_harness(script, over_http=over_http) as s:
            await s.run_once()
            second = s.model.replies[1]
            full = len(second.prompt_ids) + len(second.ids)
            limits, reason, detail = {
                "assistant": (LoopLimits(max_assistant_turns=2), StopReason.ASSISTANT_TURNS, "2 of 2"),
                "user": (LoopLimits(max_user_turns=1), StopReason.USER_TURNS, "1 of 1"),
                "length": (
                    LoopLimits(model_length=full),
                    StopReason.MODEL_LENGTH,
                    f"{full} tokens of {full}",
                ),
            }[kind]
            model = await s.open_another()
            state = await s.run_once(model=model, limits=limits)
            assert (state.stop_reason, state.stop_detail) == (reason, detail)
            assert [m.content for m in state.messages[2:]] == ["one", "and", "two"]
            assert (state.assistant_turns, state.user_turns) == (2, 1)
            assert state.turn_scores == [0.0, 0.1]
            assert [(r.turn, r.content, r.is_last) for r in state.turn_records] == [
                *[(1, "and", False), (2, "so", True)]
            ]
            assert state.score == 2.0, "the interaction has seen both"

    run(test)


def test_a_last_answer_with_tool_calls_is_nobodys_to_judge() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, ScriptedTurn("end")), user_messages=("and",))) as s:
            state = await s.run_once(limits=LoopLimits(max_assistant_turns=1))
            assert (state.stop_reason, state.pending_calls, state.turn_records) == (
                StopReason.ASSISTANT_TURNS,
                [],
                [],
            )
            assert s.tool.executed == []

    run(test)


def test_cut_off_while_a_last_answer_is_judged_it_is_judged_later_and_still_the_last() -> None:
    class Pondering(CountingInteraction):
        def __init__(self) -> None:
            super().__init__()
            self.pondering = asyncio.Event()

        async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
            if not self.pondering.is_set():
                self.pondering.set()
                await asyncio.Event().wait()
            return await super().respond(state, messages)

    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("one"), ScriptedTurn("two")))) as s:
            state, judge, cancel = LoopState.begin(s.task()), Pondering(), CancelToken()
            limits, partner = LoopLimits(max_assistant_turns=1), InteractionConfig(judge)
            async with AgentLoop(s.model, state, interaction=partner, limits=limits) as loop:
                task = asyncio.create_task(loop.run(cancel))
                await judge.pondering.wait()
                cancel.cancel()
                assert (await task).is_cancelled
            state = LoopState.decode(state.encode())
            assert (state.phase, state.is_finished) == (LoopPhase.INTERACTING, False)
            async with AgentLoop(s.model, state, interaction=partner, limits=limits) as loop:
                state = await loop.run()
            assert (state.stop_reason, state.turn_scores, judge.asked) == (
                StopReason.ASSISTANT_TURNS,
                [1.0],
                1,
            )
            assert len(s.engine.requests) == 1

    run(test)


def test_of_an_answer_cut_in_its_second_call_the_first_is_run() -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn(tool_calls=(ScriptedToolCall(result="seen"),) * 2), ScriptedTurn("end")))
        ) as s:
            room = s.engine.answers[0].tolist().index(END_CALL) + 4
            state = await s.run_once(limits=LoopLimits(max_new_tokens=room))
            assert s.model.replies[0].finish_reason == "length"
            assert s.tool.executed == [(0, 0)]
            assert roles(state)[2:] == ["assistant", "tool", "assistant"]
            assert state.stop_reason is StopReason.STOP

    run(test)


# -- the clock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["generating", "tools"])
def test_when_the_time_is_up_what_is_half_done_is_left(where: str) -> None:
    async def test() -> None:
        held = (
            ScriptedTurn("never mind", cancel_points=(3,))
            if where == "generating"
            else ScriptedTurn(tool_calls=(ScriptedToolCall(cancels=1),))
        )
        async with loop_harness(LoopScript((TOOL_TURN, held))) as s:
            task = asyncio.create_task(s.run_once(limits=LoopLimits(wall_clock_s=100)))
            await (s.engine if where == "generating" else s.tool).at_cancel_point.wait()
            move_clock(101)
            state = await task
            assert (state.phase, state.stop_reason) == (LoopPhase.TERMINATED, StopReason.WALL_CLOCK)
            assert not state.is_cancelled
            assert state.final_rewards == {"act": 0.5}
            assert (s.tool.created, s.tool.released) == (1, 1)
            report = export_samples(s.tree).report
            assert report.is_balanced
            assert [(dropped.reason, dropped.tokens) for dropped in report.dropped] == (
                [("cancelled", 3)] if where == "generating" else []
            )
            output = await build_output(state, s.model)
            assert output.outputs[-1].calls == tuple(state.call_ids)

    run(test)


def test_when_the_time_is_up_a_tool_call_that_is_over_counts() -> None:
    async def test() -> None:
        calls = (
            ScriptedToolCall(result="quick"),
            ScriptedToolCall(result="slow", cancels=1),
            ScriptedToolCall(result="too"),
        )
        async with loop_harness(LoopScript((ScriptedTurn(tool_calls=calls), ScriptedTurn("end")))) as s:
            state = LoopState.begin(s.task())
            task = asyncio.create_task(s.run_once(state, limits=LoopLimits(wall_clock_s=100)))
            await s.tool.at_cancel_point.wait()
            while len(state.pending_results) < 2:
                await asyncio.sleep(0)
            move_clock(101)
            assert (await task).stop_reason is StopReason.WALL_CLOCK
            assert state.tool_rewards == [5.0, 3.0]
            assert [record.message.content for record in state.tool_results] == ["quick", "too"]
            assert (state.pending_results, state.pending_calls) == ({}, [])
            assert roles(state)[-1] == "assistant", "the model is told nothing any more"

    run(test)


def test_when_the_time_is_up_a_turn_that_was_scored_counts() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("one"), ScriptedTurn("two")))) as s:
            state, model = LoopState.begin(s.task()), BlockingCountModel(s.model)
            model.passes = 1
            limits = LoopLimits(wall_clock_s=100, response_length=1000)
            async with AgentLoop(
                model, state, interaction=InteractionConfig(CountingInteraction()), limits=limits
            ) as loop:  # type: ignore[arg-type]
                task = asyncio.create_task(loop.run())
                await model.counting.wait()
                move_clock(101)
                assert (await task).stop_reason is StopReason.WALL_CLOCK
            assert (state.turn_scores, state.pending_response) == ([1.0], None)

    run(test)


def test_the_time_of_all_runs_counts() -> None:
    async def test() -> None:
        script = LoopScript((replace(TOOL_TURN, cancel_points=(2,)), ScriptedTurn("end")))
        async with loop_harness(script) as s:
            state = LoopState.begin(s.task())
            state.elapsed_s = 99.0
            cancel = CancelToken()
            task = asyncio.create_task(s.run_once(state, cancel, limits=LoopLimits(wall_clock_s=100)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            assert (await task).is_cancelled
            assert 99.0 < state.elapsed_s < 100
            state.elapsed_s = 100.0
            state = await s.run_once(state, limits=LoopLimits(wall_clock_s=100))
            assert state.stop_reason is StopReason.WALL_CLOCK
            assert len(s.engine.requests) == 1

    run(test)


# -- cancel and resume -------------------------------------------------------------------------------


def test_a_cancelled_task_is_cancelled_and_leaves_a_state_to_go_on_from() -> None:
    async def test() -> None:
        script = LoopScript((ScriptedTurn("a long story", cancel_points=(4,)),))
        async with loop_harness(script) as s:
            state = LoopState.begin(s.task())
            task = asyncio.create_task(s.run_once(state))
            await s.engine.at_cancel_point.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert state.is_cancelled
            assert (await s.run_once(state)).messages[-1].content == "a long story"
            assert not state.is_cancelled
            assert [len(ids) for _, ids in s.engine.requests] == [
                len(s.model.replies[0].prompt_ids),
                len(s.model.replies[0].prompt_ids) + 4,
            ]

    run(test)


def test_a_token_that_was_used_lets_nothing_begin() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            cancel = CancelToken()
            cancel.cancel()
            state = await s.run_once(cancel=cancel)
            assert (state.is_cancelled, state.phase, s.engine.requests) == (True, LoopPhase.PENDING, [])

    run(test)


def test_finished_tool_calls_are_kept_and_do_not_run_again() -> None:
    async def test() -> None:
        script = LoopScript(
            (
                ScriptedTurn(
                    tool_calls=(ScriptedToolCall(result="quick"), ScriptedToolCall(result="slow", cancels=1))
                ),
                ScriptedTurn("end"),
            )
        )
        async with loop_harness(script) as s:
            state, cancel = LoopState.begin(s.task()), CancelToken()
            task = asyncio.create_task(s.run_once(state, cancel))
            await s.tool.at_cancel_point.wait()
            while 0 not in state.pending_results:
                await asyncio.sleep(0)
            cancel.cancel()
            state = LoopState.decode((await task).encode())
            assert (state.phase, list(state.pending_results)) == (LoopPhase.PROCESSING_TOOLS, [0])
            state = await s.run_once(state)
            assert s.tool.executed == [(0, 0), (0, 1)]
            assert [m.content for m in state.messages[3:5]] == ["quick", "slow"]
            assert state.tool_rewards == [5.0, 4.0]
            assert [(record.tool, record.turn) for record in state.tool_results] == [("act", 1)] * 2

    run(test)


class BlockingCountModel:
    """A model that stops to think when it counts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.counting = asyncio.Event()
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def count_tokens(self, messages: Sequence[Message], **options: Any) -> int:
        if not self.passes:
            self.counting.set()
            await asyncio.Event().wait()
        self.passes -= 1
        return int(await self._model.count_tokens(messages, **options))


class CountingInteraction(BaseInteraction):
    """Counts what it is asked."""

    name = "counted"

    def __init__(self) -> None:
        self.asked = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        return None, "first words"

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        self.asked += 1
        return InteractionResponse(self.asked == 2, f"answer {self.asked}", score=float(self.asked))


def test_what_somebody_has_said_is_not_asked_for_twice() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("one"), ScriptedTurn("two")))) as s:
            model, partner = BlockingCountModel(s.model), InteractionConfig(CountingInteraction())
            state = LoopState.begin(s.task())
            limits = LoopLimits(response_length=1000)
            # Cancelled while the first prompt is counted, and again while the answer of the interaction is.
            for passes in (0, 1):
                model.passes = passes
                model.counting.clear()
                cancel = CancelToken()
                async with AgentLoop(model, state, interaction=partner, limits=limits) as loop:  # type: ignore[arg-type]
                    task = asyncio.create_task(loop.run(cancel))
                    await model.counting.wait()
                    cancel.cancel()
                    assert (await task).is_cancelled
                state = LoopState.decode(state.encode())
            assert state.pending_response is not None
            model.passes = 9
            async with AgentLoop(model, state, interaction=partner, limits=limits) as loop:  # type: ignore[arg-type]
                state = await loop.run()
            assert [m.content for m in state.messages[2:]] == [
                *["first words", "one", "answer 1", "two", "answer 2"]
            ]
            assert state.turn_scores == [1.0, 2.0]
            assert (state.stop_reason, state.user_turns) == (StopReason.INTERACTION, 1)

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_answer_that_nobody_heard_is_heard_and_counted_once(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("heard by nobody"),)), over_http=over_http) as s:
            state = LoopState.begin(s.task())
            state.phase, state.call_name = LoopPhase.GENERATING, "turn-1"
            # The very call that the loop is about to make, made and answered; then its client was gone.
            lost = await s.model.ask(state.messages, tools=[s.tool.schema], call_name="turn-1")
            state = await s.run_once(state)
            assert state.messages[-1].content == "heard by nobody"
            assert len(s.engine.requests) == 1, "nothing was sampled twice"
            assert [call.id for call in s.tree.calls] == ["turn-1", "turn-1~2"]
            (sample,) = (await build_output(state, s.model)).outputs
            assert sample.response_ids.tolist() == lost.ids.tolist()
            assert export_samples(s.tree).report.sampled_tokens == len(lost.ids)

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_answer_that_was_begun_with_other_tools_is_begun_again(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("a long story", cancel_points=(3,)),)), over_http=over_http
        ) as s:
            state, cancel = LoopState.begin(s.task()), CancelToken()
            task = asyncio.create_task(s.run_once(state, cancel))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            assert (await task).is_cancelled
            s.engine.prompts_by_session.clear()
            async with AgentLoop(s.model, state) as loop:
                state = await loop.run()
            assert (state.messages[-1].content, state.stop_reason) == ("a long story", StopReason.STOP)
            (dropped,) = export_samples(s.tree).report.dropped
            assert (dropped.reason, dropped.tokens) == ("cancelled", 3)

    run(test)


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over_http", [False, True])
def test_an_error_of_the_engine_is_raised_and_the_state_goes_on_afterwards(over_http: bool) -> None:
    async def test() -> None:
        script = LoopScript((TOOL_TURN, ScriptedTurn("and so on", cancel_points=(3,))))
        async with loop_harness(script, over_http=over_http) as s:
            state, cancel = LoopState.begin(s.task()), CancelToken()
            task = asyncio.create_task(s.run_once(state, cancel))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            assert (await task).is_cancelled
            s.engine.failure = EngineError("out of order")
            with pytest.raises(EngineError, match="out of order"):
                await s.run_once(state)
            assert (state.is_cancelled, state.is_finished) == (False, False)
            s.engine.failure = None
            state = await s.run_once(state)
            assert state.messages[-1].content == "and so on"
            report = export_samples(s.tree).report
            assert not report.dropped, "what was sampled before the error is gone on from"
            assert (s.tool.created, s.tool.released) == (3, 3)

    run(test)


class FailingInteraction(BaseInteraction):
    """Breaks where it is told to."""

    name = "broken"

    def __init__(self, where: str) -> None:
        self._where = where
        self.finalized = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        return self._fail_at("start"), None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        self._fail_at("respond")
        return InteractionResponse(True)

    async def score(self, state: Any) -> float | None:
        self._fail_at("score")
        return 1.0

    async def finalize(self, state: Any) -> None:
        self.finalized += 1
        self._fail_at("finalize")

    def _fail_at(self, where: str) -> None:
        if where == self._where:
            raise LookupError(where)


@pytest.mark.parametrize("where", ["start", "respond", "score"])
def test_an_interaction_that_breaks_is_raised_and_everything_is_put_away(where: str) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            broken, state = FailingInteraction(where), LoopState.begin(s.task())
            with pytest.raises(LookupError, match=where):
                async with AgentLoop(
                    s.model, state, tools=ToolSelection((s.tool,)), interaction=InteractionConfig(broken)
                ) as loop:
                    await loop.run()
            assert (s.tool.created, s.tool.released) == (1, 1)
            assert broken.finalized == (where != "start")
            assert not state.is_finished
            if where == "score":
                async with AgentLoop(
                    s.model, state, interaction=InteractionConfig(FailingInteraction(""))
                ) as loop:
                    state = await loop.run()
                assert (state.is_finished, state.score, len(s.engine.requests)) == (True, 1.0, 1)

    run(test)


def test_results_cannot_be_cut_by_tokens_that_are_not_known() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            model = BlockingCountModel(s.model)
            model.codec = None  # type: ignore[attr-defined]
            for unit in ("tokens", "characters"):
                limits = LoopLimits(tool_response_length=3, tool_response_unit=unit)  # type: ignore[arg-type]
                state = LoopState.begin(s.task())
                if unit == "characters":
                    AgentLoop(model, state, limits=limits)  # type: ignore[arg-type]
                    continue
                with pytest.raises(InputError, match="tool_response_unit: got 'tokens'"):
                    AgentLoop(model, state, limits=limits)  # type: ignore[arg-type]

    run(test)


# -- what a model cannot see -------------------------------------------------------------------------


class Camera(BaseTool):
    """Shows what it sees, in words or in a picture."""

    name = "act"
    schema = ScriptedTool.schema

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        pictures = (media_from_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20)),) if arguments["index"] else ()
        return ToolResult("look", pictures, reward=1.0)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("limits", [LoopLimits(), LoopLimits(response_length=5000)])
def test_a_picture_is_no_end_of_a_model_that_only_reads(over_http: bool, limits: LoopLimits) -> None:
    codec = load_codec("qwen3")

    async def test() -> None:
        script = LoopScript(
            (ScriptedTurn("so", tool_calls=(ScriptedToolCall(), ScriptedToolCall())), ScriptedTurn("end"))
        )
        async with loop_harness(script, codec, over_http=over_http) as s:
            state = LoopState.begin(s.task())
            async with AgentLoop(s.model, state, tools=ToolSelection((Camera(),)), limits=limits) as loop:
                state = await loop.run()
            assert state.stop_reason is StopReason.STOP
            told = [m.content for m in state.messages if m.role == "tool"]
            assert told[0] == "look"
            assert told[1].startswith("Error executing tool 'act': its result: carries an image, but ")
            assert not any(m.media for m in state.messages)
            assert [record.error for record in state.tool_results] == [None, told[1]]
            assert state.tool_rewards == [1.0, 1.0], "what the tool did counts"

    run(test)
