"""Causes of what real command-line agents do, in small: `make test-clients` shows them do it."""

from __future__ import annotations

import pytest

from branchline import Cause, Generation, Message, Request, Session, ToolCall, ToyCodec, judge

CODEC = ToyCodec.chatml()
SYSTEM = Message("system", "You are the main agent.")
TASK = Message("user", "Count the files in this folder.")
TITLES = Message("system", "You write titles.")
TOOLS = ({"type": "function", "function": {"name": "shell"}},)
FEWER = ({"type": "function", "function": {"name": "look"}},)
HAND_OVER = Message("assistant", "", calls=(ToolCall("agent", '{"task": "Read the docs folder."}', "c1"),))
HANDED = "Read the docs folder."


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


def say(session: Session, messages: list[Message], said: str | Message, **about: object) -> Message:
    answer = Message("assistant", said) if isinstance(said, str) else said
    turn = session.prepare(Request(tuple(messages), **about))  # type: ignore[arg-type]
    session.deliver(session.commit(turn, Generation(CODEC.spell(answer), message=answer)).call)
    return answer


def causes(session: Session) -> list[Cause]:
    return [fork.cause for fork in judge(session.tree).forks]


def about(text: str) -> list[Message]:
    return [TITLES, Message("user", f"A title for: {text}")]


# -- side calls --------------------------------------------------------------------------------------


def test_a_title_asked_for_before_the_work_begins_is_the_side_call_and_the_work_is_main(
    session: Session,
) -> None:
    title = say(session, about(TASK.text), "Files")
    work = say(session, [SYSTEM, TASK], "one", tools=TOOLS)
    (fork,) = (judgement := judge(session.tree)).forks
    assert fork.cause == Cause.SIDE_CALL
    assert fork.call is session.tree.calls[0]
    assert fork.branch.all_children()[0].all_children()[0].message is title
    assert judgement.main is not None
    assert judgement.main.message is work


def test_titles_for_each_request_are_side_calls_whichever_came_first(session: Session) -> None:
    say(session, about(TASK.text), "Files")
    said = say(session, [SYSTEM, TASK], "one", tools=TOOLS)
    more = Message("user", "And the folders?")
    say(session, about(more.text), "Folders")
    say(session, [SYSTEM, TASK, said, more], "two", tools=TOOLS)
    assert causes(session) == [Cause.SIDE_CALL, Cause.SIDE_CALL]


def test_a_first_conversation_without_tools_that_goes_on_is_no_side_call(session: Session) -> None:
    said = say(session, [SYSTEM, TASK], "one")
    say(session, [SYSTEM, TASK, said, Message("user", "go on")], "two")
    say(session, [Message("system", "Other."), Message("user", "Something else.")], "three", tools=TOOLS)
    assert Cause.SIDE_CALL not in causes(session)


def test_the_only_call_of_another_agent_is_no_side_call_of_the_first(session: Session) -> None:
    say(session, [SYSTEM, TASK], "a plan", agent="planner")
    say(session, [Message("system", "You work."), TASK], "done", agent="worker", tools=TOOLS)
    assert causes(session) == [Cause.SUB_AGENT]


# -- sub-agents --------------------------------------------------------------------------------------


def spawned(session: Session) -> list[Message]:
    """The messages whose calls sent a sub-agent."""
    return [edge.source.message for edge in judge(session.tree).edges if edge.cause == Cause.SUB_AGENT]


def test_a_task_behind_a_reminder_in_the_same_message_ties_the_sub_agent(session: Session) -> None:
    say(session, [SYSTEM, TASK], HAND_OVER, tools=TOOLS)
    reminder = "<system-reminder>Today is Sunday.</system-reminder>"
    asked = Message("user", reminder + HANDED, parts=(reminder, HANDED))
    say(session, [Message("system", "You help."), asked], "done", tools=TOOLS, agent="a1")
    assert causes(session) == [Cause.SUB_AGENT]
    assert spawned(session) == [HAND_OVER]


