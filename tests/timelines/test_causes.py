"""Causes of forks, one by one, and how often they are right on generated episodes."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from branchline import (
    Cause,
    Delivery,
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    classify_forks,
)
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import DropReason

CODEC = ToyCodec.chatml()
SYSTEM = Message("system", "You are the main agent.")
TASK = Message("user", "Count the files in this folder.")
TOOLS = ({"type": "function", "function": {"name": "shell"}},)


def commit_reply(session: Session, messages: list[Message], said: str | Message, **about: object) -> Message:
    delivery = about.pop("delivery", Delivery.DELIVERED)
    turn = session.prepare(Request(tuple(messages), **about))  # type: ignore[arg-type]
    answer = Message("assistant", said) if isinstance(said, str) else said
    call = session.commit(turn, Generation(CODEC.encode_reply(answer), message=answer)).call
    session.record_delivery(call, delivery)  # type: ignore[arg-type]
    return answer


def fork_causes(session: Session) -> list[Cause]:
    return [fork.cause for fork in classify_forks(session.tree).forks]


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


def test_the_same_prompt_again_is_best_of_n_and_a_twin_where_answers_agree(session: Session) -> None:
    for said in ("one", "two", "one"):
        commit_reply(session, [TASK], said)
    assert fork_causes(session) == [Cause.BEST_OF_N, Cause.DUPLICATE]


def test_a_retry_header_makes_a_retry_and_the_first_answer_is_unseen(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.PENDING)
    commit_reply(session, [TASK], "two", retry_count=1)
    judgement = classify_forks(session.tree)
    assert [fork.cause for fork in judgement.forks] == [Cause.RETRY]
    assert judgement.undelivered == {session.tree.calls[0].outputs[0]: DropReason.RETRY}


def test_a_lost_answer_asked_again_is_a_retry_without_any_header(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    commit_reply(session, [TASK], "two")
    assert fork_causes(session) == [Cause.RETRY]


def test_an_answer_that_is_continued_was_seen_whatever_was_recorded(session: Session) -> None:
    said = commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    commit_reply(session, [TASK, said, Message("user", "go on")], "two")
    assert not classify_forks(session.tree).undelivered


def test_a_lost_answer_nobody_asked_for_again_is_just_lost(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.LOST)
    assert list(classify_forks(session.tree).undelivered.values()) == [DropReason.LOST]


def test_a_rewritten_reply_is_an_edit(session: Session) -> None:
    commit_reply(session, [TASK], "one")
    commit_reply(session, [TASK, Message("assistant", "mine"), Message("user", "go on")], "two")
    assert fork_causes(session) == [Cause.EDIT]


def test_another_continuation_of_the_same_reply_is_an_edit_of_what_followed(session: Session) -> None:
    said = commit_reply(session, [TASK], "one")
    commit_reply(session, [TASK, said, Message("user", "this way")], "two")
    commit_reply(session, [TASK, said, Message("user", "no, that way")], "three")
    assert fork_causes(session) == [Cause.EDIT]


def test_an_emptied_tool_result_is_a_context_delete(session: Session) -> None:
    call = commit_reply(
        session, [TASK], Message("assistant", "", tool_calls=(ToolCall("shell", '{"run": "ls"}', "c1"),))
    )
    long = Message("tool", "a.py\nb.py\nc.py", tool_call_id="c1")
    said = commit_reply(session, [TASK, call, long], "three files")
    stub = Message("tool", "[gone]", tool_call_id="c1")
    commit_reply(session, [TASK, call, stub, said, Message("user", "and folders?")], "none")
    assert fork_causes(session) == [Cause.CONTEXT_DELETE]


def test_removed_messages_are_a_context_delete(session: Session) -> None:
    first = commit_reply(session, [SYSTEM, TASK], "one")
    more = [Message("user", "more"), Message("user", "still more")]
    second = commit_reply(session, [SYSTEM, TASK, first, more[0]], "two")
    commit_reply(session, [SYSTEM, TASK, second, more[1]], "three")
    assert fork_causes(session) == [Cause.REPAIR_LOOP]  # only the reply is kept: the same picture as a repair
    commit_reply(session, [SYSTEM, more[0], second, more[1]], "four")
    assert fork_causes(session)[-1] == Cause.CONTEXT_DELETE


def test_a_new_start_that_quotes_an_earlier_reply_is_a_compaction(session: Session) -> None:
    summary = commit_reply(session, [SYSTEM, TASK], "So far three files were counted.", tools=TOOLS)
    judged = classify_forks(session.tree)
    assert judged.main_leaf is not None
    again = Message("user", f"Summary: {summary.content} Continue.")
    commit_reply(session, [SYSTEM, again], "four", tools=TOOLS)
    judgement = classify_forks(session.tree)
    assert [fork.cause for fork in judgement.forks] == [Cause.COMPACTION]
    (edge,) = judgement.edges
    assert edge.source.message is summary


def test_a_task_handed_over_in_a_tool_call_is_a_sub_agent(session: Session) -> None:
    spawn = Message(
        "assistant", "", tool_calls=(ToolCall("agent", '{"task": "Read the \\"docs\\" folder."}', "c1"),)
    )
    commit_reply(session, [SYSTEM, TASK], spawn, tools=TOOLS)
    helper = [Message("system", "You help."), Message("user", 'Read the "docs" folder.')]
    commit_reply(session, helper, "done", tools=TOOLS)
    judgement = classify_forks(session.tree)
    assert [fork.cause for fork in judgement.forks] == [Cause.SUB_AGENT]
    assert judgement.edges[0].source.message is spawn
    assert judgement.main_leaf is not None
    assert judgement.main_leaf.message is spawn


def test_a_named_agent_is_a_sub_agent(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [Message("system", "You help."), Message("user", "Read.")], "two", agent="helper")
    assert fork_causes(session) == [Cause.SUB_AGENT]


def test_a_title_asked_without_tools_is_a_side_call(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "one", tools=TOOLS)
    commit_reply(
        session,
        [Message("system", "You write titles."), Message("user", f"Title for: {TASK.content}")],
        "Files",
    )
    assert fork_causes(session) == [Cause.SIDE_CALL]


def test_other_tools_for_the_same_conversation_are_tools_changed(session: Session) -> None:
    said = commit_reply(session, [SYSTEM, TASK], "one")
    commit_reply(session, [SYSTEM, TASK, said, Message("user", "go on")], "two", tools=TOOLS)
    assert fork_causes(session) == [Cause.TOOLS_CHANGED]


def test_stripped_thinking_is_a_think_strip() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    said = Message("assistant", "one", reasoning_content="plan")
    session.commit(session.prepare(Request((TASK,))), Generation(codec.encode_reply(said), message=said))
    turn = session.prepare(Request((TASK, Message("assistant", "one"), Message("user", "go on"))))
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "two"))))
    assert fork_causes(session) == [Cause.THINK_STRIP]


def test_two_strangers_with_nothing_in_common_are_unknown(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], "one")
    other = commit_reply(session, [Message("system", "Poet."), Message("user", "Rhyme.")], "two")
    commit_reply(
        session,
        [Message("system", "Poet."), Message("user", "Rhyme."), other, Message("user", "More.")],
        "three",
    )
    assert fork_causes(session) == [Cause.UNKNOWN]


def test_causes_of_generated_episodes_are_mostly_right_and_never_wildly_wrong() -> None:
    right: Counter[Cause] = Counter()
    said: Counter[Cause] = Counter()
    true: Counter[Cause] = Counter()
    for seed in range(60):
        player = PlanRunner(Session("s", CODEC), CODEC)
        player.run(PlanGenerator(Random(seed)).generate(8))
        for fork in classify_forks(player.session.tree).forks:
            truth = player.executed[fork.call.index].planned.expected_cause
            assert truth is not None
            true[truth] += 1
            said[fork.cause] += 1
            right[truth] += fork.cause == truth
    for cause in true:
        assert right[cause] >= 0.9 * true[cause], cause
        assert right[cause] >= 0.9 * said[cause], cause


def test_a_reply_shown_again_was_seen_although_nothing_follows_it_in_place() -> None:
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


def test_a_retry_after_a_cancellation_blames_nobody_else(session: Session) -> None:
    commit_reply(session, [TASK], "one", delivery=Delivery.PENDING)
    commit_reply(session, [TASK], "two", delivery=Delivery.CANCELLED)
    commit_reply(session, [TASK], "three", retry_count=1)
    assert list(classify_forks(session.tree).undelivered.values()) == [DropReason.CANCELLED]


def test_a_header_that_names_the_spawning_agent_makes_the_edge(session: Session) -> None:
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
    judgement = classify_forks(session.tree)
    assert [fork.cause for fork in judgement.forks] == [Cause.SUB_AGENT]
    assert judgement.edges[0].source.message is spawn


@pytest.mark.parametrize(
    "escaped", ['{"task": "See \\"a\\/b\\" now 🙂"}', '{"task": "See \\u0022a/b\\u0022 now \\ud83d\\ude42"}']
)
def test_a_task_is_found_however_its_json_is_escaped(session: Session, escaped: str) -> None:
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
