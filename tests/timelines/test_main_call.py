"""Which call the main history begins at: after cancelled first calls, and before agents with names."""

from __future__ import annotations

import pytest

from branchline import ExportPolicy, Message, Session, Trajectory
from branchline.core.call import Delivery
from branchline.timelines.causes import classify_forks
from tests.timelines.test_causes import CODEC, SYSTEM, TASK, TOOLS, commit_reply
from tests.timelines.test_main_history_cut import CRITIC

TITLE = Message("system", "You write titles.")
AFTER = Message("user", "And now?")
CLOCKS = tuple(Message("system", "Work with care. " * 20 + f"It is 10:0{hour}.") for hour in range(4))
UNDELIVERED = (Delivery.CANCELLED, Delivery.LOST)
ANSWER = "There are three files in this folder."


@pytest.fixture
def session() -> Session:
    return Session("s", CODEC)


def work(
    session: Session, system: list[Message], *, agent: str = "", tools: object = (), turns: int = 3
) -> None:
    messages = [*system, TASK]
    for turn in range(1, turns + 1):
        reply = commit_reply(session, messages, f"{ANSWER} {turn}", agent=agent, tools=tools)
        messages += [reply, Message("user", f"Question {turn}?")]


def main_texts(session: Session) -> list[str]:
    leaf = classify_forks(session.tree).main_leaf
    assert leaf is not None
    return [node.message.content for node in leaf.path() if node.is_sampled]


TURNS = [f"{ANSWER} {turn}" for turn in (1, 2, 3)]


# -- cancelled first calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", UNDELIVERED)
@pytest.mark.parametrize("agent", ["", "main"])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("cut", [[[CLOCKS[1]]], [[]], [[CLOCKS[1]], [CLOCKS[1]]], [[CLOCKS[1]], [CLOCKS[2]]]])
def test_an_agent_that_begins_again_after_a_cancelled_call_is_the_main_one(
    session: Session, cut: list[list[Message]], agent: str, tools: object, delivery: Delivery
) -> None:
    for system in cut:
        commit_reply(session, [*system, TASK], "Cut off", agent=agent, tools=tools, delivery=delivery)
    work(session, [CLOCKS[0]], agent=agent, tools=tools)
    assert main_texts(session) == TURNS
    rewards: list[dict[str, object]] = [{"score": 0.5, "turn": 2}, {"score": 1.0, "turn": 3, "agent": agent}]
    policy = ExportPolicy(include_missing_logprobs=True)
    trajectory = Trajectory.from_session(session, rewards=rewards if agent else rewards[:1], policy=policy)
    assert (trajectory.answer, trajectory.finished) == (TURNS[2], True)
    paid = [
        CODEC.decode(sample.response_ids[span.start : span.end])
        for sample in trajectory.samples
        for span in sample.rewards
    ]
    assert paid == [f"{turn}<end>" for turn in (TURNS[1:] if agent else TURNS[1:2])]


def test_an_agent_may_begin_again_under_another_name(session: Session) -> None:
    commit_reply(session, [CLOCKS[1], TASK], "Cut off", agent="first", delivery=Delivery.CANCELLED)
    work(session, [CLOCKS[0]], agent="second")
    assert main_texts(session) == TURNS


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_title_between_a_cancelled_call_and_its_retry_is_not_the_main_history(
    session: Session, tools: object
) -> None:
    commit_reply(session, [SYSTEM, TASK], "Cut off", tools=tools, delivery=Delivery.CANCELLED)
    commit_reply(session, [TITLE, TASK], "Files")
    work(session, [SYSTEM], tools=tools)
    assert main_texts(session) == TURNS


@pytest.mark.parametrize(
    ("shown", "tools"), [([TITLE, TASK], TOOLS), ([TITLE, Message("user", f"Name: {TASK.content}")], ())]
)
def test_a_side_call_does_not_replace_the_cancelled_calls_of_an_agent(
    session: Session, shown: list[Message], tools: object
) -> None:
    for clock in CLOCKS:
        commit_reply(session, [clock, TASK], "Cut off", tools=tools, delivery=Delivery.CANCELLED)
    commit_reply(session, shown, "Files")
    leaf = classify_forks(session.tree).main_leaf
    assert leaf is not None
    assert session.tree.call_of(leaf) is session.tree.calls[0]


