"""Causes of what real command-line agents do, in small: `make test-clients` shows them do it."""

from __future__ import annotations

import pytest

from branchline import Cause, Generation, Message, Request, Session, ToolCall, ToyCodec, classify_forks

CODEC = ToyCodec.chatml()
SYSTEM = Message("system", "You are the main agent.")
TASK = Message("user", "Count the files in this folder.")
TITLE_SYSTEM = Message("system", "You write titles.")
TOOLS = ({"type": "function", "function": {"name": "shell"}},)
FEWER_TOOLS = ({"type": "function", "function": {"name": "look"}},)
SPAWN_CALL = Message(
    "assistant", "", tool_calls=(ToolCall("agent", '{"task": "Read the docs folder."}', "c1"),)
)
SPAWN_TASK = "Read the docs folder."


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


def commit_reply(session: Session, messages: list[Message], said: str | Message, **about: object) -> Message:
    answer = Message("assistant", said) if isinstance(said, str) else said
    turn = session.prepare(Request(tuple(messages), **about))  # type: ignore[arg-type]
    session.record_delivery(session.commit(turn, Generation(CODEC.encode_reply(answer), message=answer)).call)
    return answer


def fork_causes(session: Session) -> list[Cause]:
    return [fork.cause for fork in classify_forks(session.tree).forks]


def title_request(text: str) -> list[Message]:
    return [TITLE_SYSTEM, Message("user", f"A title for: {text}")]


# -- side calls --------------------------------------------------------------------------------------


def test_a_title_asked_for_before_the_work_begins_is_the_side_call_and_the_work_is_main(
    session: Session,
) -> None:
    title = commit_reply(session, title_request(TASK.content), "Files")
    work = commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    (fork,) = (judgement := classify_forks(session.tree)).forks
    assert fork.cause == Cause.SIDE_CALL
    assert fork.call is session.tree.calls[0]
    assert fork.branch.all_children()[0].all_children()[0].message is title
    assert judgement.main_leaf is not None
    assert judgement.main_leaf.message is work


def test_titles_for_each_request_are_side_calls_whichever_came_first(session: Session) -> None:
    commit_reply(session, title_request(TASK.content), "Files")
    said = commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    more = Message("user", "And the folders?")
    commit_reply(session, title_request(more.content), "Folders")
    commit_reply(session, [SYSTEM, TASK, said, more], "two", tools=TOOLS)
    assert fork_causes(session) == [Cause.SIDE_CALL, Cause.SIDE_CALL]


def test_a_first_conversation_without_tools_that_goes_on_is_no_side_call(session: Session) -> None:
    said = commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [SYSTEM, TASK, said, Message("user", "go on")], "two")
    commit_reply(
        session, [Message("system", "Other."), Message("user", "Something else.")], "three", tools=TOOLS
    )
    assert Cause.SIDE_CALL not in fork_causes(session)


def test_the_only_call_of_another_agent_is_no_side_call_of_the_first(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "a plan", agent="planner")
    commit_reply(session, [Message("system", "You work."), TASK], "done", agent="worker", tools=TOOLS)
    assert fork_causes(session) == [Cause.SUB_AGENT]


# -- sub-agents --------------------------------------------------------------------------------------


def spawning_messages(session: Session) -> list[Message]:
    """The messages whose calls sent a sub-agent."""
    return [
        edge.source.message for edge in classify_forks(session.tree).edges if edge.cause == Cause.SUB_AGENT
    ]


