from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

import branchline
from branchline.core.errors import EngineError, InputError
from branchline.core.message import Message
from branchline.loop import agents
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.agents import AgentContext, check_tasks, find_agent, run_agent
from branchline.loop.output import build_output
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    ScriptedUser,
    loop_harness,
    run,
)

SCRIPT = LoopScript(
    (
        ScriptedTurn("look", tool_calls=(ScriptedToolCall(result="found"),)),
        ScriptedTurn("so"),
        ScriptedTurn("end"),
    ),
    user_messages=("and?",),
)
PROMPT = (Message("user", "Begin."),)


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    find_agent("")
    monkeypatch.setattr(agents, "_agents", dict(agents._agents))


def context_for(s: LoopHarness, **options: Any) -> AgentContext:
    return AgentContext(s.model, ToolRegistry([s.tool]), InteractionRegistry([s.user]), **options)


@pytest.mark.parametrize("name", ["", "single_turn"])
def test_a_task_that_names_nobody_is_one_answer_without_tools(name: str) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = await run_agent(LoopState.begin(Task(PROMPT, agent_name=name)), context_for(s))
            assert (state.assistant_turns, state.user_turns) == (1, 0)
            assert state.stop_reason is StopReason.ASSISTANT_TURNS, "it wanted a tool, and there was none"
            assert (s.tool.created, s.user.started) == (0, 0)
            assert "tools:" not in s.codec.decode(s.engine.requests[0][1])

    run(test)


def test_the_tool_agent_uses_the_tools_and_the_interaction_of_the_task() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            task = Task(PROMPT, agent_name="tool", tools=("act",), interaction="user")
            state = await run_agent(LoopState.begin(task), context_for(s))
            assert (state.stop_reason, state.assistant_turns, state.user_turns) == (
                StopReason.INTERACTION,
                3,
                2,
            )
            plain = Task(PROMPT, agent_name="tool", tools=())
            s.engine.prompts_by_session.clear()
            state = await run_agent(LoopState.begin(plain), context_for(s))
            assert state.messages[2].content == "Unknown function 'act'. Available tools: []"
            assert state.stop_reason is StopReason.STOP

    run(test)


def test_a_tasks_own_limits_go_before_everybodys() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            everybody = LoopLimits(max_assistant_turns=1)
            own = LoopLimits(max_assistant_turns=2)
            for limits, turns in ((None, 1), (own, 2)):
                s.engine.prompts_by_session.clear()
                task = Task(PROMPT, agent_name="tool", limits=limits)
                state = await run_agent(LoopState.begin(task), context_for(s, limits=everybody))
                assert state.assistant_turns == turns

    run(test)


def test_agents_are_found_by_the_name_they_were_given() -> None:
    async def test() -> None:
        @branchline.agent("echo")
        async def echo(state: LoopState, setting: AgentContext) -> LoopState:
            state.messages.append(Message("assistant", state.messages[-1].content))
            return state

        @branchline.agent("shout")
        async def shout(state: LoopState, setting: AgentContext) -> LoopState:
            state.messages.append(Message("assistant", state.messages[-1].content.upper()))
            return state

        async with loop_harness(SCRIPT) as s:
            tasks = [Task(PROMPT, agent_name=name) for name in ("echo", "shout", "echo")]
            states = [await run_agent(LoopState.begin(task), context_for(s)) for task in tasks]
            assert [state.messages[-1].content for state in states] == ["Begin.", "BEGIN.", "Begin."]
            assert not s.engine.requests

    run(test)


def test_unknown_names_are_refused_before_anything_runs() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            tools, interactions = ToolRegistry([s.tool]), InteractionRegistry([ScriptedUser(())])
            good = Task(PROMPT, agent_name="tool", tools=("act",), interaction="user")
            check_tasks([good, Task(PROMPT)], tools, interactions)
            for bad, words in (
                (Task(PROMPT, agent_name="wizard"), "agent_name: got 'wizard', expected one of"),
                (Task(PROMPT, tools=("saw",)), r"tools\[0\]: got 'saw', expected one of \['act'\]"),
                (Task(PROMPT, tool_arguments={"saw": {}}), "tool_arguments: got 'saw'"),
                (Task(PROMPT, interaction="ghost"), r"interaction: got 'ghost', expected one of \['user'\]"),
            ):
                with pytest.raises(InputError, match=rf"^tasks\[1\]\.{words}"):
                    check_tasks([good, bad], tools, interactions)
            with pytest.raises(InputError, match="'single_turn', 'tool'"):
                await run_agent(LoopState.begin(Task(PROMPT, agent_name="wizard")), context_for(s))
            with pytest.raises(InputError, match=r"tools\[0\]: got 'act', expected one of \[\]"):
                check_tasks([good])
            assert not s.engine.requests
            assert not s.tool.created

    run(test)