def test_a_task_behind_a_greeting_that_both_agents_get_ties_the_sub_agent(session: Session) -> None:
    greeting = [
        Message("user", "This is the folder: docs, src."),
        Message("assistant", "Thanks for the context!"),
    ]
    say(session, [SYSTEM, *greeting, TASK], HAND_OVER, tools=TOOLS)
    say(
        session,
        [Message("system", "You help."), *greeting, Message("user", HANDED)],
        "done",
        tools=FEWER,
    )
    assert causes(session) == [Cause.SUB_AGENT]
    assert spawned(session) == [HAND_OVER]


def test_a_sub_agent_with_its_parents_prompt_and_fewer_tools_is_no_change_of_tools(session: Session) -> None:
    say(session, [SYSTEM, TASK], HAND_OVER, tools=TOOLS)
    say(session, [SYSTEM, Message("user", HANDED)], "done", tools=FEWER)
    assert causes(session) == [Cause.SUB_AGENT]
    assert spawned(session) == [HAND_OVER]


def test_other_tools_are_a_change_of_tools_though_the_question_was_searched_for(session: Session) -> None:
    search = Message("assistant", "", calls=(ToolCall("search", f'{{"for": "{TASK.text}"}}', "c1"),))
    say(session, [SYSTEM, TASK], search, tools=TOOLS)
    found = Message("tool", "three", answers="c1")
    say(session, [SYSTEM, TASK, search, found], "three", tools=FEWER)
    assert causes(session) == [Cause.TOOLS_CHANGED]


def test_an_answer_the_model_had_offered_makes_no_sub_agent_of_its_own_conversation(session: Session) -> None:
    offer = Message("assistant", "", calls=(ToolCall("ask", '{"choices": ["Yes, all of them"]}', "c1"),))
    chosen = Message("user", "Yes, all of them")
    say(session, [SYSTEM, TASK], offer, tools=TOOLS)
    said = say(session, [SYSTEM, TASK, offer, chosen], "three", tools=TOOLS)
    other = Message("system", "You are the main agent. Today is Monday.")
    say(session, [other, TASK, offer, chosen, said, Message("user", "more")], "four", tools=TOOLS)
    assert Cause.SUB_AGENT not in causes(session)


def test_two_agents_told_the_very_same_are_two_sub_agents(session: Session) -> None:
    say(session, [SYSTEM, TASK], HAND_OVER, tools=TOOLS)
    asked = [Message("system", "You help."), Message("user", HANDED)]
    for name in ("a1", "a2"):
        say(session, asked, "done", tools=TOOLS, agent=name)
    assert causes(session) == [Cause.SUB_AGENT, Cause.SUB_AGENT]
    assert spawned(session) == [HAND_OVER, HAND_OVER]


def test_a_parent_that_nobody_is_called_is_the_first_agent(session: Session) -> None:
    say(session, [SYSTEM, TASK], HAND_OVER, tools=TOOLS)
    other = Message("assistant", "", calls=(ToolCall("shell", '{"run": "ls"}', "c2"),))
    say(session, [SYSTEM, TASK, HAND_OVER, Message("tool", "begun", answers="c1")], other, tools=TOOLS)
    asked = [Message("system", "You help."), Message("user", HANDED)]
    say(session, asked, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert causes(session) == [Cause.SUB_AGENT]
    assert spawned(session) == [HAND_OVER]


def test_a_parent_whose_calls_do_not_say_the_task_is_tied_by_its_latest(session: Session) -> None:
    say(session, [SYSTEM, TASK], HAND_OVER, tools=TOOLS)
    asked = [Message("system", "You help."), Message("user", "Sealed, nobody can read it.")]
    say(session, asked, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert spawned(session) == [HAND_OVER]


# -- summaries ---------------------------------------------------------------------------------------


def test_a_request_for_a_summary_that_leaves_out_the_last_reply_is_part_of_the_compaction(
    session: Session,
) -> None:
    first = say(session, [SYSTEM, TASK], Message("assistant", "", calls=(ToolCall("shell", "{}", "c1"),)))
    result = Message("tool", "a.py", answers="c1")
    say(session, [SYSTEM, TASK, first, result], "One file, as far as I can see.")
    summarise = Message("user", "Summarise everything.")
    summary = say(session, [SYSTEM, TASK, first, result, summarise], "So far one file was found.")
    say(session, [SYSTEM, Message("user", f"Before: {summary.text} Go on.")], "Done.")
    assert causes(session) == [Cause.COMPACTION, Cause.COMPACTION]