def test_a_task_behind_a_reminder_in_the_same_message_ties_the_sub_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    reminder = "<system-reminder>Today is Sunday.</system-reminder>"
    asked = Message("user", reminder + SPAWN_TASK, parts=(reminder, SPAWN_TASK))
    commit_reply(session, [Message("system", "You help."), asked], "done", tools=TOOLS, agent="a1")
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_a_task_behind_a_greeting_that_both_agents_get_ties_the_sub_agent(session: Session) -> None:
    greeting = [
        Message("user", "This is the folder: docs, src."),
        Message("assistant", "Thanks for the context!"),
    ]
    commit_reply(session, [SYSTEM, *greeting, TASK], SPAWN_CALL, tools=TOOLS)
    commit_reply(
        session,
        [Message("system", "You help."), *greeting, Message("user", SPAWN_TASK)],
        "done",
        tools=FEWER_TOOLS,
    )
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_a_sub_agent_with_its_parents_prompt_and_fewer_tools_is_no_change_of_tools(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    commit_reply(session, [SYSTEM, Message("user", SPAWN_TASK)], "done", tools=FEWER_TOOLS)
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_other_tools_are_a_change_of_tools_though_the_question_was_searched_for(session: Session) -> None:
    search = Message("assistant", "", tool_calls=(ToolCall("search", f'{{"for": "{TASK.content}"}}', "c1"),))
    commit_reply(session, [SYSTEM, TASK], search, tools=TOOLS)
    found = Message("tool", "three", tool_call_id="c1")
    commit_reply(session, [SYSTEM, TASK, search, found], "three", tools=FEWER_TOOLS)
    assert fork_causes(session) == [Cause.TOOLS_CHANGED]


def test_an_answer_the_model_had_offered_makes_no_sub_agent_of_its_own_conversation(session: Session) -> None:
    offer = Message("assistant", "", tool_calls=(ToolCall("ask", '{"choices": ["Yes, all of them"]}', "c1"),))
    chosen = Message("user", "Yes, all of them")
    commit_reply(session, [SYSTEM, TASK], offer, tools=TOOLS)
    said = commit_reply(session, [SYSTEM, TASK, offer, chosen], "three", tools=TOOLS)
    other = Message("system", "You are the main agent. Today is Monday.")
    commit_reply(session, [other, TASK, offer, chosen, said, Message("user", "more")], "four", tools=TOOLS)
    assert Cause.SUB_AGENT not in fork_causes(session)


def test_two_agents_told_the_very_same_are_two_sub_agents(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    asked = [Message("system", "You help."), Message("user", SPAWN_TASK)]
    for name in ("a1", "a2"):
        commit_reply(session, asked, "done", tools=TOOLS, agent=name)
    assert fork_causes(session) == [Cause.SUB_AGENT, Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL, SPAWN_CALL]


def test_a_parent_that_nobody_is_called_is_the_first_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    other = Message("assistant", "", tool_calls=(ToolCall("shell", '{"run": "ls"}', "c2"),))
    commit_reply(
        session, [SYSTEM, TASK, SPAWN_CALL, Message("tool", "begun", tool_call_id="c1")], other, tools=TOOLS
    )
    asked = [Message("system", "You help."), Message("user", SPAWN_TASK)]
    commit_reply(session, asked, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_a_parent_whose_calls_do_not_say_the_task_is_tied_by_its_latest(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    asked = [Message("system", "You help."), Message("user", "Sealed, nobody can read it.")]
    commit_reply(session, asked, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert spawning_messages(session) == [SPAWN_CALL]


# -- summaries ---------------------------------------------------------------------------------------


def test_a_request_for_a_summary_that_leaves_out_the_last_reply_is_part_of_the_compaction(
    session: Session,
) -> None:
    first = commit_reply(
        session, [SYSTEM, TASK], Message("assistant", "", tool_calls=(ToolCall("shell", "{}", "c1"),))
    )
    result = Message("tool", "a.py", tool_call_id="c1")
    commit_reply(session, [SYSTEM, TASK, first, result], "One file, as far as I can see.")
    summarise = Message("user", "Summarise everything.")
    summary = commit_reply(session, [SYSTEM, TASK, first, result, summarise], "So far one file was found.")
    commit_reply(session, [SYSTEM, Message("user", f"Before: {summary.content} Go on.")], "Done.")
    assert fork_causes(session) == [Cause.COMPACTION, Cause.COMPACTION]
