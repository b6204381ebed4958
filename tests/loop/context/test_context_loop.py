from __future__ import annotations

from typing import Any

import pytest

from branchline.core.context_edits import ContextEdit, read_summary
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop.agents import AgentContext, check_tasks, run_agent
from branchline.loop.context.context_loop import ContextLoop, ContextOptions
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.runtime.compaction import Compaction, DropOldest, Summarize
from branchline.timelines.causes import Cause, classify_forks
from tests.loop.context.harness import EchoTool, answer, call, context_harness
from tests.loop.harness import run, tree_values

LONG = "long text " * 40
ECHOES = [answer(call("echo", text=f"{index} {LONG}"), text=f"turn {index}") for index in range(6)]
FINISH = answer(call("finish", answer="x"), text="done")


async def first_prompt_tokens(**options: Any) -> int:
    async with context_harness([answer(text="end")], **options) as s:
        await s.run()
        return len(s.model.replies[0].prompt_ids)


def test_without_its_tools_the_agent_is_the_plain_tool_agent() -> None:
    async def test() -> None:
        answers = [*ECHOES[:2], answer(text="end")]
        async with (
            context_harness(answers, tools=("echo",)) as s,
            context_harness(answers, tools=("echo",)) as t,
        ):
            state = await s.run()
            plain = Task(t.task().messages, agent_name="tool", tools=("echo",))
            context = AgentContext(t.model, ToolRegistry([EchoTool()]))
            expected = await run_agent(LoopState.begin(plain), context)
            assert tree_values(s.managed) == tree_values(t.managed)
            assert state.context is None
            assert [m.content for m in state.messages] == [m.content for m in expected.messages]
            assert state.stop_reason is expected.stop_reason is StopReason.STOP

    run(test)


def test_without_its_tools_a_full_context_has_no_penalty() -> None:
    async def test() -> None:
        length = await first_prompt_tokens(tools=("echo",)) + 500
        async with context_harness(ECHOES, tools=("echo",), limits=LoopLimits(model_length=length)) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.MODEL_LENGTH
            assert (state.reward_score, state.metrics.context_length_exceeded) == (None, False)

    run(test)


def test_a_task_that_names_no_tools_gets_all_of_them() -> None:
    async def test() -> None:
        async with context_harness([FINISH], tools=None) as s:
            await s.run()
            prompt = s.codec.decode(s.model.replies[0].prompt_ids)
            assert '"name": "echo"' in prompt
            assert '"name": "deleteContext"' in prompt

    run(test)


def test_tasks_of_other_agents_cannot_name_these_tools() -> None:
    task = Task((), agent_name="state", tools=("deleteContext", "echo"))
    check_tasks([task], ToolRegistry([EchoTool()]))
    with pytest.raises(InputError, match=r"tasks\[0\].tools\[0\]: got 'deleteContext'"):
        check_tasks([Task((), agent_name="tool", tools=("deleteContext",))])
    with pytest.raises(InputError, match=r"tasks\[0\].tools\[0\]: got 'missing'"):
        check_tasks([Task((), agent_name="state", tools=("deleteContext", "missing"))])


def test_finish_ends_the_trajectory_after_all_calls_of_its_turn() -> None:
    async def test() -> None:
        last = answer(call("finish", answer="42"), call("echo", text="too"))
        async with context_harness([last]) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.FINISH
            assert state.context is not None
            assert state.context.final_answer == "42"
            assert [m.role for m in state.messages] == ["system", "user", "assistant", "tool", "tool"]
            assert s.managed.rewards == []
            assert s.managed.state == "completed"

    run(test)


def test_the_session_gets_the_penalty_and_its_reason() -> None:
    async def test() -> None:
        length = await first_prompt_tokens() + 700
        async with context_harness(ECHOES, limits=LoopLimits(model_length=length)) as s:
            await s.run()
            (reward,) = s.managed.rewards
            assert reward["score"] == -1.0
            assert reward["extras"]["stop_reason"] == "model_length"
            assert reward["extras"]["context_length_exceeded"] is True

    run(test)


