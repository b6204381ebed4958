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
from branchline.loop.tools.base import ToolSelection
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
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_custom_agents", dict(agents._custom_agents))


def context_for(s: LoopHarness, **options: Any) -> AgentContext:
    return AgentContext(s.model, ToolRegistry([s.tool]), InteractionRegistry([s.user]), **options)


@pytest.mark.parametrize("name", ["", "single_turn"])
def test_the_default_agent_gives_one_answer_without_tools(name: str) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = await run_agent(LoopState.begin(Task(PROMPT, agent_name=name)), context_for(s))
            assert (state.assistant_turns, state.user_turns) == (1, 0)
            assert state.stop_reason is StopReason.ASSISTANT_TURNS, "it called a tool, and there was none"
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


def test_a_tasks_limits_replace_the_contexts() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            shared = LoopLimits(max_assistant_turns=1)
            own = LoopLimits(max_assistant_turns=2)
            for limits, turns in ((None, 1), (own, 2)):
                s.engine.prompts_by_session.clear()
                task = Task(PROMPT, agent_name="tool", limits=limits)
                state = await run_agent(LoopState.begin(task), context_for(s, limits=shared))
                assert state.assistant_turns == turns

    run(test)


def test_agents_are_found_by_name() -> None:
    async def test() -> None:
        @branchline.agent("echo")
        async def echo(state: LoopState, context: AgentContext) -> LoopState:
            state.messages.append(Message("assistant", state.messages[-1].content))
            return state

        @branchline.agent("shout")
        async def shout(state: LoopState, context: AgentContext) -> LoopState:
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
            for bad, message in (
                (Task(PROMPT, agent_name="wizard"), "agent_name: got 'wizard', expected one of"),
                (Task(PROMPT, tools=("saw",)), r"tools\[0\]: got 'saw', expected one of \['act'\]"),
                (Task(PROMPT, tool_arguments={"saw": {}}), "tool_arguments: got 'saw'"),
                (
                    Task(PROMPT, interaction="unknown"),
                    r"interaction: got 'unknown', expected one of \['user'\]",
                ),
            ):
                with pytest.raises(InputError, match=rf"^tasks\[1\]\.{message}"):
                    check_tasks([good, bad], tools, interactions)
            with pytest.raises(InputError, match=r"'single_turn', 'single_turn_agent'.*'tool', 'tool_agent'"):
                await run_agent(LoopState.begin(Task(PROMPT, agent_name="wizard")), context_for(s))
            with pytest.raises(InputError, match=r"tools\[0\]: got 'act', expected one of \[\]"):
                check_tasks([good])
            assert not s.engine.requests
            assert not s.tool.created

    run(test)


def test_a_name_belongs_to_one_agent() -> None:
    def define(word: str) -> Any:
        @branchline.agent("mine")
        async def mine(state: LoopState, context: AgentContext) -> LoopState:
            state.stop_detail = word
            return state

        return mine

    define("one")
    again = define("two")
    assert find_agent("mine") is again, "the same definition, registered again"
    with pytest.raises(InputError, match=r"'mine' is .*mine already"):

        @branchline.agent("mine")
        async def other(state: LoopState, context: AgentContext) -> LoopState:
            return state

    for name in ("single_turn", "tool"):
        with pytest.raises(InputError, match=rf"'{name}' is branchline\.loop\.agents\..* already"):
            branchline.agent(name)(again)
    with pytest.raises(InputError, match="agent: got the name ''"):
        branchline.agent("")


# -- custom agents -----------------------------------------------------------------------------------

CONVERSATION = LoopScript(
    (ScriptedTurn("one two", cancel_points=(1,)), ScriptedTurn("three"), ScriptedTurn("four"))
)


def state_for(name: str, **options: Any) -> LoopState:
    return LoopState.begin(Task(PROMPT, agent_name=name, **options))


@branchline.agent("twice")
async def twice(state: LoopState, context: AgentContext) -> LoopState:
    """Asks twice, and can be resumed at any point."""
    while state.assistant_turns < 2:
        if state.messages[-1].role == "assistant":
            state.messages.append(Message("user", "Are you sure?"))
        await context.ask(state)
    state.score = 1.0
    return state


@pytest.mark.parametrize("over_http", [False, True])
def test_the_calls_of_an_agent_are_in_its_output(over_http: bool) -> None:
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
            assert len(s.model.replies) == 2, "a finished trajectory is not run again"

    run(test)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("over_http", [False, True])
