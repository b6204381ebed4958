"""A call that is cut off does not move the main history to an answer that the agent left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Generation, Journal, Message, Request, Session, ToyCodec, Trajectory
from branchline.core.call import Call, Delivery
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.timelines.test_causes import CODEC, FEWER_TOOLS, SYSTEM, TASK, TOOLS

CRITIC = Message("system", "You are the critic agent.")
UNDELIVERED = (Delivery.CANCELLED, Delivery.LOST)
STEPS = (
    "plain",
    "candidates",
    "choices",
    "edit",
    "context edit",
    "compaction",
    "cut",
    "late cut",
    "tool change",
)
CUTS = ("next", "again", "edited", "context edit", "compaction")


def generation_of(reply: Message) -> Generation:
    ids = CODEC.encode_reply(reply)
    return Generation(ids, np.zeros(len(ids), np.float32), message=reply)


@dataclass
class Agent:
    """An agent that knows which answers its conversation has."""

    session: Session
    rng: Random
    name: str = ""
    tools: tuple[Mapping[str, object], ...] = ()
    messages: list[Message] = field(default_factory=lambda: [SYSTEM, TASK])
    turns: list[Message] = field(default_factory=list)
    """The answers of the conversation."""
    count: int = 0

    def request(
        self,
        messages: list[Message],
        choices: int = 1,
        delivery: Delivery = Delivery.DELIVERED,
        resume: str = "",
        late: Delivery | None = None,
    ) -> tuple[Call, list[Message]]:
        """Calls the model; with `late`, a call that its client gave up ends after the one sent again."""
        request = Request(tuple(messages), self.tools, agent=self.name, resume_call_id=resume)
        replies = []
        for _ in range(choices):
            self.count += 1
            thought = self.rng.choice(["", "I count."])
            replies.append(Message("assistant", f"This is answer {self.count}.", reasoning_content=thought))
        cut = self.session.prepare(request) if late else None
        call = self.session.commit(self.session.prepare(request), *map(generation_of, replies)).call
        self.session.record_delivery(call, delivery)
        if cut is not None and late is not None:
            given_up = self.session.commit(cut, generation_of(Message("assistant", "Late"))).call
            self.session.record_delivery(given_up, late)
        return call, replies

    def take(self, _: Call, replies: list[Message], choice: int = 0) -> None:
        """Goes on with an answer."""
        self.turns.append(replies[choice])
        self.messages = [*self.messages, replies[choice]]

    def ask(self, text: str) -> None:
        self.messages = [*self.messages, Message("user", text)]

    def edit_context(self) -> None:
        """Edits a message before the last answer."""
        places = [index for index, one in enumerate(self.messages[:-1]) if one.role == "user"]
        place = self.rng.choice(places)
        edited = Message("user", f"An edited question {self.count}.")
        self.messages = [*self.messages[:place], edited, *self.messages[place + 1 :]]

    def compact(self) -> None:
        """Continues with a summary, which is the last answer of the former conversation."""
        self.ask("Summarize all that was done so far.")
        self.take(*self.request(self.messages))
        summary = self.messages[-1].content
        self.messages = [SYSTEM, Message("user", f"Summary of the work so far: {summary}")]

    def play(self, step: str, number: int, *, is_taken_last: bool) -> None:
        """Gets the next answer; `is_taken_last` if no call shows which of several answers the agent took, so
        that it must be the last one, or the first choice."""
        if number and step != "compaction":
            self.ask(f"Please do part {number} of the work.")
        if step == "candidates":
            found = [self.request(self.messages) for _ in range(self.rng.randint(2, 3))]
            self.take(*(found[-1] if is_taken_last else self.rng.choice(found)))
        elif step == "choices":
            self.take(*self.request(self.messages, 3), 0 if is_taken_last else self.rng.randrange(3))
        elif step == "edit":
            self.request(self.messages)
            self.messages = [*self.messages[:-1], Message("user", f"Rather do part {number}0 of it.")]
            self.take(*self.request(self.messages))
        elif step == "cut":
            self.request(self.messages, delivery=self.rng.choice(UNDELIVERED))
            self.take(*self.request(self.messages))
        elif step == "late cut":
            self.take(*self.request(self.messages, late=self.rng.choice(UNDELIVERED)))
        elif step == "compaction" and number:
            self.compact()
            self.turns = []
            self.take(*self.request(self.messages))
        else:
            if step == "context edit" and number:
                self.edit_context()
            if step == "tool change" and self.tools:
                self.tools = FEWER_TOOLS if self.tools is TOOLS else TOOLS
            self.take(*self.request(self.messages))

    def be_cut(self, kind: str) -> Message | None:
        """Plays a last call that is cut off. Returns its answer if the conversation ends with it."""
        if kind == "compaction":
            self.compact()
        elif kind == "again":
            self.messages = self.messages[:-1]
        elif kind == "edited":
            self.messages = [*self.messages[:-2], Message("user", "Do something else.")]
        else:
            if kind == "context edit":
                self.edit_context()
            self.ask("Please do the rest of the work.")
        _, (reply,) = self.request(self.messages, delivery=self.rng.choice(UNDELIVERED))
        return reply if kind in ("next", "context edit") else None


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=5),
    st.sampled_from(CUTS),
    st.sampled_from(["", "solver"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["template", "verbatim"]),
    st.booleans(),
)
@example(0, ["edit", "plain", "plain"], "next", "", False, False, "template", False)
@example(0, ["plain", "compaction", "plain"], "next", "", False, False, "template", False)
@example(0, ["plain", "context edit", "plain"], "next", "", False, False, "template", False)
@example(1, ["choices"], "next", "", False, False, "template", False)
@example(1, ["plain", "candidates"], "next", "", False, True, "template", False)
def test_a_cut_last_call_leaves_the_conversation_where_it_was(
    seed: int, steps: list[str], cut: str, name: str, tools: bool, strip: bool, history: str, judged: bool
) -> None:
    session = Session("s", ToyCodec.chatml(strip_thinking=strip), history=history)  # type: ignore[arg-type]
    agent = Agent(session, Random(seed), name, TOOLS if tools else ())
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        agent.play(step, number, is_taken_last=is_last and cut in ("again", "edited"))
    reply = agent.be_cut(cut)
    if judged:
        judge = Agent(session, Random(seed), messages=[CRITIC, Message("user", "Is this work done?")])
        judge.take(*judge.request(judge.messages))

    rewards = [{"score": turn, "turn": turn} for turn in range(1, len(agent.turns) + 1)]
    trajectory = Trajectory.from_session(session, rewards=rewards)
    assert trajectory.answer == (reply or agent.turns[-1]).content
    assert trajectory.finished == (reply is None)
    assert trajectory.history is not None
    assert len(trajectory.history.sampled) <= len(agent.turns) + (reply is not None)
    assert paid_answers(trajectory) == {turn: one.content for turn, one in enumerate(agent.turns, 1)}
    (sample,) = Trajectory.from_session(session, policy=ExportPolicy(max_samples=1)).samples
    assert agent.turns[-1].content in CODEC.decode(sample.response_ids[sample.answers[-1].start :])


def paid_answers(trajectory: Trajectory) -> dict[int | None, str]:
    """Returns the text of the answer that the reward of each turn is for."""
    paid: dict[int | None, str] = {}
    for sample in trajectory.samples:
        for span in sample.rewards:
            text = CODEC.decode(sample.response_ids[span.start : span.end])
            paid[span.turn] = text[text.index("This is") :].removesuffix("<end>")
    return paid


@pytest.mark.parametrize("agent", ["", "solver"])
@pytest.mark.parametrize("name", ["", "helper"])
def test_a_cut_call_of_an_agent_leaves_its_turns(agent: str, name: str) -> None:
    session = Session("s", CODEC)
    main = Agent(session, Random(0), agent)
    main.play("plain", 0, is_taken_last=True)
    helper = Agent(session, Random(0), name or agent, messages=[TASK] if name else main.messages)
    if not name:
        helper.ask("Please go on.")
    helper.request(helper.messages)
    for number in range(2):
        helper.play("plain", number, is_taken_last=True)
    helper.be_cut("next")
    first = 1 if name else 2
    rewards = [{"score": 1.0, "turn": first, **({"agent": name} if name else {})}]
    trajectory = Trajectory.from_session(session, rewards=rewards)
    assert paid_answers(trajectory) == {first: helper.turns[0].content}


def test_an_agent_of_cut_calls_ends_with_the_last_of_them() -> None:
    agent = Agent(Session("s", CODEC), Random(0))
    for _ in range(2):
        agent.request(agent.messages, 2, Delivery.CANCELLED)
    trajectory = Trajectory.from_session(agent.session)
    assert trajectory.answer == "This is answer 3."
    assert not trajectory.finished


def test_a_resumed_call_is_followed_though_an_answer_before_it_was_rejected() -> None:
    agent = Agent(Session("s", CODEC), Random(0))
    agent.request(agent.messages)
    agent.play("plain", 0, is_taken_last=True)
    agent.ask("Please go on.")
    cut, _ = agent.request(agent.messages, delivery=Delivery.CANCELLED)
    for delivery, finished in ((Delivery.CANCELLED, False), (Delivery.DELIVERED, True)):
        cut, (reply,) = agent.request(agent.messages, delivery=delivery, resume=cut.id)
        trajectory = Trajectory.from_session(agent.session, rewards=[{"score": 1.0, "turn": 1}])
        assert (trajectory.answer, trajectory.finished) == (reply.content, finished)
        assert paid_answers(trajectory) == {1: agent.turns[0].content}


def test_a_restart_keeps_the_main_history_of_a_cut_conversation(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        managed, _, _ = SessionStore(CODEC, journal=journal).open(SessionOptions(id="a"))
        agent = Agent(managed.session, Random(1))
        for number, step in enumerate(("edit", "candidates")):
            agent.play(step, number, is_taken_last=False)
        reply = agent.be_cut("next")
        journal.flush()
        restored = SessionStore(CODEC, journal=journal).get("a").trajectory()
        assert reply is not None
        assert (restored.answer, restored.finished) == (reply.content, False)
        assert restored.history == managed.trajectory().history
