"""The main history is the known one, whatever else happens in a session and in whatever order calls end."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import (
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    Trajectory,
    classify_forks,
)
from branchline.core.call import Delivery
from branchline.export.jsonl import report_from_json, report_to_json
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator, PlannedCall
from branchline.timelines.causes import Cause
from tests.test_contract import PLANNED_CAUSES
from tests.timelines.test_causes import CODEC, SYSTEM, TASK, TOOLS, commit_reply, fork_causes

CANDIDATES = (Cause.BEST_OF_N, Cause.DUPLICATE)
"""Causes after which the agent has several answers and continues none."""
ENDINGS = [None, *(cause for cause in PLANNED_CAUSES if cause not in CANDIDATES)]
CRITIC = Message("system", "You are the critic agent.")
TITLE = Message("system", "You write titles.")


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 6),
    st.lists(st.sampled_from(PLANNED_CAUSES), max_size=4, unique=True),
    st.sampled_from(ENDINGS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["template", "verbatim"]),
    st.sampled_from([None, "quoted", "named", "spawned"]),
    st.sampled_from([None, Delivery.CANCELLED, Delivery.LOST]),
)
def test_each_cause_played_in_any_order_has_the_known_main_history(
    seed: int,
    steps: int,
    only: list[Cause],
    ending: Cause | None,
    named: bool,
    tools: bool,
    strip: bool,
    history: str,
    title: str | None,
    cut: Delivery | None,
) -> None:
    generator = PlanGenerator(Random(seed), reasoning=strip, with_tools=tools, with_names=named, races=False)
    plan = generator.generate(steps, only=only, ending=ending)
    codec = ToyCodec.chatml(strip_thinking=strip)
    runner = PlanRunner(Session("s", codec, history=history), codec)  # type: ignore[arg-type]
    ask_for_a_title(runner.session, plan[0].messages[-1], title)
    rng = Random(seed)
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    calls = {executed.planned.index: executed.call for executed in runner.executed}
    known = generator.main_answers
    last, choice = known[-1]
    end = [plan[last].outputs[choice].message]
    if cut is not None:
        end += go_on_without_an_answer(runner.session, plan[last], end[0], cut)

    rewards = [{"score": turn / 10, "turn": turn} for turn in range(1, len(known) + 1)]
    trajectory = Trajectory.from_session(runner.session, rewards=rewards)
    assert trajectory.history is not None
    assert trajectory.answer == end[-1].content
    assert trajectory.finished == (cut is None and plan[last].outputs[choice].is_complete)
    # Tool results are put into the order of their calls.
    shown = trajectory.history.messages
    assert [message.key for message in shown[-len(end) :]] == [message.key for message in end]
    assert sorted(message.key for message in shown[: -len(end)]) == sorted(
        message.key for message in plan[last].messages
    )

    # Equal answers to one prompt cannot be told apart.
    replies = {calls[call.index].id: {output.message.key for output in call.outputs} for call in plan}
    paid = {span.turn: span.call for sample in trajectory.samples for span in sample.rewards}
    assert paid.keys() == set(range(1, len(known) + 1))
    for turn, (call, choice) in enumerate(known, 1):
        assert plan[call].outputs[choice].message.key in replies[paid[turn]]

    (sample,) = Trajectory.from_session(runner.session, policy=ExportPolicy(max_samples=1)).samples
    assert sample.answers[-1].call == calls[last].id


def go_on_without_an_answer(
    session: Session, last: PlannedCall, reply: Message, delivery: Delivery
) -> list[Message]:
    """Continues the last answer of an agent by a call whose answer is not delivered; returns the rest."""
    results = [Message("tool", "3", tool_call_id=call.id) for call in reply.tool_calls]
    follow_up = results or [Message("user", "Go on.")]
    request = [*last.messages, reply, *follow_up]
    cut_off = commit_reply(session, request, "Cut off", agent=last.agent, tools=last.tools, delivery=delivery)
    return [*follow_up, cut_off]


def ask_for_a_title(session: Session, task: Message, kind: str | None) -> None:
    """Asks for a title before the agent's first call; `spawned` asks twice."""

    def ask(*messages: Message, agent: str = "", spawned_by: str = "") -> Message:
        reply = Message("assistant", f"Files {len(messages)}")
        ids = CODEC.encode_reply(reply)
        turn = session.prepare(Request((TITLE, *messages), agent=agent, spawned_by=spawned_by))
        logprobs = np.zeros(len(ids), np.float32)
        session.record_delivery(session.commit(turn, Generation(ids, logprobs, message=reply)).call)
        return reply

    if kind == "quoted":
        ask(Message("user", f"A title for: {task.content}"))
    if kind == "named":
        ask(task, agent="title")
    if kind == "spawned":
        first = ask(task, agent="title", spawned_by="main")
        ask(task, first, Message("user", "Shorter."), agent="title", spawned_by="main")