def test_a_cancelled_agent_resumes_after_the_sampled_ids(over_http: bool, by_token: bool) -> None:
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
            assert (state.is_cancelled, state.is_finished, state.metrics.num_cancelled) == (True, False, 1)
            state = LoopState.decode(state.encode())
            state = await run_agent(state, context_for(s, cancel=CancelToken()))
            assert (state.is_cancelled, state.is_finished) == (False, True)
            assert [message.content for message in state.messages[1:]] == [
                "one two",
                "Are you sure?",
                "three",
            ]
            first, again = [prompt for _, prompt in s.engine.requests[:2]]
            assert len(again) == len(first) + 1, "after the one id that was sampled"
            assert len((await build_output(state, s.model)).outputs) == 1

    run(test)


def test_with_a_cancelled_token_no_agent_starts() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            cancel = CancelToken()
            cancel.cancel()
            state = await run_agent(state_for("twice"), context_for(s, cancel=cancel))
            assert state.is_cancelled
            assert not s.engine.requests

    run(test)


def test_a_call_that_was_started_with_another_prompt_is_started_again() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            context, state = context_for(s), state_for("x")
            call = asyncio.create_task(context.ask(state))
            await s.engine.at_cancel_point.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            earlier = state.call_name
            state.messages.append(Message("user", "Something else."))
            assert (await context.ask(state)).message.content == "three"
            assert state.call_ids == [s.model.replies[0].call_id] != [earlier]
            assert state.call_name == ""

    run(test)


def test_other_conversations_run_concurrently_and_are_trained() -> None:
    @branchline.agent("debate")
    async def debate(state: LoopState, context: AgentContext) -> LoopState:
        sides = [[Message("user", f"Argue for {side}.")] for side in ("cats", "dogs")]
        replies = await asyncio.gather(*[context.ask(state, side) for side in sides])
        state.messages += [Message("user", reply.message.content) for reply in replies]
        await context.ask(state, params={"temperature": 0.5}, tools=[TOOL])
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


def test_a_call_that_bypasses_the_context_is_trained() -> None:
    @branchline.agent("direct")
    async def direct(state: LoopState, context: AgentContext) -> LoopState:
        reply = await context.model.ask(state.messages)
        state.messages.append(reply.message)
        async with AgentLoop(context.model, state, limits=LoopLimits(max_assistant_turns=1)) as loop:
            return await loop.run(context.cancel)

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            state = await run_agent(state_for("direct"), context_for(s, cancel=CancelToken()))
            output = await build_output(state, s.model)
            assert sorted(state.call_ids) == sorted(reply.call_id for reply in s.model.replies)
            assert int(output.response_mask.sum()) == sum(len(reply.ids) for reply in s.model.replies)

    run(test)


def _selection(context: AgentContext) -> ToolSelection | None:
    return None if context.tools is None else context.tools.select()


def test_a_loop_inside_an_agent_is_cancelled_with_it() -> None:
    @branchline.agent("looping")
    async def looping(state: LoopState, context: AgentContext) -> LoopState:
        async with AgentLoop(context.model, state, tools=_selection(context)) as loop:
            return await loop.run(context.cancel)

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


def test_calls_before_an_error_of_the_agent_are_recorded() -> None:
    @branchline.agent("broken")
    async def broken(state: LoopState, context: AgentContext) -> LoopState:
        await context.model.ask(state.messages)
        raise ValueError("broken")

    async def test() -> None:
        async with loop_harness(CONVERSATION.uninterrupted) as s:
            state = state_for("broken")
            with pytest.raises(ValueError, match="broken"):
                await run_agent(state, context_for(s))
            assert len(state.call_ids) == 1
            assert not state.is_finished

    run(test)