def test_the_engines_own_context_length_is_protected_too() -> None:
    async def test() -> None:
        async with context_harness(ECHOES) as s:
            s.engine.max_context = await first_prompt_tokens() + 700
            state = await s.run()
            assert state.stop_reason is StopReason.MODEL_LENGTH
            assert (state.reward_score, state.metrics.context_length_exceeded) == (-1.0, True)

    run(test)


def test_a_policy_keeps_a_trajectory_below_its_length() -> None:
    async def test() -> None:
        length = await first_prompt_tokens() + 3200
        options = ContextOptions(response_room=600, compaction=DropOldest(2))
        async with context_harness(
            [*ECHOES, FINISH], limits=LoopLimits(model_length=length), options=options
        ) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.FINISH
            assert state.context is not None
            assert state.context.compactions
            assert max(len(reply.prompt_ids) for reply in s.model.replies) <= length
            assert state.tokens <= length
            forks = classify_forks(s.tree).forks
            assert {fork.cause for fork in forks} == {Cause.CONTEXT_DELETE}

    run(test)


def test_the_model_writes_the_summary_that_replaces_its_context() -> None:
    async def test() -> None:
        length = await first_prompt_tokens() + 3200
        options = ContextOptions(response_room=600, compaction=Summarize(keep_last=2))
        summary = answer(text="I have echoed three long texts.")
        answers = [*ECHOES[:3], summary, *ECHOES[3:4], FINISH]
        async with context_harness(answers, limits=LoopLimits(model_length=length), options=options) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.FINISH
            assert state.context is not None
            assert state.context.compactions == [ContextEdit((2, 3, 4, 5), summary.content)]
            view = state.context.view(state.messages)
            assert read_summary(view.messages[2]) == summary.content
            assert len(state.call_ids) == state.assistant_turns + 1 == 6, "the summary is trained too"
            forks = classify_forks(s.tree)
            assert {fork.cause for fork in forks.forks} == {Cause.COMPACTION}
            assert forks.edges[0].source.message.content == summary.content
            export = s.managed.export()
            assert export.report.is_balanced
            assert not export.report.dropped

    run(test)


def test_a_policy_that_replaces_nothing_more_ends_in_the_penalty() -> None:
    class DropNothingNew:
        def plan(self, messages: Any, tokens: Any, excess: int) -> Compaction | None:
            return Compaction((2,))

    async def test() -> None:
        length = await first_prompt_tokens() + 1500
        options = ContextOptions(compaction=DropNothingNew())
        async with context_harness(ECHOES, limits=LoopLimits(model_length=length), options=options) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.MODEL_LENGTH
            assert state.context is not None
            assert state.context.compactions == [ContextEdit((2,))]

    run(test)


def test_a_session_without_a_call_for_the_summary_ends_the_trajectory() -> None:
    async def test() -> None:
        length = await first_prompt_tokens() + 3200
        options = ContextOptions(compaction=Summarize(keep_last=2))
        async with context_harness(
            ECHOES, limits=LoopLimits(model_length=length), options=options, calls_limit=3
        ) as s:
            state = await s.run()
            assert state.stop_reason is StopReason.SESSION_CALLS
            assert (state.penalty, state.metrics.context_length_exceeded) == (None, False)

    run(test)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"response_room": 0}, "response_room: got 0, expected a whole number of 1 or more"),
        ({"compaction_target": 0}, "compaction_target: got 0"),
        ({"compaction_target": 1.5}, "compaction_target: got 1.5"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ContextOptions(**options)


def test_a_policy_needs_a_length() -> None:
    model: Any = None
    state = LoopState.begin(Task((Message("user", "x"),)))
    with pytest.raises(InputError, match=r"limits\.model_length: got None with a compaction policy"):
        ContextLoop(model, state, context_options=ContextOptions(compaction=DropOldest()))
