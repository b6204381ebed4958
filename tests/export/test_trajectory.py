"""Trajectories of sessions: histories as messages, samples as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
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
    Session,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
    export_samples,
    timelines_of,
)
from branchline.core.errors import InputError
from branchline.core.sample import LogprobMeasurement
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator
from branchline.timelines.causes import Cause
from tests.export.compare import assert_equal_samples
from tests.export.test_samples import CODEC, commit_reply, forked_session


def texts(messages: tuple[Message, ...]) -> list[str]:
    return [message.content for message in messages]


def test_the_main_history_is_the_timeline_that_ends_last() -> None:
    trajectory = Trajectory.from_session(forked_session(), reward=1.0, metrics={"turns": 2.0})
    assert trajectory.history is not None
    assert texts(trajectory.history.messages) == ["u", "A1", "z", "CCCC"]
    assert trajectory.history.sampled == (1, 3)
    assert [texts(history.messages)[-1] for history in trajectory.additional_histories] == ["AA", "BBB"]
    assert (trajectory.session, trajectory.metrics) == ("s", {"turns": 2.0})


def test_the_samples_are_those_of_the_session() -> None:
    session = forked_session()
    policy = ExportPolicy(drop=frozenset({Cause.EDIT}))
    trajectory = Trajectory.from_session(session, reward=1.0, policy=policy)
    expected = export_samples(session.tree, policy, session="s", reward=1.0)
    assert trajectory.report == expected.report
    for one, other in zip(trajectory.samples, expected.samples, strict=True):
        assert_equal_samples(one, other)


def test_a_copy_cannot_have_another_reward_than_its_samples() -> None:
    trajectory = Trajectory.from_session(forked_session(), reward=1.0)
    with pytest.raises(InputError, match=r"reward: got 0.25, expected that of the samples, 1.0; with_reward"):
        replace(trajectory, reward=0.25)
    scored = trajectory.with_reward(0.25)
    assert {sample.reward for sample in scored.samples} == {scored.reward} == {0.25}
    assert replace(scored, finished=False).samples == scored.samples


def test_a_copy_cannot_have_other_rewards_of_agents_than_its_samples() -> None:
    session = Session("s", CODEC)
    for agent in ("", "critic"):
        turn = session.prepare(Request((Message("user", f"u{agent}"),), agent=agent))
        session.record_delivery(
            session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "A")))).call
        )
    policy = ExportPolicy(include_missing_logprobs=True)
    rewards: list[Mapping[str, Any]] = [{"score": 0.5, "agent": "critic"}, {"score": 1.0}]
    trajectory = Trajectory.from_session(session, rewards=rewards, policy=policy)
    assert {sample.agent: sample.reward for sample in trajectory.samples} == {"": 1.0, "critic": 0.5}
    for changed in ({"critic": 0.9}, {}, {"critic": 0.5, "": 0.25}):
        with pytest.raises(
            InputError, match=r"agent_rewards\['.*'\]: got .*, expected that of the samples, "
        ):
            replace(trajectory, agent_rewards=changed)
    assert replace(trajectory.with_reward(0.25), finished=False).reward_of_agent("critic") == 0.5
    # Also where the timeline has a reward of its own, and where all rewards are equal.
    leaf = session.tree.calls[1].outputs[0]
    others: list[Mapping[str, Any]] = [{"score": 0.1, "timeline": leaf}, {"score": 0.5}]
    for other in others:
        trajectory = Trajectory.from_session(session, rewards=[*rewards, other], policy=policy)
        with pytest.raises(InputError, match=r"agent_rewards\['critic'\]: got None, expected"):
            replace(trajectory, agent_rewards={})


def test_an_empty_session_is_an_empty_trajectory() -> None:
    trajectory = Trajectory.from_session(Session("s", CODEC), reward=0.0)
    assert trajectory.history is None
    assert (trajectory.samples, trajectory.additional_histories) == ((), ())
    assert (trajectory.finished, trajectory.episode_reward) == (True, 0.0)


def test_a_trajectory_does_not_change_with_its_session() -> None:
    session = Session("s", CODEC)
    reply = commit_reply(session, [Message("user", "u")], "A1")
    trajectory = Trajectory.from_session(session)
    commit_reply(session, [Message("user", "u"), reply, Message("user", "x")], "A2")
    assert len(trajectory.samples) == 1
    assert CODEC.decode(trajectory.samples[0].response_ids) == "A1"


def test_a_group_is_a_sequence_of_its_trajectories() -> None:
    trajectories = [Trajectory((), reward=1.0), Trajectory((), reward=0.0)]
    assert list(TrajectoryGroup(trajectories)) == trajectories
    assert len(TrajectoryGroup(trajectories)) == 2


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 7), st.booleans())
def test_every_timeline_is_a_history_and_every_parent_precedes_its_answer(
    seed: int, steps: int, strip: bool
) -> None:
    codec = ToyCodec.chatml(strip_thinking=strip)
    runner = PlanRunner(Session("s", codec), codec)
    plan = PlanGenerator(Random(seed), reasoning=strip).generate(steps)
    runner.run(plan, causal_order(plan, Random(seed)))
    tree = runner.session.tree
    trajectory = Trajectory.from_session(runner.session, reward=0.0)
    histories = [trajectory.history, *trajectory.additional_histories]
    found = sorted([message.key for message in one.messages] for one in histories if one is not None)
    assert found == sorted([message.key for message in line.messages] for line in timelines_of(tree))
    answers = {node.id for node in tree.nodes if node.is_sampled}
    assert set(trajectory.parent_answers) == answers
    assert all(parent in answers | {-1} for parent in trajectory.parent_answers.values())
    assert all(parent < node for node, parent in trajectory.parent_answers.items())


def to_record(measurement: LogprobMeasurement) -> dict[str, object]:
    """Returns the `sampling` of a call that is measured so."""
    return {**asdict(measurement), "logprobs": measurement.kind}


def test_every_answer_says_how_its_logprobs_were_measured() -> None:
    session = Session("s", CODEC)
    question = Message("user", "u")
    raw = LogprobMeasurement("raw", 1.0, False, temperature=0.5, top_p=1.0, top_k=0, min_p=0.0)
    processed = LogprobMeasurement("processed", 0.7, True, temperature=0.7, top_p=0.9)
    messages = [question]
    for text, sampling in (("A1", to_record(raw)), ("A22", to_record(processed)), ("A333", {})):
        turn = session.prepare(Request(tuple(messages), sampling=sampling))
        answer = Message("assistant", text)
        ids = CODEC.encode_reply(answer)
        session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), message=answer))
        messages += [answer, Message("user", "x")]
    (sample,) = Trajectory.from_session(session).samples
    assert [
        (CODEC.decode(sample.response_ids[answer.start : answer.end]), answer.logprobs)
        for answer in sample.answers
    ] == [("A1", raw), ("A22", processed), ("A333", LogprobMeasurement())]
    assert [answer.call for answer in sample.answers] == list(sample.calls)
    (timeline,) = timelines_of(session.tree)
    start = len(sample.prompt_ids)
    assert [(answer.start - start, answer.end - start) for answer in timeline.answers] == [
        (answer.start, answer.end) for answer in sample.answers
    ]