def test_a_name_stands_for_one_agent() -> None:
    def define(word: str) -> Any:
        @branchline.agent("mine")
        async def mine(state: LoopState, setting: AgentContext) -> LoopState:
            state.stop_detail = word
            return state

        return mine

    define("one")
    again = define("two")
    assert find_agent("mine") is again, "the same definition, read again"
    with pytest.raises(InputError, match=r"'mine' is .*mine already"):

        @branchline.agent("mine")
        async def other(state: LoopState, setting: AgentContext) -> LoopState:
            return state

    with pytest.raises(InputError, match="agent: got the name ''"):
        branchline.agent("")


# -- agents of one's own -----------------------------------------------------------------------------

CONVERSATION = LoopScript(
    (ScriptedTurn("one two", cancel_points=(1,)), ScriptedTurn("three"), ScriptedTurn("four"))
)


def state_for(name: str, **options: Any) -> LoopState:
    return LoopState.begin(Task(PROMPT, agent_name=name, **options))


@branchline.agent("twice")
async def twice(state: LoopState, setting: AgentContext) -> LoopState:
    """Goes on from wherever its state was left."""
    while state.assistant_turns < 2:
        if state.messages[-1].role == "assistant":
            state.messages.append(Message("user", "Are you sure?"))
        await setting.ask(state)
    state.score = 1.0
    return state


@pytest.mark.parametrize("over_http", [False, True])
def test_what_an_agent_asks_is_in_its_output(over_http: bool) -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted, over_http=over_http) as s:
            state = await run_agent(state_for("twice"), context_for(s))
            assert [message.content for message in state.messages[1:]] == [
                "one two",
                "Are you sure?",
                "three",
            ]
            assert (state.is_finished, state.stop_reason, state.assistant_turns) == (True, StopReason.STOP, 2)
            assert state.call_ids == [reply.call_id for reply in s.model.replies]
            assert state.tokens == len(s.model.replies[1].prompt_ids) + len(s.model.replies[1].ids)
            assert state.metrics.generate_s > 0
            output = await build_output(state, s.model)
            assert int(output.response_mask.sum()) == sum(len(reply.ids) for reply in s.model.replies)
            assert output.reward_score == 1.0
            assert await run_agent(state, context_for(s)) is state
            assert len(s.model.replies) == 2, "what is over is not run again"

    run(test)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("over_http", [False, True])
