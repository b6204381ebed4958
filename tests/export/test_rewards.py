"""Rewards for parts of a session are in the samples that train these parts, and in no other."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import (
    ExportPolicy,
    Generation,
    Message,
    Request,
    SampleStream,
    Session,
    ToolCall,
    ToyCodec,
    Trajectory,
    export_samples,
)
from branchline.core.call import Delivery
from branchline.core.errors import MessageError
from branchline.core.reward import read_rewards
from branchline.core.sample import RewardSpan
from branchline.export.rewards import RewardParts, session_reward
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from tests.export.test_samples import CODEC, commit_reply, forked_session

USER = Message("user", "u")
TOOL_CODEC = ToyCodec.chatml()


def linear_session() -> Session:
    """Returns a session with the answers A1 and A22, calls call-0 and call-1."""
    session = Session("s", CODEC)
    reply = commit_reply(session, [USER], "A1")
    commit_reply(session, [USER, reply, Message("user", "x")], "A22")
    return session


def spans_by_text(session: Session, *rewards: dict[str, Any]) -> list[list[tuple[float, str]]]:
    """Returns for each sample the scores and the text that each is for."""
    samples = export_samples(session.tree, rewards=rewards).samples
    return [
        [(span.score, CODEC.decode(sample.response_ids[span.start : span.end])) for span in sample.rewards]
        for sample in samples
    ]


def test_a_turn_and_a_call_are_rewarded_at_their_tokens() -> None:
    rewards: tuple[dict[str, Any], ...] = ({"score": 0.5, "turn": 1}, {"score": 0.25, "call": "call-1"})
    assert spans_by_text(linear_session(), *rewards) == [[(0.5, "A1"), (0.25, "A22")]]
    (sample,) = export_samples(linear_session().tree, rewards=rewards).samples
    assert sample.reward is None
    assert [(span.call, span.turn) for span in sample.rewards] == [("call-0", 1), ("call-1", None)]


def commit_choices(session: Session, messages: list[Message], *replies: Message) -> None:
    """Commits a call with one choice for each reply."""
    turn = session.prepare(Request(tuple(messages)))
    choices = [TOOL_CODEC.encode_reply(reply) for reply in replies]
    generations = [
        Generation(ids, np.full(len(ids), -1, np.float32), message=reply)
        for ids, reply in zip(choices, replies, strict=True)
    ]
    call = session.commit(turn, *generations).call
    session.record_delivery(call, Delivery.DELIVERED)


def calling(tool: str) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(tool, "{}", "c"),))


def test_a_tool_is_rewarded_in_an_answer_or_in_the_whole_session() -> None:
    session = Session("s", TOOL_CODEC)
    commit_choices(session, [USER], calling("search"))
    result = Message("tool", "found", tool_call_id="c")
    commit_choices(session, [USER, calling("search"), result], calling("read"))
    rewards: tuple[dict[str, Any], ...] = (
        {"score": 1, "tool": "search"},
        {"score": 2, "tool": "search", "call": "call-0"},
        {"score": 3, "tool": "read", "turn": 2},
    )
    (sample,) = export_samples(session.tree, rewards=rewards).samples
    first, second = sample.answers
    assert sample.rewards == (
        RewardSpan(1, 0, len(sample.response_ids), "", None, "search"),
        RewardSpan(2, first.start, first.end, "call-0", None, "search"),
        RewardSpan(3, second.start, second.end, "call-1", 2, "read"),
    )


def test_a_tool_of_a_call_is_rewarded_in_the_choices_that_call_it() -> None:
    session = Session("s", TOOL_CODEC)
    commit_choices(session, [USER], calling("pay"), Message("assistant", "I do nothing."), calling("wait"))
    rewards: list[dict[str, Any]] = [{"score": 1, "tool": "pay", "call": "call-0"}]
    export = export_samples(session.tree, rewards=rewards)
    assert [[span.tool for span in sample.rewards] for sample in export.samples] == [["pay"], [], []]
    missing = export_samples(session.tree, rewards=[{"score": 1, "tool": "sing", "call": "call-0"}])
    assert [sample.rewards for sample in missing.samples] == [(), (), ()]
    assert missing.report.unassigned_rewards == 1


def test_a_reward_of_a_timeline_replaces_that_of_the_session_in_its_samples() -> None:
    session = forked_session()
    leaves = session.tree.leaves()
    export = export_samples(
        session.tree, reward=0.5, rewards=[{"score": 2.0, "timeline": leaves[1].id}, {"score": 0.5}]
    )
    assert [sample.reward for sample in export.samples] == [0.5, 2.0, 0.5]
    assert [len(sample.rewards) for sample in export.samples] == [0, 1, 0]


def test_a_timeline_keeps_its_reward_when_the_conversation_continues() -> None:
    session = Session("s", CODEC)
    reply = commit_reply(session, [USER], "A1")
    rewards: list[dict[str, Any]] = [{"score": 2.0, "timeline": session.tree.leaves()[0].id}]
    commit_reply(session, [USER, reply, Message("user", "x")], "A22")
    (sample,) = export_samples(session.tree, rewards=rewards).samples
    assert sample.reward == 2.0


def test_a_later_reward_replaces_one_for_the_same_part_unless_their_ids_differ() -> None:
    rewards: list[dict[str, Any]] = [{"score": 1, "turn": 1}, {"score": 2, "turn": 1}]
    assert spans_by_text(linear_session(), *rewards) == [[(2.0, "A1")]]
    rewards = [
        {"score": 1, "tool": "f", "turn": 1, "id": "a"},
        {"score": 2, "tool": "f", "turn": 1, "id": "b"},
    ]
    session = Session("s", TOOL_CODEC)
    commit_choices(session, [USER], calling("f"))
    (sample,) = export_samples(session.tree, rewards=rewards).samples
    assert [span.score for span in sample.rewards] == [1.0, 2.0]


def test_a_turn_whose_reasoning_the_template_drops_is_rewarded_where_it_was_sampled() -> None:
    codec = ToyCodec.chatml(strip_thinking=True)
    session = Session("s", codec)
    first = Message("assistant", "A1", reasoning_content="hm")
    for messages, answer in (
        ((USER,), first),
        ((USER, first, Message("user", "x")), Message("assistant", "A2")),
    ):
        turn = session.prepare(Request(messages))
        session.commit(turn, Generation(codec.encode_reply(answer), message=answer))
    policy = ExportPolicy(include_missing_logprobs=True)
    rewards: list[dict[str, Any]] = [{"score": 1, "turn": 1}, {"score": 2, "turn": 2}]
    export = export_samples(session.tree, policy, rewards=rewards)
    assert [[span.score for span in sample.rewards] for sample in export.samples] == [[1.0], [2.0]]
    assert export.report.unassigned_rewards == 0


def commit_attempt(session: Session, resumes: str, text: str, delivery: Delivery) -> None:
    """Commits an answer to the first question that begins with those of the call that it resumes."""
    turn = session.prepare(Request((USER,), resume_call_id=resumes))
    ids = CODEC.encode(text)
    call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32))).call
    session.record_delivery(call, delivery)


def resumed_session() -> Session:
    session = Session("s", CODEC)
    commit_attempt(session, "", "ha", Delivery.CANCELLED)
    commit_attempt(session, "call-0", "half", Delivery.DELIVERED)
    return session


def test_the_reward_of_a_resumed_call_is_that_of_the_call_that_continued_it() -> None:
    session, rewards = resumed_session(), [{"score": 1, "call": "call-0"}]
    assert spans_by_text(session, *rewards) == [[(1.0, "half")]]
    assert export_samples(session.tree, rewards=rewards).report.unassigned_rewards == 0


def test_the_reward_of_a_timeline_that_ends_in_a_resumed_call_is_that_of_the_whole_answer() -> None:
    session = Session("s", CODEC)
    commit_attempt(session, "", "h", Delivery.CANCELLED)
    (named,) = session.tree.leaves()
    commit_attempt(session, "call-0", "ha", Delivery.CANCELLED)
    commit_attempt(session, "call-1", "half", Delivery.DELIVERED)
    reply = session.tree.nodes[-1].message
    commit_reply(session, [USER, reply, Message("user", "x")], "A2")
    export = export_samples(session.tree, rewards=[{"score": 1, "timeline": named.id}])
    assert [sample.reward for sample in export.samples] == [1.0]
    assert export.report.unassigned_rewards == 0


def test_a_later_reward_of_a_resumed_answer_replaces_that_of_the_cancelled_one() -> None:
    session = resumed_session()
    cancelled, whole = (node.id for node in session.tree.nodes if node.is_sampled)
    for first, second in ((cancelled, whole), (whole, cancelled)):
        rewards = [{"score": 1, "timeline": first}, {"score": 2, "timeline": second}]
        export = export_samples(session.tree, rewards=rewards)
        assert [sample.reward for sample in export.samples] == [2.0]
        assert export.report.unassigned_rewards == 0


def test_a_timeline_that_was_continued_and_whose_call_was_resumed_has_its_reward_in_both_samples() -> None:
    session = Session("s", CODEC)
    commit_attempt(session, "", "ha", Delivery.CANCELLED)
    cancelled = session.tree.nodes[-1]
    commit_reply(session, [USER, cancelled.message, Message("user", "x")], "A2")
    commit_attempt(session, "call-0", "half", Delivery.DELIVERED)
    export = export_samples(session.tree, rewards=[{"score": 1, "timeline": cancelled.id}])
    assert [sample.reward for sample in export.samples] == [1.0, 1.0]
    assert export.report.unassigned_rewards == 0


def test_rewards_that_no_sample_has_are_counted() -> None:
    session = Session("s", CODEC)
    reply = commit_reply(session, [USER], "A1")
    commit_reply(session, [USER, reply, Message("user", "x")], "half", Delivery.CANCELLED)
    rewards: list[dict[str, Any]] = [
        {"score": 1, "turn": 1},
        {"score": 1, "turn": 7},
        {"score": 1, "call": "call-1"},
    ]
    export = export_samples(session.tree, rewards=rewards)
    assert export.report.unassigned_rewards == 2
    assert len(export.samples[0].rewards) == 1


def test_a_reward_beyond_the_length_limit_is_counted_as_unassigned() -> None:
    limit = len("user:u\nassistant:A")
    export = export_samples(
        linear_session().tree,
        ExportPolicy(max_tokens=limit),
        rewards=[{"score": 1, "turn": 1}, {"score": 1, "turn": 2}],
    )
    assert [(span.start, span.end) for span in export.samples[0].rewards] == [(0, 1)]
    assert export.report.unassigned_rewards == 1


@pytest.mark.parametrize("reward", [{"score": 0.2, "call_id": "x"}, {"score": "1"}, {"score": 1, "turns": 2}])
def test_a_reward_given_in_a_program_that_cannot_be_read_is_refused(reward: dict[str, Any]) -> None:
    session = linear_session()
    with pytest.raises(MessageError):
        export_samples(session.tree, rewards=[{"score": 1.0}, reward])
    with pytest.raises(MessageError):
        Trajectory.from_session(session, rewards=[{"score": 1.0}, reward])
    (sample,) = Trajectory.from_session(session, rewards=[{"score": True, "note": "x"}]).samples
    assert (sample.reward, sample.reward_extras) == (1.0, '{"note":"x"}')


def test_a_reward_of_an_empty_answer_is_counted_as_unassigned() -> None:
    """It trains nothing, so no sample can have its reward."""
    session, question = Session("s", CODEC), Message("user", "q")
    nothing = Generation(CODEC.encode("")[:0], np.zeros(0, np.float32), 0, "length")
    session.commit(session.prepare(Request((question,))), nothing, call_id="empty")
    commit_reply(session, [question, Message("assistant", ""), Message("user", "x")], "A")
    call = session.tree.calls[1].id
    rewards = [{"score": 1.0, "call": "empty"}, {"score": 0.5, "call": call}]
    export = export_samples(session.tree, rewards=rewards)
    assert [[one.score for one in sample.rewards] for sample in export.samples] == [[0.5]]
    assert export.report.unassigned_rewards == 1


def test_a_reward_for_a_message_that_ends_no_timeline_is_refused_or_counted_as_unassigned() -> None:
    tree = linear_session().tree
    for node in tree.nodes[1:]:
        reward = {"score": 1.0, "timeline": node.id}
        rewards = [sample.reward for sample in export_samples(tree, rewards=[reward]).samples]
        unassigned = export_samples(tree, rewards=[reward]).report.unassigned_rewards
        if node.is_sampled:
            RewardParts(tree).resolve(read_rewards(reward)[0])
            assert (set(rewards), unassigned) == ({1.0}, 0)
        else:
            with pytest.raises(MessageError, match=f"timeline: got {node.id}, expected the id of a timeline"):
                RewardParts(tree).resolve(read_rewards(reward)[0])
            assert (set(rewards), unassigned) == ({None}, 1)


def test_the_last_reward_without_a_part_is_that_of_the_session() -> None:
    assert session_reward([]) is None
    assert session_reward([{"score": 1}, {"score": 2, "note": "x"}, {"score": 3, "call": "c"}]) == 2.0


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"call": "unknown"}, "call: got 'unknown', expected the id of a call"),
        ({"call": 1}, "call: got 1"),
        ({"turn": 0}, "turn: got 0, expected the number of an answer"),
        ({"turn": True}, "turn: got True"),
        ({"turn": "1"}, "turn: got '1'"),
        ({"timeline": 99}, "timeline: got 99, expected the id of a timeline"),
        ({"timeline": 0}, "timeline: got 0"),
        ({"tool": ""}, "tool: got '', expected the name of a tool"),
    ],
)
def test_a_reward_for_a_part_that_does_not_exist_is_refused(part: dict[str, Any], expected: str) -> None:
    with pytest.raises(MessageError, match=re.escape(expected)):
        RewardParts(linear_session().tree).resolve(read_rewards({"score": 1, **part})[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["split", "first", "all"]))
def test_every_reward_of_a_call_is_at_the_tokens_of_its_answers_or_counted(
    seed: int, steps: int, shares: str
) -> None:
    codec = ToyCodec.chatml()
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(Random(seed)).generate(steps))
    tree = runner.session.tree
    rewards: list[dict[str, Any]] = [{"score": float(call.index), "call": call.id} for call in tree.calls]
    export = export_samples(tree, ExportPolicy(shares=shares), rewards=rewards)  # type: ignore[arg-type]
    rewarded: set[int] = set()
    for sample in export.samples:
        for span in sample.rewards:
            call = tree.calls[int(span.score)]
            rewarded.add(call.index)
            answers = [tree.nodes[node].sampled_ids for node in call.outputs]
            ids = sample.response_ids[span.start : span.end]
            assert any(answer is not None and answer.tobytes() == ids.tobytes() for answer in answers)
            assert sample.response_mask[span.start : span.end].all()
            assert call.id == span.call
    outputs = sum(len(call.outputs) for call in tree.calls)
    assert export.report.unassigned_rewards <= outputs
    assert len(rewarded) >= len(tree.calls) - export.report.unassigned_rewards


def test_a_reward_of_the_session_among_the_rewards_is_that_of_its_samples() -> None:
    session = linear_session()
    for reward, expected in ((None, 0.25), (0.5, 0.5)):
        export = export_samples(session.tree, reward=reward, rewards=[{"score": 1.0}, {"score": 0.25}])
        assert [sample.reward for sample in export.samples] == [expected]
    assert [sample.reward for sample in SampleStream(session.tree, rewards=[{"score": 1.0}])] == [1.0]


@pytest.mark.parametrize("reward", [True, 1, np.float64(1), np.float32(1), np.bool_(True), np.int64(1)])
def test_a_reward_of_an_export_is_a_plain_number(reward: Any) -> None:
    session = linear_session()
    (sample,) = export_samples(session.tree, reward=reward).samples
    trajectories = [Trajectory.from_session(session, reward=reward)]
    trajectories.append(trajectories[0].with_reward(0.5).with_reward(reward))
    for found in (sample.reward, *(one.reward for one in trajectories), trajectories[1].samples[0].reward):
        assert (found, type(found)) == (1.0, float)


@pytest.mark.parametrize("reward", ["1", [1], float("inf"), float("nan")])
def test_what_is_no_number_is_no_reward_of_an_export(reward: Any) -> None:
    session = linear_session()
    trajectory = Trajectory.from_session(session, reward=1.0)
    for use in (
        lambda: export_samples(session.tree, reward=reward),
        lambda: Trajectory.from_session(session, reward=reward),
        lambda: trajectory.with_reward(reward),
    ):
        with pytest.raises(MessageError, match="reward"):
            use()


@pytest.mark.parametrize(
    "reward",
    [
        {"score": "1", "turn": 1},
        {"score": float("nan")},
        {"scor": 1},
        {"score": 1, "call_id": "call-0"},
        {"score": 1, "call": "call-0", "agent": "p"},
        {"score": 1, "timeline": "zz"},
    ],
)
def test_a_stream_of_samples_refuses_what_is_no_reward(reward: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        SampleStream(linear_session().tree, rewards=[reward])