# -- critics and other system prompts ----------------------------------------------------------------

ANSWER = "There are three files in this folder."
JUDGE = Message("user", f"Judge this answer: {ANSWER} Is it right?")


def main_text(session: Session) -> str:
    leaf = classify_forks(session.tree).main_leaf
    return leaf.message.content if leaf is not None else ""


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


@pytest.fixture
def solved(session: Session) -> Session:
    commit_reply(session, [SYSTEM, TASK], ANSWER)
    return session


@pytest.mark.parametrize(
    "shown",
    [
        [Message("user", "Say hello to everybody.")],
        [JUDGE],
        [TASK],
        [TASK, Message("assistant", ANSWER), Message("user", "Is that right?")],
        [TASK, Message("assistant", ANSWER)],
    ],
    ids=["other words", "quotes the answer", "same task", "whole conversation", "ends with the answer"],
)
def test_a_critic_without_a_name_is_not_the_main_history(solved: Session, shown: list[Message]) -> None:
    verdict = commit_reply(solved, [CRITIC, *shown], "It is right, I think.")
    commit_reply(solved, [CRITIC, *shown, verdict, Message("user", "Are you sure?")], "Yes, I am.")
    report = classify_forks(solved.tree)
    assert [fork.cause for fork in report.forks] == [Cause.OTHER_SYSTEM_PROMPT]
    assert (report.edges, report.unnamed_conversations) == ([], 1)
    assert main_text(solved) == ANSWER


def test_agents_without_names_are_warned_about(solved: Session) -> None:
    policy = ExportPolicy(include_missing_logprobs=True)
    before = Trajectory.from_session(solved, policy=policy).report
    assert before is not None
    assert (before.unnamed_conversations, before.warnings) == (0, ())
    commit_reply(solved, [CRITIC, JUDGE], "It is right.")
    commit_reply(solved, [SYSTEM, TASK], "Two.", agent="named")
    report = Trajectory.from_session(solved, policy=policy).report
    assert report is not None
    assert report.unnamed_conversations == 1
    (warning,) = report.warnings
    assert "1 conversations beside the first have no agent name" in warning
    assert report_from_json(report_to_json(report)) == report


def test_a_conversation_without_a_system_prompt_is_another_one(solved: Session) -> None:
    commit_reply(solved, [JUDGE], "It is right.")
    assert fork_causes(solved) == [Cause.OTHER_SYSTEM_PROMPT]
    assert main_text(solved) == ANSWER


def test_a_named_critic_is_a_sub_agent_and_not_the_main_history(solved: Session) -> None:
    commit_reply(solved, [CRITIC, JUDGE], "It is right.", agent="critic")
    assert fork_causes(solved) == [Cause.SUB_AGENT]
    assert main_text(solved) == ANSWER


def test_the_next_answer_that_a_critic_quotes_is_no_compaction(solved: Session) -> None:
    commit_reply(solved, [CRITIC, JUDGE], "It is wrong, look again.")
    better = "There are four files in this folder."
    seen = [SYSTEM, TASK, Message("assistant", ANSWER), Message("user", "Look again.")]
    commit_reply(solved, seen, better)
    commit_reply(solved, [CRITIC, Message("user", f"Judge this answer: {better}")], "Now it is right.")
    report = classify_forks(solved.tree)
    assert Cause.COMPACTION not in {fork.cause for fork in report.forks}
    assert report.edges == []
    assert main_text(solved) == better


def test_an_agent_that_quotes_its_critic_continues_after_it(solved: Session) -> None:
    verdict = commit_reply(solved, [CRITIC, JUDGE], "It is wrong, there are four files.")
    commit_reply(
        solved, [SYSTEM, Message("user", f"A critic says: {verdict.content} Answer again.")], "Four."
    )
    assert main_text(solved) == "Four."


