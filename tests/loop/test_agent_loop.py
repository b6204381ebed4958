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
from branchline.loop.task import LoopLimits, Task, TruncateUnit
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


def test_a_prompt_without_room_for_an_answer_is_not_sent() -> None:
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
def test_an_engine_without_room_ends_the_trajectory(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, ScriptedTurn("end"))), over_http=over_http) as s:
            await s.run_once()
            size = len(s.model.replies[1].prompt_ids)
            for max_context, detail in (
                (size, f"the engine has no room after {size} tokens"),
                (size - 1, str(ContextLengthError.for_prompt(size, size - 1))),
            ):
                s.engine.max_context = max_context
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
def test_the_stop_reason_names_the_limit_that_cut_an_answer(limits: LoopLimits, reason: StopReason) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            state = await s.run_once(limits=limits)
            assert state.stop_reason is reason
            assert len(s.model.replies[0].ids) == min(2 if reason is not StopReason.STOP else 4, 4)

    run(test)


def test_each_answer_may_use_the_rest_of_the_response_length() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, TOOL_TURN, ScriptedTurn("a long answer")))) as s:
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
@pytest.mark.parametrize("max_context", [None, 4500, 6000])
def test_without_a_limit_an_answer_may_fill_the_engines_context(
    max_context: int | None, over_http: bool
) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("word " * 900),)), over_http=over_http) as s:
            s.engine.max_context = max_context
            state = await s.run_once(limits=LoopLimits())
            (reply,) = s.model.replies
            if max_context is None:
                assert (state.stop_reason, len(reply.ids)) == (StopReason.LENGTH, 4096), "the fallback"
            elif max_context == 4500:
                assert state.stop_reason is StopReason.LENGTH
                assert len(reply.prompt_ids) + len(reply.ids) == max_context
            else:
                assert (state.stop_reason, len(reply.ids)) == (StopReason.STOP, len(s.engine.answers[0]))

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_sessions_max_tokens_can_only_lower_a_limit(over_http: bool) -> None:
    async def test() -> None:
        for max_tokens, length in ((200, 10), (4, 4)):
            async with loop_harness(
                LoopScript((ScriptedTurn("a rather long answer"),)),
                over_http=over_http,
                sampling={"max_tokens": max_tokens},
            ) as s:
                state = await s.run_once(limits=LoopLimits(response_length=10))
                assert len((await build_output(state, s.model)).response_ids) == length
                assert state.stop_reason is (
                    StopReason.RESPONSE_LENGTH if length == 10 else StopReason.LENGTH
                )

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize(
    ("limits", "reason", "message"),
    [
        (SessionLimits(calls=1), StopReason.SESSION_CALLS, "may make 1 calls and has made them"),
        (SessionLimits(tokens=40), StopReason.SESSION_TOKENS, "may sample 40 tokens and has sampled them"),
    ],
)
def test_an_exhausted_session_ends_the_trajectory_which_is_scored(
    limits: SessionLimits, reason: StopReason, message: str, over_http: bool
) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((TOOL_TURN, ScriptedTurn("end"))), over_http=over_http) as s:
            assert len(s.engine.answers[0]) == 40
            s.managed.options = structs.replace(s.managed.options, limits=limits)
            state = await s.run_once()
            assert (state.stop_reason, roles(state)[-1]) == (reason, "tool")
            assert state.stop_detail.endswith(message)
            assert (state.is_finished, state.final_rewards) == (True, {"act": 0.5})
            # A finished trajectory does not run again.
            assert (await s.run_once(state)).stop_reason is reason

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_closed_session_is_an_error(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),)), over_http=over_http) as s:
            await s.managed.set_state("finalized")
            with pytest.raises(SessionError) as closed:
                await s.run_once()
            assert closed.value.kind == "closed"

    run(test)


def test_the_gateways_prompt_limit_ends_the_trajectory_which_is_scored() -> None:
    async def test() -> None:
        codec, script, prompt = (
            ToyCodec.chatml(),
            LoopScript((TOOL_TURN, ScriptedTurn("end"))),
            (Message("user", "Begin."),),
        )
        limit = codec.count_tokens(prompt, [ScriptedTool.schema]) + len(encode_answers(codec, script)[0])
        config = GatewayConfig(max_prompt_tokens=limit)
        async with Gateway(
            engine=ResumableScriptedEngine(encode_answers(codec, script)), codec=codec, config=config
        ) as gateway:
            session = await gateway.session()
            async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
                state = LoopState.begin(Task(prompt))
                async with AgentLoop(model, state, tools=ToolSelection((ScriptedTool(script),))) as loop:
                    await loop.run()
        assert (state.stop_reason, roles(state)) == (StopReason.MODEL_LENGTH, ["user", "assistant", "tool"])
        assert f"> {limit} maximum" in state.stop_detail
        assert state.final_rewards == {"act": 0.5}

    run(test)


