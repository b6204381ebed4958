"""The cause of each kind of fork, and how often causes are right on generated episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from branchline import Generation, Message, Request, Session, ToolCall, ToyCodec, classify_forks
from branchline.core.call import Delivery
from branchline.core.context_edits import ContextEdit, build_view, stub_message
from branchline.core.sample import DropReason
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import Cause
from branchline.timelines.fork_signals import MAX_SIBLINGS_COMPARED, ForkSignals
from branchline.tree.tree import Node

CODEC = ToyCodec.chatml()
SYSTEM = Message("system", "You are the main agent.")
TASK = Message("user", "Count the files in this folder.")
TOOLS = ({"type": "function", "function": {"name": "shell"}},)
TITLE_SYSTEM = Message("system", "You write titles.")
FEWER_TOOLS = ({"type": "function", "function": {"name": "look"}},)
SPAWN_CALL = Message(
    "assistant", "", tool_calls=(ToolCall("agent", '{"task": "Read the docs folder."}', "c1"),)
)
SPAWN_TASK = "Read the docs folder."


def commit_reply(
    session: Session, messages: list[Message], output: str | Message, **fields: object
) -> Message:
    delivery = fields.pop("delivery", Delivery.DELIVERED)
    turn = session.prepare(Request(tuple(messages), **fields))  # type: ignore[arg-type]
    answer = Message("assistant", output) if isinstance(output, str) else output
    call = session.commit(turn, Generation(CODEC.encode_reply(answer), message=answer)).call
    session.record_delivery(call, delivery)  # type: ignore[arg-type]
    return answer


def fork_causes(session: Session) -> list[Cause]:
    return [fork.cause for fork in classify_forks(session.tree).forks]


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


def test_a_repeated_prompt_is_best_of_n_or_a_duplicate_if_answers_are_equal(session: Session) -> None:
    for text in ("one", "two", "one"):
        commit_reply(session, [TASK], text)
    assert fork_causes(session) == [Cause.BEST_OF_N, Cause.DUPLICATE]


def test_a_branch_is_compared_with_a_limited_number_of_siblings(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    closest_sibling = ForkSignals.closest_sibling

    def counted(signals: ForkSignals, branch: Node, siblings: Sequence[Node]) -> Node:
        counts.append(len(siblings))
        return closest_sibling(signals, branch, siblings)

    monkeypatch.setattr(ForkSignals, "closest_sibling", counted)
    for index in range(30):
        commit_reply(session, [Message("user", f"Task {index}.")], "done")
    assert len(fork_causes(session)) == len(counts) == 29
    assert max(counts) == MAX_SIBLINGS_COMPARED


def test_a_retry_header_makes_a_retry_and_the_first_answer_undelivered(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.PENDING)
    commit_reply(session, [TASK], "two", retry_count=1)
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.RETRY]
    assert report.undelivered == {session.tree.calls[0].outputs[0]: DropReason.RETRY}


def test_a_repeated_request_after_a_lost_answer_is_a_retry(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    commit_reply(session, [TASK], "two")
    assert fork_causes(session) == [Cause.RETRY]


def test_a_continued_answer_counts_as_delivered(session: Session) -> None:
    reply = commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    commit_reply(session, [TASK, reply, Message("user", "go on")], "two")
    assert not classify_forks(session.tree).undelivered


def test_a_lost_answer_without_a_retry_is_lost(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    assert list(classify_forks(session.tree).undelivered.values()) == [DropReason.LOST]


def test_a_rewritten_reply_is_an_edit(session: Session) -> None:
    commit_reply(session, [TASK], "one")
    commit_reply(session, [TASK, Message("assistant", "mine"), Message("user", "go on")], "two")
    assert fork_causes(session) == [Cause.EDIT]


def test_another_continuation_of_the_same_reply_is_an_edit(session: Session) -> None:
    reply = commit_reply(session, [TASK], "one")
    commit_reply(session, [TASK, reply, Message("user", "this way")], "two")
    commit_reply(session, [TASK, reply, Message("user", "no, that way")], "three")
    assert fork_causes(session) == [Cause.EDIT]


def test_a_shortened_tool_result_is_a_context_delete(session: Session) -> None:
    call = commit_reply(
        session, [TASK], Message("assistant", "", tool_calls=(ToolCall("shell", '{"run": "ls"}', "c1"),))
    )
    long = Message("tool", "a.py\nb.py\nc.py", tool_call_id="c1")
    reply = commit_reply(session, [TASK, call, long], "three files")
    stub = Message("tool", "[gone]", tool_call_id="c1")
    commit_reply(session, [TASK, call, stub, reply, Message("user", "and folders?")], "none")
    assert fork_causes(session) == [Cause.CONTEXT_DELETE]


def test_a_stub_is_a_context_delete_however_short_the_deleted_message_was(session: Session) -> None:
    call = commit_reply(
        session, [TASK], Message("assistant", "", tool_calls=(ToolCall("shell", "{}", "c1"),))
    )
    short = Message("tool", "a", tool_call_id="c1")
    commit_reply(session, [TASK, call, short], "one file")
    commit_reply(session, [TASK, call, stub_message(short)], "one file")
    commit_reply(session, [TASK, stub_message(call), short], "one file")
    assert fork_causes(session) == [Cause.CONTEXT_DELETE] * 2


def test_a_message_that_is_restored_after_a_deletion_is_a_context_delete(session: Session) -> None:
    call = commit_reply(
        session, [TASK], Message("assistant", "", tool_calls=(ToolCall("shell", "{}", "c1"),))
    )
    result = Message("tool", "a.py", tool_call_id="c1")
    commit_reply(session, [TASK, call, stub_message(result)], "gone")
    commit_reply(session, [TASK, call, result], "there")
    assert fork_causes(session) == [Cause.CONTEXT_DELETE]


def test_a_summary_of_a_conversation_is_a_compaction_however_short_it_is(session: Session) -> None:
    reply = commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    asked = [SYSTEM, TASK, reply, Message("user", "Summarize.")]
    commit_reply(session, asked, "short", tools=TOOLS)
    history = [SYSTEM, TASK, reply, Message("user", "and?")]
    view = build_view(history, [ContextEdit((2, 3), "short")])
    commit_reply(session, list(view.messages), "two", tools=TOOLS)
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.COMPACTION]
    (edge,) = report.edges
    assert edge.source.message.content == "short"


def test_removed_messages_are_a_context_delete(session: Session) -> None:
    first = commit_reply(session, [SYSTEM, TASK], "one")
    more = [Message("user", "more"), Message("user", "still more")]
    second = commit_reply(session, [SYSTEM, TASK, first, more[0]], "two")
    commit_reply(session, [SYSTEM, TASK, second, more[1]], "three")
    assert fork_causes(session) == [Cause.REPAIR_LOOP]  # only the reply is kept, as in a repair loop
    commit_reply(session, [SYSTEM, more[0], second, more[1]], "four")
    assert fork_causes(session)[-1] == Cause.CONTEXT_DELETE


def test_a_new_conversation_that_quotes_an_earlier_reply_is_a_compaction(session: Session) -> None:
    summary = commit_reply(session, [SYSTEM, TASK], "So far three files were counted.", tools=TOOLS)
    before = classify_forks(session.tree)
    assert before.main_leaf is not None
    again = Message("user", f"Summary: {summary.content} Continue.")
    commit_reply(session, [SYSTEM, again], "four", tools=TOOLS)
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.COMPACTION]
    (edge,) = report.edges
    assert edge.source.message is summary


def test_a_task_in_a_tool_call_makes_a_sub_agent(session: Session) -> None:
    spawn = Message(
        "assistant", "", tool_calls=(ToolCall("agent", '{"task": "Read the \\"docs\\" folder."}', "c1"),)
    )
    commit_reply(session, [SYSTEM, TASK], spawn, tools=TOOLS)
    helper = [Message("system", "You help."), Message("user", 'Read the "docs" folder.')]
    commit_reply(session, helper, "done", tools=TOOLS)
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.SUB_AGENT]
    assert report.edges[0].source.message is spawn
    assert report.main_leaf is not None
    assert report.main_leaf.message is spawn


def test_a_named_agent_is_a_sub_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [Message("system", "You help."), Message("user", "Read.")], "two", agent="helper")
    assert fork_causes(session) == [Cause.SUB_AGENT]


def test_a_title_request_without_tools_is_a_side_call(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    commit_reply(
        session,
        [Message("system", "You write titles."), Message("user", f"Title for: {TASK.content}")],
        "Files",
    )
    assert fork_causes(session) == [Cause.SIDE_CALL]


def test_the_same_conversation_with_other_tools_is_tools_changed(session: Session) -> None:
    reply = commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [SYSTEM, TASK, reply, Message("user", "go on")], "two", tools=TOOLS)
    assert fork_causes(session) == [Cause.TOOLS_CHANGED]


def test_stripped_reasoning_is_a_think_strip() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    reply = Message("assistant", "one", reasoning_content="plan")
    session.commit(session.prepare(Request((TASK,))), Generation(codec.encode_reply(reply), message=reply))
    turn = session.prepare(Request((TASK, Message("assistant", "one"), Message("user", "go on"))))
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "two"))))
    assert fork_causes(session) == [Cause.THINK_STRIP]


def test_unrelated_conversations_are_unknown(session: Session) -> None:
    commit_reply(session, [TASK], "one")
    other = commit_reply(session, [Message("user", "Rhyme.")], "two")
    commit_reply(session, [Message("user", "Rhyme."), other, Message("user", "More.")], "three")
    assert fork_causes(session) == [Cause.UNKNOWN]


def test_causes_of_generated_episodes_are_right_in_nine_of_ten_cases() -> None:
    right: Counter[Cause] = Counter()
    found: Counter[Cause] = Counter()
    expected: Counter[Cause] = Counter()
    for seed in range(60):
        runner = PlanRunner(Session("s", CODEC), CODEC)
        runner.run(PlanGenerator(Random(seed)).generate(8))
        for fork in classify_forks(runner.session.tree).forks:
            cause = runner.executed[fork.call.index].planned.expected_cause
            assert cause is not None
            expected[cause] += 1
            found[fork.cause] += 1
            right[cause] += fork.cause == cause
    for cause in expected:
        assert right[cause] >= 0.9 * expected[cause], cause
        assert right[cause] >= 0.9 * found[cause], cause


def test_a_reply_repeated_on_another_path_counts_as_delivered() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    thought = Message("assistant", "one", reasoning_content="plan")
    call = session.commit(
        session.prepare(Request((TASK,))), Generation(codec.encode_reply(thought), message=thought)
    ).call
    session.record_delivery(call, Delivery.LOST)
    turn = session.prepare(Request((TASK, thought, Message("user", "go on"))))
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "two"))))
    assert not classify_forks(session.tree).undelivered


def test_a_cancelled_call_explains_a_retry_header(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.PENDING)
    commit_reply(session, [TASK], "two", delivery=Delivery.CANCELLED)
    commit_reply(session, [TASK], "three", retry_count=1)
    assert list(classify_forks(session.tree).undelivered.values()) == [DropReason.CANCELLED]


def test_a_header_that_names_the_parent_agent_makes_an_edge(session: Session) -> None:
    spawn = commit_reply(
        session,
        [SYSTEM, TASK],
        Message("assistant", "", tool_calls=(ToolCall("agent", "{}", "c1"),)),
        agent="main",
    )
    commit_reply(
        session,
        [Message("system", "You help."), Message("user", "Go.")],
        "done",
        agent="sub",
        spawned_by="main",
    )
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.SUB_AGENT]
    assert report.edges[0].source.message is spawn


@pytest.mark.parametrize(
    "escaped", ['{"task": "See \\"a\\/b\\" now 🙂"}', '{"task": "See \\u0022a/b\\u0022 now \\ud83d\\ude42"}']
)
def test_a_task_is_found_with_any_json_escapes(session: Session, escaped: str) -> None:
    commit_reply(
        session,
        [SYSTEM, TASK],
        Message("assistant", "", tool_calls=(ToolCall("agent", escaped, "c1"),)),
        tools=TOOLS,
    )
    commit_reply(
        session, [Message("system", "You help."), Message("user", 'See "a/b" now 🙂')], "done", tools=TOOLS
    )
    assert fork_causes(session) == [Cause.SUB_AGENT]


# -- what command-line agents do (`make test-clients` runs the real ones) ------------------------------


def title_request(text: str) -> list[Message]:
    return [TITLE_SYSTEM, Message("user", f"A title for: {text}")]


# -- side calls --------------------------------------------------------------------------------------


def test_a_title_requested_first_is_a_side_call_of_the_main_conversation(
    session: Session,
) -> None:
    title = commit_reply(session, title_request(TASK.content), "Files")
    work = commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    (fork,) = (report := classify_forks(session.tree)).forks
    assert fork.cause == Cause.SIDE_CALL
    assert fork.call is session.tree.calls[0]
    assert fork.branch.all_children()[0].all_children()[0].message is title
    assert report.main_leaf is not None
    assert report.main_leaf.message is work


def test_titles_for_each_request_are_side_calls_in_any_order(session: Session) -> None:
    commit_reply(session, title_request(TASK.content), "Files")
    reply = commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    more = Message("user", "And the folders?")
    commit_reply(session, title_request(more.content), "Folders")
    commit_reply(session, [SYSTEM, TASK, reply, more], "two", tools=TOOLS)
    assert fork_causes(session) == [Cause.SIDE_CALL, Cause.SIDE_CALL]


def test_a_continued_first_conversation_without_tools_is_no_side_call(session: Session) -> None:
    reply = commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [SYSTEM, TASK, reply, Message("user", "go on")], "two")
    commit_reply(
        session, [Message("system", "Other."), Message("user", "Something else.")], "three", tools=TOOLS
    )
    assert Cause.SIDE_CALL not in fork_causes(session)


def test_a_single_call_of_another_agent_is_no_side_call(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "a plan", agent="planner")
    commit_reply(session, [Message("system", "You work."), TASK], "done", agent="worker", tools=TOOLS)
    assert fork_causes(session) == [Cause.SUB_AGENT]


# -- sub-agents --------------------------------------------------------------------------------------


def spawning_messages(session: Session) -> list[Message]:
    """Returns the messages whose tool calls spawned a sub-agent."""
    return [
        edge.source.message for edge in classify_forks(session.tree).edges if edge.cause == Cause.SUB_AGENT
    ]


def test_a_task_after_a_reminder_in_the_same_message_links_the_sub_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    reminder = "<system-reminder>Today is Sunday.</system-reminder>"
    request = Message("user", reminder + SPAWN_TASK, parts=(reminder, SPAWN_TASK))
    commit_reply(session, [Message("system", "You help."), request], "done", tools=TOOLS, agent="a1")
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_a_task_after_a_shared_greeting_links_the_sub_agent(session: Session) -> None:
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


def test_a_sub_agent_with_the_system_prompt_of_its_parent_is_not_tools_changed(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    commit_reply(session, [SYSTEM, Message("user", SPAWN_TASK)], "done", tools=FEWER_TOOLS)
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_changed_tools_are_tools_changed_even_if_a_call_contains_the_question(session: Session) -> None:
    search = Message("assistant", "", tool_calls=(ToolCall("search", f'{{"for": "{TASK.content}"}}', "c1"),))
    commit_reply(session, [SYSTEM, TASK], search, tools=TOOLS)
    found = Message("tool", "three", tool_call_id="c1")
    commit_reply(session, [SYSTEM, TASK, search, found], "three", tools=FEWER_TOOLS)
    assert fork_causes(session) == [Cause.TOOLS_CHANGED]


def test_a_user_reply_that_a_tool_call_offered_makes_no_sub_agent(session: Session) -> None:
    offer = Message("assistant", "", tool_calls=(ToolCall("ask", '{"choices": ["Yes, all of them"]}', "c1"),))
    chosen = Message("user", "Yes, all of them")
    commit_reply(session, [SYSTEM, TASK], offer, tools=TOOLS)
    reply = commit_reply(session, [SYSTEM, TASK, offer, chosen], "three", tools=TOOLS)
    other = Message("system", "You are the main agent. Today is Monday.")
    commit_reply(session, [other, TASK, offer, chosen, reply, Message("user", "more")], "four", tools=TOOLS)
    assert Cause.SUB_AGENT not in fork_causes(session)


def test_two_agents_with_identical_prompts_are_two_sub_agents(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    request = [Message("system", "You help."), Message("user", SPAWN_TASK)]
    for name in ("a1", "a2"):
        commit_reply(session, request, "done", tools=TOOLS, agent=name)
    assert fork_causes(session) == [Cause.SUB_AGENT, Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL, SPAWN_CALL]


def test_an_unknown_parent_name_stands_for_the_first_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    other = Message("assistant", "", tool_calls=(ToolCall("shell", '{"run": "ls"}', "c2"),))
    commit_reply(
        session, [SYSTEM, TASK, SPAWN_CALL, Message("tool", "begun", tool_call_id="c1")], other, tools=TOOLS
    )
    request = [Message("system", "You help."), Message("user", SPAWN_TASK)]
    commit_reply(session, request, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert spawning_messages(session) == [SPAWN_CALL]


def test_a_parent_whose_calls_do_not_contain_the_task_is_linked_by_its_latest_call(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], SPAWN_CALL, tools=TOOLS)
    request = [Message("system", "You help."), Message("user", "An encrypted text.")]
    commit_reply(session, request, "done", tools=TOOLS, agent="t2", spawned_by="t1")
    assert spawning_messages(session) == [SPAWN_CALL]


# -- summaries ---------------------------------------------------------------------------------------


def test_a_summary_request_without_the_last_reply_is_part_of_the_compaction(
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