def test_an_agent_is_found_after_many_critics(solved: Session) -> None:
    for index in range(20):
        critic = Message("system", f"You are critic number {index}.")
        commit_reply(
            solved, [critic, Message("user", f"Judge it {index} times.")], f"Fine {index}.", tools=TOOLS
        )
    seen = [SYSTEM, TASK, Message("assistant", ANSWER), Message("user", "And the folders?")]
    commit_reply(solved, seen, "Two folders.", tools=TOOLS)
    assert fork_causes(solved)[-1] == Cause.TOOLS_CHANGED
    commit_reply(solved, [CRITIC, JUDGE], "It is right.", tools=TOOLS)
    assert main_text(solved) == "Two folders."


def test_an_agent_that_hands_over_within_a_turn_is_in_the_same_conversation(session: Session) -> None:
    desk, looker = Message("system", "You hand over."), Message("system", "You look.")
    over = Message("assistant", "", tool_calls=(ToolCall("transfer", "{}", "c1"),))
    commit_reply(session, [desk, TASK], over)
    result = Message("tool", "You are the looker now.", tool_call_id="c1")
    commit_reply(session, [looker, TASK, over, result], ANSWER)
    assert fork_causes(session) == [Cause.EDIT]
    assert main_text(session) == ANSWER


def test_instructions_that_a_follow_up_omits_do_not_end_the_conversation(session: Session) -> None:
    first = commit_reply(session, [SYSTEM, TASK], ANSWER, has_instructions=True)
    commit_reply(session, [TASK, first, Message("user", "And now?")], "Four.")
    assert fork_causes(session) == [Cause.CONTEXT_DELETE]
    assert main_text(session) == "Four."


def test_a_long_system_prompt_that_shows_the_time_is_the_same_one(session: Session) -> None:
    rules = "Count files, and count them well. " * 20
    morning, noon = (Message("system", f"{rules}It is {time}. Be brief.") for time in ("9:00", "12:00"))
    first = commit_reply(session, [morning, TASK], ANSWER)
    commit_reply(session, [noon, TASK, first, Message("user", "And now?")], "Four.")
    assert fork_causes(session) == [Cause.EDIT]
    assert main_text(session) == "Four."


# -- compactions and side calls ------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("quoted", ["", f" The task was: {TASK.content}"])
def test_an_agent_that_compacted_answers_after_its_compaction(
    solved: Session, tools: tuple[dict[str, object], ...], quoted: str
) -> None:
    asked = [SYSTEM, TASK, Message("assistant", ANSWER), Message("user", "Summarise everything so far.")]
    summary = commit_reply(solved, asked, "In short, three files were counted.", tools=tools)
    assert main_text(solved) == summary.content
    commit_reply(solved, [CRITIC, JUDGE], "It is right.", tools=tools)
    after = Message("user", f"Before: {summary.content}{quoted} Go on.")
    commit_reply(solved, [SYSTEM, after], "All done.", tools=tools)
    assert main_text(solved) == "All done."


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("agent", ["", "solver"])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_compaction_without_tools_is_no_side_call(
    session: Session, system: list[Message], agent: str, tools: tuple[dict[str, object], ...]
) -> None:
    messages = [*system, TASK]
    messages.append(commit_reply(session, messages, ANSWER, agent=agent, tools=tools))
    ask = Message("user", "Summarise everything so far.")
    summary = commit_reply(session, [*messages, ask], "In short, three files were counted.", agent=agent)
    after = Message("user", f"Before: {summary.content} Go on.")
    commit_reply(session, [*system, after], "All done.", agent=agent)
    assert main_text(session) == "All done."


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_compacted_conversation_may_use_the_first_tools(session: Session, system: list[Message]) -> None:
    messages = [*system, TASK]
    messages.append(commit_reply(session, messages, ANSWER))
    ask = Message("user", "Summarise everything so far.")
    summary = commit_reply(session, [*messages, ask], "In short, three files were counted.")
    messages = [*system, Message("user", f"Before: {summary.content} Go on.")]
    messages.append(commit_reply(session, messages, "I count the folders now."))
    commit_reply(session, [*messages, Message("user", "Use the tool.")], "All done.", tools=TOOLS)
    assert main_text(session) == "All done."