def test_the_calls_of_an_agent_that_another_one_spawned_do_not_replace_its_cancelled_call(
    session: Session,
) -> None:
    commit_reply(session, [SYSTEM, TASK], "Cut off", delivery=Delivery.CANCELLED)
    commit_reply(session, [CRITIC, TASK], ANSWER, agent="helper", spawned_by="main")
    assert main_texts(session) == ["Cut off"]


def test_a_conversation_with_a_delivered_answer_stays_the_main_one(session: Session) -> None:
    first = commit_reply(session, [SYSTEM, TASK], ANSWER)
    commit_reply(session, [SYSTEM, TASK, first, AFTER], "Cut off", delivery=Delivery.CANCELLED)
    commit_reply(session, [CRITIC, Message("user", f"Is it right? {ANSWER}")], "It is right.")
    assert main_texts(session) == [ANSWER, "Cut off"]


# -- side calls before an agent with a name ----------------------------------------------------------


@pytest.mark.parametrize("shown", ["Hi.", TASK.content, f"A title for: {TASK.content}"])
@pytest.mark.parametrize("agent", ["", "main"])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_a_title_without_a_name_before_an_agent_with_tools_is_not_the_main_history(
    session: Session, shown: str, agent: str, turns: int, count: int
) -> None:
    for number in range(count):
        commit_reply(session, [TITLE, Message("user", shown)], f"Files {number}")
    work(session, [SYSTEM], agent=agent, tools=TOOLS, turns=turns)
    assert main_texts(session) == TURNS[:turns]


@pytest.mark.parametrize("shown", [TASK.content, f"A title for: {TASK.content}"])
@pytest.mark.parametrize("title", ["title", "main"])
@pytest.mark.parametrize("agent", ["", "main", "worker"])
def test_a_title_with_any_name_before_an_agent_with_tools_is_not_the_main_history(
    session: Session, shown: str, title: str, agent: str
) -> None:
    commit_reply(session, [TITLE, Message("user", shown)], "Files", agent=title)
    work(session, [SYSTEM], agent=agent, tools=TOOLS)
    assert main_texts(session) == TURNS


@pytest.mark.parametrize("agent", ["", "main"])
@pytest.mark.parametrize("is_asked_as_task", [False, True])
def test_an_agent_of_one_turn_stays_the_main_one_beside_a_named_critic_with_tools(
    session: Session, agent: str, is_asked_as_task: bool
) -> None:
    commit_reply(session, [SYSTEM, TASK], ANSWER, agent=agent)
    judge = Message("user", f"Is it right? {ANSWER}")
    messages = [CRITIC, TASK, judge] if is_asked_as_task else [CRITIC, judge]
    verdict = commit_reply(session, messages, "It is right.", agent="critic", tools=TOOLS)
    commit_reply(session, [*messages, verdict, AFTER], "Yes.", agent="critic", tools=TOOLS)
    assert main_texts(session) == [ANSWER]


@pytest.mark.parametrize("agent", ["", "main"])
def test_an_agent_of_one_turn_stays_the_main_one_beside_an_agent_that_it_spawned(
    session: Session, agent: str
) -> None:
    commit_reply(session, [SYSTEM, TASK], ANSWER, agent=agent)
    commit_reply(session, [CRITIC, TASK], "Two", agent="search", tools=TOOLS, spawned_by=agent or "main")
    assert main_texts(session) == [ANSWER]


@pytest.mark.parametrize("agent", ["", "planner"])
def test_a_continued_agent_without_tools_stays_the_main_one(session: Session, agent: str) -> None:
    work(session, [SYSTEM], agent=agent)
    commit_reply(session, [CRITIC, TASK], "Two", agent="worker", tools=TOOLS)
    assert main_texts(session) == TURNS
