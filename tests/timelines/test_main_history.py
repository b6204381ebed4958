"""The main history is the known one, whatever else happens in a session and in whatever order calls end."""

from __future__ import annotations

from random import Random

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
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import Cause
from tests.test_contract import PLANNED_CAUSES
from tests.timelines.test_causes import CODEC, SYSTEM, TASK, TOOLS, commit_reply, fork_causes

CANDIDATES = (Cause.BEST_OF_N, Cause.DUPLICATE)
"""Causes after which the agent has several answers and continues none."""
ENDINGS = [None, *(cause for cause in PLANNED_CAUSES if cause not in CANDIDATES)]
CRITIC = Message("system", "You are the critic agent.")


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
) -> None:
    generator = PlanGenerator(Random(seed), reasoning=strip, with_tools=tools, with_names=named, races=False)
    plan = generator.generate(steps, only=only, ending=ending)
    codec = ToyCodec.chatml(strip_thinking=strip)
    runner = PlanRunner(Session("s", codec, history=history), codec)  # type: ignore[arg-type]
    rng = Random(seed)
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    calls = {executed.planned.index: executed.call for executed in runner.executed}
    known = generator.main_answers
    last, choice = known[-1]

    rewards = [{"score": turn / 10, "turn": turn} for turn in range(1, len(known) + 1)]
    trajectory = Trajectory.from_session(runner.session, rewards=rewards)
    assert trajectory.history is not None
    assert trajectory.history.messages[-1].key == plan[last].outputs[choice].message.key
    assert trajectory.answer == plan[last].outputs[choice].message.content
    # Tool results are put into the order of their calls.
    assert sorted(message.key for message in trajectory.history.messages[:-1]) == sorted(
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
    assert "1 conversations under other system prompts have no agent name" in warning
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


def test_of_the_choices_of_one_call_the_first_is_the_main_history(session: Session) -> None:
    replies = [Message("assistant", text) for text in ("One.", "Two.", "Three.")]
    turn = session.prepare(Request((TASK,)))
    call = session.commit(turn, *(Generation(CODEC.encode_reply(one), message=one) for one in replies)).call
    session.record_delivery(call)
    assert main_text(session) == "One."


def test_a_named_agent_before_the_main_one_continues_is_a_sub_agent_in_any_order() -> None:
    for order in ((0, 1), (1, 0)):
        session = Session("s", CODEC)
        first = commit_reply(session, [SYSTEM, TASK], ANSWER)
        calls = [("Judge it.", "It is right.", "critic"), ("And the folders?", "Two.", "")]
        for index in order:
            ask, reply, agent = calls[index]
            commit_reply(session, [SYSTEM, TASK, first, Message("user", ask)], reply, agent=agent)
        assert fork_causes(session) == [Cause.SUB_AGENT]
        assert main_text(session) == "Two."


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