def test_a_remark_on_an_answer_with_tools_is_a_side_call(session: Session) -> None:
    commit_reply(session, [TASK], ANSWER, tools=TOOLS)
    commit_reply(session, [Message("user", f"Suggest three questions about: {ANSWER}")], "Which files?")
    assert fork_causes(session) == [Cause.SIDE_CALL]
    assert main_text(session) == ANSWER


def test_the_compaction_of_a_helper_is_the_helpers(session: Session) -> None:
    spawn = Message("assistant", "", tool_calls=(ToolCall("agent", f'{{"task": "{TASK.content}"}}', "c1"),))
    commit_reply(session, [SYSTEM, Message("user", "Do everything there is to do.")], spawn)
    found = commit_reply(session, [SYSTEM, TASK], "In the helper's folder are three files.")
    commit_reply(session, [SYSTEM, Message("user", f"Before: {found.content} Go on.")], "Nothing more.")
    assert fork_causes(session) == [Cause.SUB_AGENT, Cause.COMPACTION]
    assert classify_forks(session.tree).main_leaf is session.tree.nodes[session.tree.calls[0].outputs[0]]


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_title_asked_for_first_is_not_the_main_history(
    session: Session, tools: tuple[dict[str, object], ...]
) -> None:
    title = Message("system", "You write titles.")
    commit_reply(session, [title, Message("user", f"A title for: {TASK.content}")], "Files")
    commit_reply(session, [SYSTEM, TASK], ANSWER, tools=tools)
    assert fork_causes(session) == [Cause.SIDE_CALL]
    assert main_text(session) == ANSWER


def test_a_transcript_to_be_named_is_a_side_call_and_no_compaction(session: Session) -> None:
    commit_reply(session, [TASK], ANSWER)
    transcript = f"Name this chat.\nuser: {TASK.content}\nassistant: {ANSWER}"
    commit_reply(session, [Message("user", transcript)], "Files")
    assert fork_causes(session) == [Cause.SIDE_CALL]
    assert main_text(session) == ANSWER


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("thought", ["I look at the first file now.", "A"])
def test_a_conversation_that_is_one_growing_text_is_the_main_history(
    session: Session, system: list[Message], thought: str
) -> None:
    text = TASK.content
    for step in range(4):
        reply = commit_reply(session, [*system, Message("user", text)], f"{thought} {step}")
        text += f"\n{reply.content}\nObservation: file {step}"
    assert Cause.SIDE_CALL not in fork_causes(session)
    assert main_text(session) == f"{thought} 3"


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_last_turn_without_tools_that_is_edited_is_the_main_history(
    session: Session, system: list[Message]
) -> None:
    messages = [*system, TASK]
    messages.append(commit_reply(session, messages, "one", tools=TOOLS))
    commit_reply(session, [*messages, Message("user", "Then say it.")], "two")
    commit_reply(session, [*messages, Message("user", "Then say it aloud.")], "three")
    assert Cause.SIDE_CALL not in fork_causes(session)
    assert main_text(session) == "three"


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_last_turn_without_tools_after_an_edited_task_is_the_main_history(
    session: Session, system: list[Message]
) -> None:
    messages = [*system, TASK]
    messages.append(commit_reply(session, messages, "one", tools=TOOLS))
    messages.append(Message("user", "Go on."))
    messages.append(commit_reply(session, messages, "two", tools=TOOLS))
    messages[len(system)] = Message("user", "Another task altogether.")
    commit_reply(session, [*messages, Message("user", "Answer now.")], "three")
    assert Cause.SIDE_CALL not in fork_causes(session)
    assert main_text(session) == "three"


def test_a_session_of_side_calls_has_the_first_as_its_main_history(session: Session) -> None:
    commit_reply(session, [Message("system", "You write titles."), TASK], "Files")
    assert main_text(session) == "Files"


# -- side calls that names or their absence decide ------------------------------------------------------