# -- the last turn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("kind", ["assistant", "user", "length"])
def test_the_last_answer_that_a_limit_allows_is_scored_and_not_answered(kind: str, over_http: bool) -> None:
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
            assert state.score == 2.0, "the interaction got both answers"

    run(test)


def test_a_last_answer_with_tool_calls_is_not_scored() -> None:
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


def test_a_last_answer_stays_the_last_after_a_cancellation() -> None:
    class BlockingInteraction(CountingInteraction):
        def __init__(self) -> None:
            super().__init__()
            self.responding = asyncio.Event()

        async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
            if not self.responding.is_set():
                self.responding.set()
                await asyncio.Event().wait()
            return await super().respond(state, messages)

    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("one"), ScriptedTurn("two")))) as s:
            state, interaction, cancel = LoopState.begin(s.task()), BlockingInteraction(), CancelToken()
            limits, config = LoopLimits(max_assistant_turns=1), InteractionConfig(interaction)
            async with AgentLoop(s.model, state, interaction=config, limits=limits) as loop:
                task = asyncio.create_task(loop.run(cancel))
                await interaction.responding.wait()
                cancel.cancel()
                assert (await task).is_cancelled
            state = LoopState.decode(state.encode())
            assert (state.phase, state.is_finished) == (LoopPhase.INTERACTING, False)
            async with AgentLoop(s.model, state, interaction=config, limits=limits) as loop:
                state = await loop.run()
            assert (state.stop_reason, state.turn_scores, interaction.responses) == (
                StopReason.ASSISTANT_TURNS,
                [1.0],
                1,
            )
            assert len(s.engine.requests) == 1

    run(test)


def test_the_complete_calls_of_a_cut_answer_are_run() -> None:
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


# -- the wall clock ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["generating", "tools"])
def test_the_wall_clock_limit_abandons_the_running_step(where: str) -> None:
    async def test() -> None:
        blocked_turn = (
            ScriptedTurn("abandoned", cancel_points=(3,))
            if where == "generating"
            else ScriptedTurn(tool_calls=(ScriptedToolCall(cancels=1),))
        )
        async with loop_harness(LoopScript((TOOL_TURN, blocked_turn))) as s:
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


def test_the_wall_clock_limit_keeps_finished_tool_calls() -> None:
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
            assert [result.content for result in state.tool_results] == ["quick", "too"]
            assert (state.pending_results, state.pending_calls) == ({}, [])
            assert roles(state)[-1] == "assistant", "the results are not in the conversation"

    run(test)


@pytest.mark.parametrize("unit", ["characters", "tokens"])
def test_the_wall_clock_limit_truncates_the_results_that_it_keeps(unit: TruncateUnit) -> None:
    async def test() -> None:
        calls = (ScriptedToolCall(result="0123456789"), ScriptedToolCall(result="slow", cancels=1))
        async with loop_harness(LoopScript((ScriptedTurn(tool_calls=calls), ScriptedTurn("end")))) as s:
            state = LoopState.begin(s.task())
            limits = LoopLimits(wall_clock_s=100, tool_response_length=4, tool_response_unit=unit)
            task = asyncio.create_task(s.run_once(state, limits=limits))
            await s.tool.at_cancel_point.wait()
            while not state.pending_results:
                await asyncio.sleep(0)
            move_clock(101)
            assert (await task).stop_reason is StopReason.WALL_CLOCK
            assert [result.content for result in state.tool_results] == ["01...(truncated)...89"]

    run(test)


def test_the_wall_clock_limit_keeps_a_scored_turn() -> None:
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


def test_the_wall_clock_limit_counts_all_runs() -> None:
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


def test_a_cancelled_task_leaves_a_state_that_can_be_resumed() -> None:
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


def test_with_a_cancelled_token_nothing_starts() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            cancel = CancelToken()
            cancel.cancel()
            state = await s.run_once(cancel=cancel)
            assert (state.is_cancelled, state.phase, s.engine.requests) == (True, LoopPhase.PENDING, [])

    run(test)


def test_finished_tool_calls_do_not_run_again() -> None:
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
            assert [(result.tool, result.turn) for result in state.tool_results] == [("act", 1)] * 2

    run(test)


class BlockingCountModel:
    """A model that blocks when it counts tokens, after `passes` counts."""

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
    """Counts its responses."""

    name = "counted"

    def __init__(self) -> None:
        self.responses = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        return None, "first message"

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        self.responses += 1
        return InteractionResponse(
            self.responses == 2, f"answer {self.responses}", score=float(self.responses)
        )


