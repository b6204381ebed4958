from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.core.message import Message, ToolCall
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.interaction import InteractionResponse
from branchline.loop.registry import InteractionRegistry
from branchline.loop.simulated_user import EMPTY_TURN, GREETING, STOP_MARKER, SimulatedUser, swap_roles
from branchline.loop.state import LoopState
from branchline.loop.task import Task
from branchline.loop.timeouts import CancelToken
from tests.loop.harness import LoopScript, ScriptedTurn, loop_harness, run

CONVERSATION = (
    Message("system", "You sell trains."),
    Message("user", "A train, please."),
    Message("assistant", "", reasoning_content="where to?", tool_calls=(ToolCall("trains", "{}", "c1"),)),
    Message("tool", "none", tool_call_id="c1"),
    Message("assistant", "Where to?", reasoning_content="ask"),
)


class ScriptedCompletion:
    """Returns its lines in order and records the messages it got."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.seen: list[tuple[Message, ...]] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.seen.append(tuple(messages))
        return self.lines.pop(0)


def roles_and_contents(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_roles_are_swapped() -> None:
    assert roles_and_contents(swap_roles("You are Ann.", CONVERSATION)) == [
        ("system", "You are Ann."),
        ("user", GREETING),
        ("assistant", "A train, please."),
        ("user", "Where to?"),
    ]


def test_answers_around_a_tool_call_are_one_message() -> None:
    calling = Message("assistant", "Let me look.", tool_calls=(ToolCall("trains", "{}"),))
    messages = (*CONVERSATION[:2], calling, Message("tool", "none"), Message("assistant", "There are none."))
    assert roles_and_contents(swap_roles("", messages))[-1] == ("user", "Let me look.\n\nThere are none.")


def test_a_conversation_opened_by_the_assistant_needs_no_greeting() -> None:
    messages = (Message("assistant", "Hi."), Message("assistant", "Well?"), Message("user", "Yes."))
    assert roles_and_contents(swap_roles("B", messages)) == [
        ("system", "B"),
        ("user", "Hi.\n\nWell?"),
        ("assistant", "Yes."),
    ]


def test_an_answer_without_text_is_replaced() -> None:
    messages = (*CONVERSATION[:2], Message("assistant", " ", reasoning_content="hm"))
    assert roles_and_contents(swap_roles("B", messages)) == [
        ("system", "B"),
        ("user", GREETING),
        ("assistant", "A train, please."),
        ("user", EMPTY_TURN),
    ]


def test_other_braces_of_a_prompt_template_stay() -> None:
    async def test() -> None:
        template = 'Answer as {"persona": "{persona}"}, {goal}, {} and {stop}.'
        user = SimulatedUser(
            ScriptedCompletion(), goal="a {stop}", persona="P", prompt_template=template, stop="<end>"
        )
        state, _ = await user.start("t1")
        assert state.system_prompt == 'Answer as {"persona": "P"}, a {stop}, {} and <end>.'

    run(test)


def test_the_first_message_is_generated_once_however_often_the_trajectory_is_cancelled() -> None:
    async def test() -> None:
        complete = ScriptedCompletion("A train, please.", STOP_MARKER)
        async with loop_harness(LoopScript((ScriptedTurn("one two three", cancel_points=(1, 1, 1)),))) as s:
            task = Task((Message("system", "x"),), agent_name="tool", interaction="simulated_user")
            state = LoopState.begin(task)
            for _ in range(3):
                cancel = CancelToken()
                user = SimulatedUser(complete, goal="A train.", opens=True)
                context = AgentContext(s.model, interactions=InteractionRegistry([user]), cancel=cancel)
                s.engine.at_cancel_point.clear()
                running = asyncio.create_task(run_agent(state, context))
                await s.engine.at_cancel_point.wait()
                cancel.cancel()
                state = LoopState.decode((await running).encode())
                assert len(complete.seen) == 1
            context = AgentContext(s.model, interactions=InteractionRegistry([user]))
            state = await run_agent(state, context)
            assert [message.content for message in state.messages] == [
                "x",
                "A train, please.",
                "one two three",
            ]
            assert [seen[0] for seen in complete.seen] == [complete.seen[0][0]] * 2, "the same system prompt"

    run(test)


def test_persona_and_goal_come_from_the_sample_or_from_the_interaction() -> None:
    async def test() -> None:
        user = SimulatedUser(ScriptedCompletion("To Bergen."), persona="A traveller.", goal="A train.")
        state, first = await user.start("t1")
        assert first is None
        assert "A traveller." in state.system_prompt
        assert "A train." in state.system_prompt
        assert STOP_MARKER in state.system_prompt
        state, _ = await user.start("t2", persona="A {pilot}.", goal="A plane.")
        assert "A {pilot}." in state.system_prompt
        assert "A plane." in state.system_prompt

    run(test)


def test_a_response_ends_at_the_marker() -> None:
    async def test() -> None:
        complete = ScriptedCompletion(" To Bergen. ", f"Thanks.\n{STOP_MARKER}", STOP_MARKER, "  ")
        user = SimulatedUser(complete, goal="A train.")
        state, _ = await user.start("t1")
        responses = [await user.respond(state, CONVERSATION) for _ in range(4)]
        assert responses == [
            InteractionResponse(False, "To Bergen."),
            InteractionResponse(True, "Thanks.", extras={"ended_by": "marker"}),
            InteractionResponse(True, "", extras={"ended_by": "marker"}),
            InteractionResponse(True, "", extras={"ended_by": "silence"}),
        ]
        assert complete.seen == [swap_roles(state.system_prompt, CONVERSATION)] * 4
        assert await user.score(state) is None
        await user.finalize(state)

    run(test)


@pytest.mark.parametrize("per_task", [False, True])
def test_a_user_that_opens_sends_the_first_message(per_task: bool) -> None:
    async def test() -> None:
        complete = ScriptedCompletion("A train, please.")
        user = SimulatedUser(complete, goal="A train.", opens=not per_task, name="ann", stop="<end>")
        arguments: dict[str, Any] = {"opens": True} if per_task else {}
        state, first = await user.start("t1", **arguments)
        assert first == "A train, please."
        assert roles_and_contents(complete.seen[0])[1:] == [("user", GREETING)]
        assert "<end>" in state.system_prompt

    run(test)


def test_invalid_arguments_are_refused() -> None:
    async def test() -> None:
        with pytest.raises(InputError, match="goal of 'simulated_user': got none, expected what"):
            await SimulatedUser(ScriptedCompletion()).start("t1")
        with pytest.raises(InputError, match=r"got \['gaol'\], expected persona, goal, opens"):
            await SimulatedUser(ScriptedCompletion(), goal="x").start("t1", gaol="y")

    run(test)
    with pytest.raises(InputError, match="stop: got ''"):
        SimulatedUser(ScriptedCompletion(), stop="")