AFTER = Message("user", "And the folders?")


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_title_asked_for_first_with_the_task_itself_is_taken_for_the_agent_and_reported(
    session: Session, system: list[Message]
) -> None:
    # The same calls with the same answers as those of an agent with one turn and a critic with two.
    commit_reply(session, [TITLE, TASK], "Files")
    first = commit_reply(session, [*system, TASK], ANSWER)
    commit_reply(session, [*system, TASK, first, AFTER], "Two.")
    report = classify_forks(session.tree)
    assert [fork.cause for fork in report.forks] == [Cause.OTHER_SYSTEM_PROMPT]
    assert report.unnamed_conversations == 1
    assert main_text(session) == "Files"


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("shown", [[TITLE, TASK], [TITLE, Message("user", f"A title for: {TASK.content}")]])
def test_a_side_call_with_a_name_before_the_agent_without_one_is_not_the_main_history(
    session: Session, shown: list[Message], system: list[Message], tools: tuple[dict[str, object], ...]
) -> None:
    commit_reply(session, shown, "Files", agent="title")
    first = commit_reply(session, [*system, TASK], ANSWER, tools=tools)
    assert main_text(session) == ANSWER
    commit_reply(session, [*system, TASK, first, AFTER], "Two.", tools=tools)
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert main_text(session) == "Two."


@pytest.mark.parametrize("parent", ["solver", "main"])
@pytest.mark.parametrize("agent", ["", "title"])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_an_agent_that_names_its_parent_is_not_the_main_one_though_it_calls_first(
    session: Session, parent: str, agent: str, turns: int, tools: tuple[dict[str, object], ...]
) -> None:
    shown = [TITLE, TASK]
    for turn in range(turns):
        reply = commit_reply(session, shown, f"Files {turn}", agent=agent, spawned_by=parent, tools=tools)
        shown += [reply, Message("user", "Shorter.")]
    solver = "solver" if agent else ""
    first = commit_reply(session, [SYSTEM, TASK], ANSWER, agent=solver)
    assert main_text(session) == ANSWER
    commit_reply(session, [SYSTEM, TASK, first, AFTER], "Two.", agent=solver)
    assert fork_causes(session) == [Cause.SUB_AGENT]
    assert main_text(session) == "Two."


def test_if_all_agents_name_a_parent_the_first_one_is_the_main_one(session: Session) -> None:
    commit_reply(session, [SYSTEM, TASK], ANSWER, spawned_by="outer")
    commit_reply(session, [TITLE, TASK], "Files", agent="title", spawned_by="outer")
    assert main_text(session) == ANSWER


@pytest.mark.parametrize("turns", [1, 2])
def test_a_named_agent_that_calls_first_stays_the_main_one_beside_an_unnamed_critic(
    session: Session, turns: int
) -> None:
    messages = [SYSTEM, TASK]
    for turn in range(turns):
        reply = commit_reply(session, messages, f"{ANSWER} {turn}", agent="solver")
        messages += [reply, AFTER]
    verdict = commit_reply(session, [CRITIC, JUDGE], "It is right.")
    if turns > 1:
        commit_reply(session, [CRITIC, JUDGE, verdict, Message("user", "Are you sure?")], "Yes.")
    assert main_text(session) == f"{ANSWER} {turns - 1}"


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_request_appended_after_the_last_answer_is_a_turn_unless_it_has_a_name(
    tools: tuple[dict[str, object], ...],
) -> None:
    for agent, causes, main in (
        ("", [Cause.TOOLS_CHANGED] if tools else [], "Which folders?"),
        ("suggest", [Cause.SUB_AGENT], ANSWER),
    ):
        session = Session("s", CODEC)
        first = commit_reply(session, [SYSTEM, TASK], ANSWER, tools=tools)
        ask = Message("user", "Suggest what the user may ask next.")
        commit_reply(session, [SYSTEM, TASK, first, ask], "Which folders?", agent=agent)
        assert fork_causes(session) == causes
        assert main_text(session) == main


# -- what ends last ------------------------------------------------------------------------------------


def test_the_timeline_that_ends_last_and_was_delivered_is_the_main_history(solved: Session) -> None:
    commit_reply(solved, [SYSTEM, TASK], "Cut off", delivery=Delivery.CANCELLED)
    assert main_text(solved) == ANSWER