def test_a_response_is_not_requested_twice() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("one"), ScriptedTurn("two")))) as s:
            model, config = BlockingCountModel(s.model), InteractionConfig(CountingInteraction())
            state = LoopState.begin(s.task())
            limits = LoopLimits(response_length=1000)
            # Cancelled while the first prompt is counted, and again while the interaction's response is.
            for passes in (0, 1):
                model.passes = passes
                model.counting.clear()
                cancel = CancelToken()
                async with AgentLoop(model, state, interaction=config, limits=limits) as loop:  # type: ignore[arg-type]
                    task = asyncio.create_task(loop.run(cancel))
                    await model.counting.wait()
                    cancel.cancel()
                    assert (await task).is_cancelled
                state = LoopState.decode(state.encode())
            assert state.pending_response is not None
            model.passes = 9
            async with AgentLoop(model, state, interaction=config, limits=limits) as loop:  # type: ignore[arg-type]
                state = await loop.run()
            assert [m.content for m in state.messages[2:]] == [
                *["first message", "one", "answer 1", "two", "answer 2"]
            ]
            assert state.turn_scores == [1.0, 2.0]
            assert (state.stop_reason, state.user_turns) == (StopReason.INTERACTION, 1)

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_a_lost_answer_is_repeated_and_trained_once(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("lost answer"),)), over_http=over_http) as s:
            state = LoopState.begin(s.task())
            state.phase, state.call_name = LoopPhase.GENERATING, "turn-1"
            # The call that the loop is about to make, completed before; its client never got the answer.
            lost = await s.model.ask(state.messages, tools=[s.tool.schema], call_name="turn-1")
            state = await s.run_once(state)
            assert state.messages[-1].content == "lost answer"
            assert len(s.engine.requests) == 1, "nothing was sampled twice"
            assert [call.id for call in s.tree.calls] == ["turn-1", "turn-1~2"]
            (sample,) = (await build_output(state, s.model)).outputs
            assert sample.response_ids.tolist() == lost.ids.tolist()
            assert export_samples(s.tree).report.sampled_tokens == len(lost.ids)

    run(test)


@pytest.mark.parametrize("over_http", [False, True])
def test_an_answer_that_was_started_with_other_tools_is_started_again(over_http: bool) -> None:
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
def test_an_engine_error_is_raised_and_the_state_can_be_resumed(over_http: bool) -> None:
    async def test() -> None:
        script = LoopScript((TOOL_TURN, ScriptedTurn("a long answer", cancel_points=(3,))))
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
            assert state.messages[-1].content == "a long answer"
            report = export_samples(s.tree).report
            assert not report.dropped, "the call is resumed after the error"
            assert (s.tool.created, s.tool.released) == (3, 3)

    run(test)


class FailingInteraction(BaseInteraction):
    """Raises in one method."""

    name = "broken"

    def __init__(self, where: str) -> None:
        self._where = where
        self.finalized = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        self._fail_at("start")
        return None, None

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
def test_an_error_of_the_interaction_is_a_fault_and_everything_is_released(where: str) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            broken, state = FailingInteraction(where), LoopState.begin(s.task())
            async with AgentLoop(
                s.model, state, tools=ToolSelection((s.tool,)), interaction=InteractionConfig(broken)
            ) as loop:
                await loop.run()
            assert (s.tool.created, s.tool.released) == (1, 1)
            assert broken.finalized == (where != "start")
            assert (state.is_finished, state.score) == (True, None)
            assert [str(fault) for fault in state.faults] == [f"broken: {where}: {where}"]

    run(test)


def test_truncation_by_tokens_needs_a_codec() -> None:
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


# -- media -------------------------------------------------------------------------------------------


class Camera(BaseTool):
    """Returns a text, and an image for the second call."""

    name = "act"
    schema = ScriptedTool.schema

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        pictures = (media_from_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20)),) if arguments["index"] else ()
        return ToolResult("look", pictures, reward=1.0)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("limits", [LoopLimits(), LoopLimits(response_length=5000)])
def test_media_that_the_codec_refuses_become_an_error_for_the_model(
    over_http: bool, limits: LoopLimits
) -> None:
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
            contents = [m.content for m in state.messages if m.role == "tool"]
            assert contents[0] == "look"
            assert contents[1].startswith("Error executing tool 'act': its result: carries an image, but ")
            assert not any(m.media for m in state.messages)
            assert [result.error for result in state.tool_results] == [None, contents[1]]
            assert state.tool_rewards == [1.0, 1.0]

    run(test)
