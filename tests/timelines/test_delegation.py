"""Conversations that begin with the same nodes: of a sub-agent and of the agent that delegates to it."""

from __future__ import annotations

import pytest

from branchline import Message, Session, ToolCall, classify_forks
from branchline.timelines.causes import Cause
from tests.timelines.test_causes import CODEC, TOOLS, commit_reply, fork_causes
from tests.timelines.test_main_history import main_text

SYSTEM = Message("system", "You are an agent.")
QUESTION = Message("user", "Which of the rooms has the key?")
LAST = Message("user", "And now the last question.")
SUB_AGENTS = ["", "helper"]


def delegate(
    session: Session, system: list[Message], tasks: list[str], agent: str = "", turns: int = 1
) -> list[Message]:
    """A turn with tools whose sub-agents have the same system prompt and no tools."""
    messages = [*system, QUESTION]
    calls = [ToolCall("task", f'{{"prompt": "{task}"}}', task) for task in tasks]
    messages.append(
        commit_reply(session, messages, Message("assistant", "", tool_calls=tuple(calls)), tools=TOOLS)
    )
    for number, task in enumerate(tasks):
        own = [*system, Message("user", task)]
        answer = commit_reply(session, own, f"The room {number} has a key.", agent=agent)
        for turn in range(1, turns):
            own += [answer, Message("user", "Look again.")]
            answer = commit_reply(session, own, f"The room {number}.{turn} has a key.", agent=agent)
        messages.append(Message("tool", answer.content, tool_call_id=task))
    messages.append(commit_reply(session, messages, "It is in the red room.", tools=TOOLS))
    return messages


@pytest.mark.parametrize("agent", SUB_AGENTS)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("tasks", [["Look for the key."], ["Look for the key.", "Count the rooms."]])
def test_a_last_turn_that_shares_the_system_prompt_of_sub_agents_is_in_the_main_history(
    agent: str, turns: int, tasks: list[str]
) -> None:
    session = Session("s", CODEC)
    messages = delegate(session, [SYSTEM], tasks, agent, turns)
    commit_reply(session, [*messages, LAST], "The last answer.")
    assert main_text(session) == "The last answer."
    assert sorted(fork_causes(session)) == [*[Cause.SUB_AGENT] * len(tasks), Cause.TOOLS_CHANGED]


@pytest.mark.parametrize("agent", SUB_AGENTS)
@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("shown", ["all", "call", "answer"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_question_that_is_delegated_word_for_word_begins_the_main_history(
    agent: str, system: list[Message], shown: str, turns: int
) -> None:
    session = Session("s", CODEC)
    messages = delegate(session, system, [QUESTION.content], agent, turns)
    if shown == "call":
        messages[-1] = Message("assistant", "[deleted]")
    elif shown == "answer":
        del messages[-3:-1]
    commit_reply(session, [*messages, LAST], "The last answer.")
    assert main_text(session) == "The last answer."


@pytest.mark.parametrize("agent", SUB_AGENTS)
def test_a_sub_agent_with_the_question_of_its_caller_keeps_its_cause_and_its_edge(agent: str) -> None:
    session = Session("s", CODEC)
    messages = delegate(session, [SYSTEM], [QUESTION.content], agent)
    commit_reply(session, [*messages, LAST], "The last answer.")
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks].count(Cause.SUB_AGENT) == 1
    assert [
        (edge.source.message.tool_calls[0].name, edge.target.message.content) for edge in report.edges
    ] == [("task", "The room 0 has a key.")]


@pytest.mark.parametrize("count", [1, 12])
def test_a_shortened_history_goes_on_after_any_number_of_sub_agents(count: int) -> None:
    session = Session("s", CODEC)
    first = [SYSTEM, Message("user", "Good morning to you.")]
    first += [commit_reply(session, first, "Good morning."), Message("user", "How are you?")]
    commit_reply(session, first, "I am fine.")
    messages = delegate(session, [SYSTEM], [f"Look for key {number}." for number in range(count)])
    messages[1] = Message("user", "Which room?")
    commit_reply(session, [*messages, LAST], "The last answer.")
    assert main_text(session) == "The last answer."


@pytest.mark.parametrize("agent", SUB_AGENTS)
def test_a_sub_agent_that_ends_last_is_not_in_the_main_history(agent: str) -> None:
    session = Session("s", CODEC)
    messages = delegate(session, [SYSTEM], ["Look for the key."], agent)
    commit_reply(session, [*messages, LAST], "The last answer.")
    own = [SYSTEM, Message("user", "Look for the key."), Message("assistant", "The room 0 has a key.")]
    commit_reply(session, [*own, Message("user", "Look again.")], "No key there.", agent=agent)
    assert main_text(session) == "The last answer."


@pytest.mark.parametrize(("agent", "count"), [("", 1), ("helper", 0)])
def test_a_sub_agent_whose_task_no_call_contains_is_warned_about(agent: str, count: int) -> None:
    session = Session("s", CODEC)
    messages = delegate(session, [SYSTEM], ["Look for the key."])
    commit_reply(session, [SYSTEM, Message("user", "Other words.")], "A key.", tools=TOOLS, agent=agent)
    commit_reply(session, [*messages, LAST], "The last answer.", tools=TOOLS)
    assert main_text(session) == "The last answer."
    assert classify_forks(session.tree).unnamed_conversations == count