def test_without_any_delivered_timeline_the_last_one_is_the_main_history(solved: Session) -> None:
    more = [SYSTEM, TASK, Message("assistant", ANSWER), Message("user", "Go on.")]
    commit_reply(solved, more, "Cut off", delivery=Delivery.CANCELLED)
    assert main_text(solved) == "Cut off"
    policy = ExportPolicy(include_missing_logprobs=True)
    trajectory = Trajectory.from_session(solved, rewards=[{"score": 1.0, "turn": 1}], policy=policy)
    assert not trajectory.finished
    assert [span.call for sample in trajectory.samples for span in sample.rewards] == ["call-0"]


@pytest.mark.parametrize("taken", [0, 1])
def test_of_the_choices_of_one_call_the_continued_one_is_the_main_history(
    session: Session, taken: int
) -> None:
    replies = [Message("assistant", text) for text in ("One.", "Two.")]
    turn = session.prepare(Request((TASK,)))
    call = session.commit(turn, *(Generation(CODEC.encode_reply(one), message=one) for one in replies)).call
    session.record_delivery(call)
    commit_reply(
        session, [TASK, replies[taken], Message("user", "Go on.")], "Cut", delivery=Delivery.CANCELLED
    )
    assert main_text(session) == "Cut"
    trajectory = Trajectory.from_session(
        session, rewards=[{"score": 1.0, "turn": 1}], policy=ExportPolicy(include_missing_logprobs=True)
    )
    (rewarded,) = [sample for sample in trajectory.samples if sample.rewards]
    assert session.tree.nodes[rewarded.answers[-1].node].message.content == replies[taken].content


@pytest.mark.parametrize("strip", [False, True])
def test_the_one_sample_of_a_session_trains_the_last_answer_before_a_cancelled_call(strip: bool) -> None:
    codec = ToyCodec.chatml(strip_thinking=strip)
    session = Session("s", codec)

    def ask(*messages: Message, delivery: Delivery = Delivery.DELIVERED, agent: str = "") -> Message:
        reply = Message("assistant", "Done.", reasoning_content="Let me see.")
        ids = codec.encode_reply(reply)
        turn = session.prepare(Request(messages, agent=agent))
        generation = Generation(ids, np.zeros(len(ids), np.float32), message=reply)
        session.record_delivery(session.commit(turn, generation).call, delivery)
        return reply

    first = (SYSTEM, TASK, ask(SYSTEM, TASK), Message("user", "Go on."))
    shown = (*first, ask(*first))
    ask(*shown, Message("user", "And now?"), delivery=Delivery.CANCELLED)
    ask(CRITIC, JUDGE, agent="critic")
    trajectory = Trajectory.from_session(session, policy=ExportPolicy(max_samples=1))
    assert trajectory.history is not None
    assert not trajectory.finished
    assert trajectory.history.messages[:-1] == (*shown, Message("user", "And now?"))
    (sample,) = trajectory.samples
    assert "call-1" in [answer.call for answer in sample.answers]


def test_a_cancelled_retry_of_an_earlier_answer_does_not_replace_later_ones(solved: Session) -> None:
    more = [SYSTEM, TASK, Message("assistant", ANSWER), Message("user", "Go on.")]
    commit_reply(solved, more, "One more.")
    for messages in (more, [SYSTEM, Message("user", "Edited."), *more[2:]]):
        commit_reply(solved, messages, "Cut off", delivery=Delivery.CANCELLED)
        assert main_text(solved) == "One more."


def test_an_agent_stopped_in_its_last_call_keeps_its_own_conversation(solved: Session) -> None:
    shown = [SYSTEM, TASK, Message("assistant", ANSWER)]
    commit_reply(solved, [*shown, JUDGE], "Right.", agent="critic")
    commit_reply(solved, [*shown, Message("user", "Why?")], "Because.")
    commit_reply(solved, [*shown, JUDGE, TASK], "Cut", agent="critic", delivery=Delivery.CANCELLED)
    leaf = classify_forks(solved.tree).leaf_of("critic")
    assert leaf is not None
    assert leaf.message.content == "Right."