def test_an_agent_that_is_cancelled_goes_on_behind_what_was_sampled(over_http: bool, by_token: bool) -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION, over_http=over_http) as s:
            state, cancel = state_for("twice"), CancelToken()
            running = asyncio.create_task(run_agent(state, context_for(s, cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            if by_token:
                cancel.cancel()
                assert await running is state
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert (state.is_cancelled, state.is_finished, state.metrics.num_preempted) == (True, False, 1)
            state = LoopState.decode(state.encode())
            state = await run_agent(state, context_for(s, cancel=CancelToken()))
            assert (state.is_cancelled, state.is_finished) == (False, True)
            assert [message.content for message in state.messages[1:]] == [
                "one two",
                "Are you sure?",
                "three",
            ]
            first, again = [prompt for _, prompt in s.engine.requests[:2]]
            assert len(again) == len(first) + 1, "behind the one id it had said"
            assert len((await build_output(state, s.model)).outputs) == 1

    run(test)


def test_a_token_that_was_used_lets_no_agent_begin() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            cancel = CancelToken()
            cancel.cancel()
            state = await run_agent(state_for("twice"), context_for(s, cancel=cancel))
            assert state.is_cancelled
            assert not s.engine.requests

    run(test)


def test_a_call_that_was_begun_behind_another_prompt_is_made_anew() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            setting, state = context_for(s), state_for("x")
            asking = asyncio.create_task(setting.ask(state))
            await s.engine.at_cancel_point.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            begun = state.call_name
            state.messages.append(Message("user", "Something else."))
            assert (await setting.ask(state)).message.content == "three"
            assert state.call_ids == [s.model.replies[0].call_id] != [begun]
            assert state.call_name == ""

    run(test)


def test_other_conversations_are_asked_side_by_side_and_trained_too() -> None:
    @branchline.agent("debate")
    async def debate(state: LoopState, setting: AgentContext) -> LoopState:
        sides = [[Message("user", f"Speak for {side}.")] for side in ("cats", "dogs")]
        replies = await asyncio.gather(*[setting.ask(state, side) for side in sides])
        state.messages += [Message("user", reply.message.content) for reply in replies]
        await setting.ask(state, params={"temperature": 0.5}, tools=[TOOL])
        return state

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            limits = LoopLimits(max_new_tokens=4)
            state = state_for("debate", limits=limits, sampling={"temperature": 0.1})
            state = await run_agent(state, context_for(s))
            assert state.assistant_turns == 1
            assert [len(reply.ids) for reply in s.model.replies] == [4, 4, 4]
            assert sorted(state.call_ids) == sorted(reply.call_id for reply in s.model.replies)
            assert len((await build_output(state, s.model)).outputs) == 3
            assert "looks" in s.codec.decode(s.model.replies[2].prompt_ids)
            assert [call.sampling["temperature"] for call in s.tree.calls] == [0.1, 0.1, 0.5]

    run(test)


TOOL = {"type": "function", "function": {"name": "look", "description": "It looks.", "parameters": {}}}


def test_a_call_that_was_made_behind_everybodys_back_is_trained_too() -> None:
    @branchline.agent("direct")
    async def direct(state: LoopState, setting: AgentContext) -> LoopState:
        reply = await setting.model.ask(state.messages)
        state.messages.append(reply.message)
        async with AgentLoop(setting.model, state, limits=LoopLimits(max_assistant_turns=1)) as loop:
            return await loop.run(setting.cancel)

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            state = await run_agent(state_for("direct"), context_for(s, cancel=CancelToken()))
            output = await build_output(state, s.model)
            assert sorted(state.call_ids) == sorted(reply.call_id for reply in s.model.replies)
            assert int(output.response_mask.sum()) == sum(len(reply.ids) for reply in s.model.replies)

    run(test)


def test_a_loop_inside_an_agent_is_cancelled_with_it() -> None:
    @branchline.agent("looping")
    async def looping(state: LoopState, setting: AgentContext) -> LoopState:
        async with AgentLoop(setting.model, state, tools=setting.tools and setting.tools.select()) as loop:
            return await loop.run(setting.cancel)

    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            cancel = CancelToken()
            running = asyncio.create_task(run_agent(state_for("looping"), context_for(s, cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            state = await running
            assert (state.is_cancelled, state.is_finished, s.tool.released) == (True, False, 1)
            state = await run_agent(state, context_for(s))
            assert (state.stop_reason, state.is_finished, s.tool.released) == (StopReason.STOP, True, 2)

    run(test)


def test_an_error_of_an_agent_leaves_what_it_asked() -> None:
    @branchline.agent("broken")
    async def broken(state: LoopState, setting: AgentContext) -> LoopState:
        await setting.model.ask(state.messages)
        raise ValueError("broken")

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            state = state_for("broken")
            with pytest.raises(ValueError, match="broken"):
                await run_agent(state, context_for(s))
            assert len(state.call_ids) == 1
            assert not state.is_finished

    run(test)


@pytest.mark.parametrize("left_by", ["token", "task", "error"])
def test_an_agent_that_is_left_behind_a_loop_of_its_own_goes_on(left_by: str) -> None:
    @branchline.agent("judged")
    async def judged(state: LoopState, setting: AgentContext) -> LoopState:
        async with AgentLoop(setting.model, state, tools=setting.tools and setting.tools.select()) as loop:
            await loop.run(setting.cancel)
        reply = await setting.ask(state, [Message("user", "Judge it.")])
        state.score = float(len(reply.message.content))
        return state

    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("one"), ScriptedTurn("three", cancel_points=(1,))))
        ) as s:
            state, cancel = state_for("judged"), CancelToken()
            running = asyncio.create_task(run_agent(state, context_for(s, cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            if left_by == "token":
                cancel.cancel()
                assert await running is state
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert (state.is_cancelled, state.is_finished, state.assistant_turns) == (True, False, 1)
            if left_by == "error":
                s.engine.failure = EngineError("gone")
                with pytest.raises(EngineError, match="gone"):
                    await run_agent(state, context_for(s))
                assert (state.is_cancelled, state.is_finished) == (False, False)
                s.engine.failure = None
            state = await run_agent(LoopState.decode(state.encode()), context_for(s))
            assert (state.is_cancelled, state.is_finished, state.stop_reason) == (
                False,
                True,
                StopReason.STOP,
            )
            assert (state.score, state.final_rewards, s.tool.created) == (5.0, {"act": 0.5}, 1)
            assert [message.content for message in state.messages[1:]] == ["one"]
            assert state.call_ids == [reply.call_id for reply in s.model.replies]
            assert await run_agent(state, context_for(s)) is state
            assert len(s.model.replies) == 2, "what is over is not run again"

    run(test)


def test_a_loop_that_an_agent_cancels_by_a_token_of_its_own_leaves_a_trajectory_to_go_on_with() -> None:
    @branchline.agent("impatient")
    async def impatient(state: LoopState, setting: AgentContext) -> LoopState:
        own = CancelToken()
        async with AgentLoop(setting.model, state) as loop:
            running = asyncio.create_task(loop.run(own))
            if not state.metrics.num_preempted:
                await held.wait()
                own.cancel()
            return await running

    held = asyncio.Event()

    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            s.engine.at_cancel_point = held
            state = await run_agent(state_for("impatient"), context_for(s, cancel=CancelToken()))
            assert (state.is_cancelled, state.is_finished) == (True, False)
            state = await run_agent(state, context_for(s))
            assert (state.is_cancelled, state.is_finished, state.messages[-1].content) == (
                False,
                True,
                "one two",
            )

    run(test)


@pytest.mark.parametrize(("asked", "sampled"), [(40, 5), (3, 3), (None, 5)])
def test_what_an_agent_asks_for_does_not_lift_the_limit_of_an_answer(asked: Any, sampled: int) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("a long answer"), ScriptedTurn("a long answer")))
        ) as s:
            setting = context_for(s, limits=LoopLimits(max_new_tokens=5))
            reply = await setting.ask(state_for("x"), params={"max_tokens": asked})
            other = await setting.ask(state_for("x"), [Message("user", "q")], params={"max_tokens": asked})
            assert (len(reply.ids), len(other.ids)) == (sampled, sampled)

    run(test)


def test_a_number_of_tokens_that_is_none_is_refused_under_a_limit_too() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            setting = context_for(s, limits=LoopLimits(max_new_tokens=5))
            for odd in ("many", 2.5, True):
                with pytest.raises(InputError, match=f"max_tokens: got {odd!r}, expected a whole number"):
                    await setting.ask(state_for("x"), params={"max_tokens": odd})

    run(test)


def test_an_agent_that_returns_another_state_than_its_own_says_so() -> None:
    @branchline.agent("copies")
    async def copies(state: LoopState, setting: AgentContext) -> LoopState:
        new = LoopState.decode(state.encode())
        new.messages.append((await setting.model.ask(new.messages)).message)
        return new

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            state = state_for("copies")
            with pytest.raises(
                InputError,
                match="agent 'copies': returned another LoopState, expected the LoopState it was given",
            ):
                await run_agent(state, context_for(s))
            assert state.call_ids == [s.model.replies[0].call_id]
            assert not state.is_finished

    run(test)


async def few(state: LoopState) -> LoopState:
    return state


def plain(state: LoopState, setting: AgentContext) -> LoopState:
    return state


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (plain, "agent 'odd': got <function plain.*, expected an `async def`"),
        (None, "agent 'odd': got None, expected an `async def`"),
        (few, r"agent 'odd': expected to be called with \(state, setting\), but too many positional"),
    ],
)
def test_what_cannot_be_an_agent_is_refused_where_it_is_named(function: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        branchline.agent("odd")(function)
    with pytest.raises(
        InputError, match=r"got the name <function few.*, expected a text .*: @agent\('critic'\)"
    ):
        branchline.agent(few)  # type: ignore[arg-type]


def test_whatever_is_waited_for_with_a_state_and_a_setting_is_an_agent() -> None:
    class Echo:
        async def __call__(self, state: LoopState, setting: AgentContext, *, word: str = "x") -> LoopState:
            state.stop_detail = word
            return state

    async def test() -> None:
        branchline.agent("object")(Echo())
        branchline.agent("partial")(functools.partial(Echo(), word="y"))
        async with loop_harness(CONVERSATION) as s:
            assert (await run_agent(state_for("object"), context_for(s))).stop_detail == "x"
            assert (await run_agent(state_for("partial"), context_for(s))).stop_detail == "y"

    run(test)


def test_an_agent_that_returns_no_state_says_so() -> None:
    @branchline.agent("nothing")
    async def nothing(state: LoopState, setting: AgentContext) -> Any: ...

    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            with pytest.raises(InputError, match="agent 'nothing': returned None, expected the LoopState"):
                await run_agent(state_for("nothing"), context_for(s))

    run(test)


@pytest.mark.parametrize(
    "named", [{"tools": ("act",)}, {"tool_arguments": {"act": {}}}, {"interaction": "user"}]
)
def test_a_task_whose_tools_nobody_would_see_is_refused(named: Any) -> None:
    tools, interactions = ToolRegistry([ScriptedTool(SCRIPT)]), InteractionRegistry([ScriptedUser(())])
    with pytest.raises(InputError, match=r"^tasks\[0\]\.agent_name: got none, .*: 'single_turn' has neither"):
        check_tasks([Task(PROMPT, **named)], tools, interactions)
    for name in ("tool", "single_turn"):
        check_tasks([Task(PROMPT, agent_name=name, **named)], tools, interactions)
    check_tasks([Task(PROMPT), Task(PROMPT, tools=())], tools, interactions)
