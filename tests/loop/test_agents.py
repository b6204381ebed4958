from __future__ import annotations

from typing import Any

import pytest

import branchline
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop import agents
from branchline.loop.agents import Setting, check, find_agent, run_agent
from branchline.loop.interactions.registry import InteractionRegistry
from branchline.loop.state import Ending, LoopLimits, LoopState, Task
from branchline.loop.tools.registry import ToolRegistry
from tests.loop.playing import Deed, Script, Stage, Turn, User, stage
from tests.loop.running import run

SCRIPT = Script((Turn("look", deeds=(Deed(text="found"),)), Turn("so"), Turn("end")), user=("and?",))
PROMPT = (Message("user", "Begin."),)


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    find_agent("")
    monkeypatch.setattr(agents, "_agents", dict(agents._agents))


def setting_of(s: Stage, **options: Any) -> Setting:
    return Setting(s.model, ToolRegistry([s.tool]), InteractionRegistry([s.user]), **options)


@pytest.mark.parametrize("name", ["", "single_turn"])
def test_a_task_that_names_nobody_is_one_answer_without_tools(name: str) -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            state = await run_agent(LoopState.begin(Task(PROMPT, agent_name=name)), setting_of(s))
            assert (state.assistant_turns, state.user_turns) == (1, 0)
            assert state.reason is Ending.ASSISTANT_TURNS, "it wanted a tool, and there was none"
            assert (s.tool.created, s.user.started) == (0, 0)
            assert "tools:" not in s.codec.decode(s.engine.asked[0][1])

    run(test)


def test_the_tool_agent_uses_the_tools_and_the_interaction_of_the_task() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            task = Task(PROMPT, agent_name="tool", tools=("deed",), interaction="user")
            state = await run_agent(LoopState.begin(task), setting_of(s))
            assert (state.reason, state.assistant_turns, state.user_turns) == (Ending.INTERACTION, 3, 2)
            plain = Task(PROMPT, agent_name="tool", tools=())
            s.engine.memory.clear()
            state = await run_agent(LoopState.begin(plain), setting_of(s))
            assert state.messages[2].text == "Unknown function 'deed'. Available tools: []"
            assert state.reason is Ending.STOP

    run(test)


def test_a_tasks_own_limits_go_before_everybodys() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            everybody = LoopLimits(max_assistant_turns=1)
            own = LoopLimits(max_assistant_turns=2)
            for limits, turns in ((None, 1), (own, 2)):
                s.engine.memory.clear()
                task = Task(PROMPT, agent_name="tool", limits=limits)
                state = await run_agent(LoopState.begin(task), setting_of(s, limits=everybody))
                assert state.assistant_turns == turns

    run(test)


def test_agents_are_found_by_the_name_they_were_given() -> None:
    async def test() -> None:
        @branchline.agent("echo")
        async def echo(state: LoopState, setting: Setting) -> LoopState:
            state.messages.append(Message("assistant", state.messages[-1].text))
            return state

        @branchline.agent("shout")
        async def shout(state: LoopState, setting: Setting) -> LoopState:
            state.messages.append(Message("assistant", state.messages[-1].text.upper()))
            return state

        async with stage(SCRIPT) as s:
            tasks = [Task(PROMPT, agent_name=name) for name in ("echo", "shout", "echo")]
            states = [await run_agent(LoopState.begin(task), setting_of(s)) for task in tasks]
            assert [state.messages[-1].text for state in states] == ["Begin.", "BEGIN.", "Begin."]
            assert not s.engine.asked

    run(test)


def test_unknown_names_are_refused_before_anything_runs() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            tools, interactions = ToolRegistry([s.tool]), InteractionRegistry([User(())])
            good = Task(PROMPT, agent_name="tool", tools=("deed",), interaction="user")
            check([good, Task(PROMPT)], tools, interactions)
            for bad, words in (
                (Task(PROMPT, agent_name="wizard"), "agent_name: got 'wizard', expected one of"),
                (Task(PROMPT, tools=("saw",)), r"tools\[0\]: got 'saw', expected one of \['deed'\]"),
                (Task(PROMPT, tool_arguments={"saw": {}}), "tool_arguments: got 'saw'"),
                (Task(PROMPT, interaction="ghost"), r"interaction: got 'ghost', expected one of \['user'\]"),
            ):
                with pytest.raises(InputError, match=rf"^tasks\[1\]\.{words}"):
                    check([good, bad], tools, interactions)
            with pytest.raises(InputError, match="'single_turn', 'tool'"):
                await run_agent(LoopState.begin(Task(PROMPT, agent_name="wizard")), setting_of(s))
            with pytest.raises(InputError, match=r"tools\[0\]: got 'deed', expected one of \[\]"):
                check([good])
            assert not s.engine.asked
            assert not s.tool.created

    run(test)


def test_a_name_stands_for_one_agent() -> None:
    def define(word: str) -> Any:
        @branchline.agent("mine")
        async def mine(state: LoopState, setting: Setting) -> LoopState:
            state.detail = word
            return state

        return mine

    define("one")
    again = define("two")
    assert find_agent("mine") is again, "the same definition, read again"
    with pytest.raises(InputError, match=r"'mine' is .*mine already"):

        @branchline.agent("mine")
        async def other(state: LoopState, setting: Setting) -> LoopState:
            return state

    with pytest.raises(InputError, match="agent: got the name ''"):
        branchline.agent("")