def test_of_the_choices_of_one_call_the_first_is_the_main_history(session: Session) -> None:
    replies = [Message("assistant", text) for text in ("One.", "Two.", "Three.")]
    turn = session.prepare(Request((TASK,)))
    call = session.commit(turn, *(Generation(CODEC.encode_reply(one), message=one) for one in replies)).call
    session.record_delivery(call)
    assert main_text(session) == "One."


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("parent", ["", "main"])
def test_a_named_agent_before_the_main_one_continues_is_a_sub_agent_in_any_order(
    order: tuple[int, int], tools: tuple[dict[str, object], ...], parent: str
) -> None:
    thought = Message("assistant", ANSWER, reasoning_content="I count them.")
    for codec, reply, causes in (
        (CODEC, Message("assistant", ANSWER), []),
        # The prompts of both show the answer without its reasoning, in one node.
        (ToyCodec.chatml(strip_thinking=True), thought, [Cause.THINK_STRIP]),
    ):
        session = Session("s", codec)
        first = commit_reply(session, [SYSTEM, TASK], reply, tools=tools)
        calls = [("Judge it.", "It is right.", "critic", parent), ("And the folders?", "Two.", "", "")]
        for index in order:
            ask, text, agent, spawned_by = calls[index]
            shown = [SYSTEM, TASK, first, Message("user", ask)]
            commit_reply(session, shown, text, agent=agent, spawned_by=spawned_by, tools=tools)
        assert fork_causes(session) == [*causes, Cause.SUB_AGENT]
        assert main_text(session) == "Two."


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.booleans(),
            st.sampled_from(["", "whole", "asked", "edited", "without system prompt"]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "solver"]),
    st.booleans(),
    st.sampled_from(["template", "verbatim"]),
)
def test_agents_that_show_the_main_conversation_before_it_goes_on_do_not_change_it(
    steps: list[tuple[bool, bool, str]], strip: bool, tools: bool, main: str, spawned: bool, history: str
) -> None:
    session = Session("s", ToyCodec.chatml(strip_thinking=strip), history=history)  # type: ignore[arg-type]
    shared = {"tools": TOOLS} if tools else {}
    messages = [SYSTEM, TASK]
    answers: list[str] = []
    for step, (thinks, is_call, show) in enumerate(steps):
        if answers and show:
            shown = messages[1:] if show.startswith("without") else list(messages)
            if show == "edited":
                edited = Message("assistant", "edited", tool_calls=messages[2].tool_calls)
                shown = [*messages[:2], edited, *messages[3:]]
            if show != "whole":
                shown.append(Message("user", "Judge what was said so far."))
            parent = main or "main" if spawned else ""
            verdict = commit_reply(
                session, shown, f"Fine {step}.", agent="critic", spawned_by=parent, **shared
            )
            more = [*shown, verdict, Message("user", "Are you sure?")]
            commit_reply(session, more, f"Yes {step}.", agent="critic", spawned_by=parent, **shared)
        calls = (ToolCall("shell", "{}", f"c{step}"),) if is_call and step < len(steps) - 1 else ()
        thought = "I count them." if thinks else ""
        text = f"answer {step}"
        reply = Message("assistant", text, reasoning_content=thought, tool_calls=calls)
        commit_reply(session, messages, reply, agent=main, **shared)
        answers.append(session.tree.calls[-1].id)
        follow_up = Message("tool", "3", tool_call_id=f"c{step}") if calls else AFTER
        messages += [reply, follow_up]
    assert main_text(session) == f"answer {len(steps) - 1}"
    rewards = [{"score": 1.0, "turn": turn} for turn in range(1, len(answers) + 1)]
    policy = ExportPolicy(include_missing_logprobs=True)
    trajectory = Trajectory.from_session(session, rewards=rewards, policy=policy)
    paid = {span.turn: span.call for sample in trajectory.samples for span in sample.rewards}
    assert paid == dict(enumerate(answers, 1))


def test_the_reward_of_an_agents_turn_is_in_its_own_conversation(solved: Session) -> None:
    commit_reply(solved, [CRITIC, JUDGE], "It is right.", agent="critic")
    rewards: list[dict[str, object]] = [
        {"score": 1.0, "turn": 1},
        {"score": 0.5, "turn": 1, "agent": "critic"},
    ]
    policy = ExportPolicy(include_missing_logprobs=True)
    samples = Trajectory.from_session(solved, rewards=rewards, policy=policy).samples
    assert [(span.score, span.call) for sample in samples for span in sample.rewards] == [
        (1.0, "call-0"),
        (0.5, "call-1"),
    ]