@pytest.mark.parametrize("interrupted_by", ["token", "task", "error"])
def test_an_agent_that_is_interrupted_after_its_loop_can_be_resumed(interrupted_by: str) -> None:
    @branchline.agent("scored")
    async def scored(state: LoopState, context: AgentContext) -> LoopState:
        async with AgentLoop(context.model, state, tools=_selection(context)) as loop:
            await loop.run(context.cancel)
        reply = await context.ask(state, [Message("user", "Score it.")])
        state.score = float(len(reply.message.content))
        return state

    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("one"), ScriptedTurn("three", cancel_points=(1,))))
        ) as s:
            state, cancel = state_for("scored"), CancelToken()
            running = asyncio.create_task(run_agent(state, context_for(s, cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            if interrupted_by == "token":
                cancel.cancel()
                assert await running is state
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert (state.is_cancelled, state.is_finished, state.assistant_turns) == (True, False, 1)
            if interrupted_by == "error":
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
            assert len(s.model.replies) == 2, "a finished trajectory is not run again"

    run(test)


def test_a_loop_that_its_agent_cancels_can_be_resumed() -> None:
    @branchline.agent("cancelling")
    async def cancelling(state: LoopState, context: AgentContext) -> LoopState:
        token = CancelToken()
        async with AgentLoop(context.model, state) as loop:
            running = asyncio.create_task(loop.run(token))
            if not state.metrics.num_cancelled:
                await at_cancel_point.wait()
                token.cancel()
            return await running

    at_cancel_point = asyncio.Event()

    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            s.engine.at_cancel_point = at_cancel_point
            state = await run_agent(state_for("cancelling"), context_for(s, cancel=CancelToken()))
            assert (state.is_cancelled, state.is_finished) == (True, False)
            state = await run_agent(state, context_for(s))
            assert (state.is_cancelled, state.is_finished, state.messages[-1].content) == (
                False,
                True,
                "one two",
            )

    run(test)


@pytest.mark.parametrize(("max_tokens", "sampled"), [(40, 5), (3, 3), (None, 5)])
def test_params_can_only_lower_max_new_tokens(max_tokens: Any, sampled: int) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn("a long answer"), ScriptedTurn("a long answer")))
        ) as s:
            context = context_for(s, limits=LoopLimits(max_new_tokens=5))
            reply = await context.ask(state_for("x"), params={"max_tokens": max_tokens})
            other = await context.ask(
                state_for("x"), [Message("user", "q")], params={"max_tokens": max_tokens}
            )
            assert (len(reply.ids), len(other.ids)) == (sampled, sampled)

    run(test)


def test_invalid_max_tokens_are_refused() -> None:
    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            context = context_for(s, limits=LoopLimits(max_new_tokens=5))
            for value in ("many", 2.5, True):
                with pytest.raises(InputError, match=f"max_tokens: got {value!r}, expected a whole number"):
                    await context.ask(state_for("x"), params={"max_tokens": value})

    run(test)


def test_an_agent_that_returns_another_state_is_refused() -> None:
    @branchline.agent("copies")
    async def copies(state: LoopState, context: AgentContext) -> LoopState:
        new = LoopState.decode(state.encode())
        new.messages.append((await context.model.ask(new.messages)).message)
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


async def one_parameter(state: LoopState) -> LoopState:
    return state


def plain(state: LoopState, context: AgentContext) -> LoopState:
    return state


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (plain, "agent 'odd': got <function plain.*, expected an `async def`"),
        (None, "agent 'odd': got None, expected an `async def`"),
        (
            one_parameter,
            r"agent 'odd': expected to be called with \(state, context\), but too many positional",
        ),
    ],
)
def test_a_function_that_cannot_be_an_agent_is_refused(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        branchline.agent("odd")(function)
    with pytest.raises(
        InputError,
        match=r"got the name <function one_parameter.*, expected a non-empty text.*: @agent\('critic'\)",
    ):
        branchline.agent(one_parameter)  # type: ignore[arg-type]


def test_callable_objects_and_partials_can_be_agents() -> None:
    class Echo:
        async def __call__(self, state: LoopState, context: AgentContext, *, word: str = "x") -> LoopState:
            state.stop_detail = word
            return state

    async def test() -> None:
        branchline.agent("object")(Echo())
        branchline.agent("partial")(functools.partial(Echo(), word="y"))
        async with loop_harness(CONVERSATION) as s:
            assert (await run_agent(state_for("object"), context_for(s))).stop_detail == "x"
            assert (await run_agent(state_for("partial"), context_for(s))).stop_detail == "y"

    run(test)


def test_an_agent_that_returns_no_state_is_refused() -> None:
    @branchline.agent("nothing")
    async def nothing(state: LoopState, context: AgentContext) -> Any: ...

    async def test() -> None:
        async with loop_harness(CONVERSATION) as s:
            with pytest.raises(InputError, match="agent 'nothing': returned None, expected the LoopState"):
                await run_agent(state_for("nothing"), context_for(s))

    run(test)


@pytest.mark.parametrize(
    "fields", [{"tools": ("act",)}, {"tool_arguments": {"act": {}}}, {"interaction": "user"}]
)
def test_tools_without_an_agent_that_uses_them_are_refused(fields: Any) -> None:
    tools, interactions = ToolRegistry([ScriptedTool(SCRIPT)]), InteractionRegistry([ScriptedUser(())])
    with pytest.raises(
        InputError, match=r"^tasks\[0\]\.agent_name: got none with .*: 'single_turn' uses neither"
    ):
        check_tasks([Task(PROMPT, **fields)], tools, interactions)
    for name in ("tool", "single_turn"):
        check_tasks([Task(PROMPT, agent_name=name, **fields)], tools, interactions)
    check_tasks([Task(PROMPT), Task(PROMPT, tools=())], tools, interactions)
