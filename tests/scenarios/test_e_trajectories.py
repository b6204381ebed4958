"""SCENARIOS part E: trajectories, weights and rewards (1, 2, 4 and 6; the others belong to the rollout)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from branchline import (
    CreditPolicy,
    Message,
    Session,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
    training_rows,
)
from branchline.export.credit import advantages, group_statistics, token_rewards
from tests.export.packed_rows import make_trajectory
from tests.export.test_samples import CODEC, commit_reply, forked_session


def test_e1_the_tokens_of_a_trajectory_weigh_one_together() -> None:
    group = TrajectoryGroup(
        [
            make_trajectory([[1, 2, 3], [4]], reward=1.0),
            make_trajectory([[5]], reward=0.0),
        ]
    )
    raw = training_rows([group], normaliser="trajectory", scale_weights=False)
    assert [row.weights.tolist() for row in raw] == [[0.25, 0.25, 0.25], [0.25], [1.0]]
    scaled = training_rows([group], normaliser="trajectory")
    assert [row.weights.tolist() for row in scaled] == [[0.625, 0.625, 0.625], [0.625], [2.5]]


def test_e2_group_statistics_are_by_episode() -> None:
    group = TrajectoryGroup(
        [
            make_trajectory([[1, 2], [3]], reward=1.0),
            make_trajectory([[4, 5]], reward=0.0),
        ]
    )
    assert group_statistics(group).mean == 0.5
    assert advantages(group, group_std="none") == [0.5, -0.5]
    rows = training_rows([group], normaliser="episode", scale_weights=False)
    assert [float(row.weights.sum()) for row in rows] == [0.5, 0.5, 1.0]


def two_turns_then_branches() -> Session:
    """Returns a session with the answers A1, then AA, BBB and CCCC on three branches."""
    return forked_session()


def answer_advantages(trajectory: Trajectory, credit: CreditPolicy) -> dict[str, list[float]]:
    """Returns the advantages of each answer in each sample that trains it. The group's mean is 0."""
    other = make_trajectory([[1]], reward=-(trajectory.episode_reward or 0.0))
    rows = training_rows([TrajectoryGroup([trajectory, other])], credit=credit, group_std="none")
    found: dict[str, list[float]] = {}
    for row in rows[: len(trajectory.samples)]:
        for answer in row.sample.answers:
            values = row.advantages[answer.start : answer.end]
            assert (values == values[0]).all()
            text = ToyCodec().decode(row.sample.response_ids[answer.start : answer.end])
            found.setdefault(text, []).append(float(values[0]))
    return found


def test_e4_broadcast_gives_every_token_the_last_reward_of_the_session() -> None:
    rewards: list[dict[str, Any]] = [{"score": 9.0}, {"score": 2.0}, {"score": 5.0, "turn": 1}]
    trajectory = Trajectory.from_session(two_turns_then_branches(), rewards=rewards)
    assert trajectory.reward == 2.0
    found = answer_advantages(trajectory, CreditPolicy("broadcast"))
    assert found == {"A1": [2.0] * 3, "AA": [2.0], "BBB": [2.0], "CCCC": [2.0]}


def test_e4_per_branch_gives_a_shared_prefix_the_mean_of_its_leaves() -> None:
    session = two_turns_then_branches()
    leaves = session.tree.leaves()
    rewards = [{"score": 6.0, "timeline": leaves[0].id}, {"score": 3.0, "timeline": leaves[1].id}]
    trajectory = Trajectory.from_session(session, rewards=[{"score": 0.0}, *rewards])
    found = answer_advantages(trajectory, CreditPolicy("per_branch"))
    assert found == {"A1": [6.0, 3.0, 0.0], "AA": [6.0], "BBB": [3.0], "CCCC": [0.0]}
    other = make_trajectory([[1]], reward=0.0)
    rows = training_rows(
        [TrajectoryGroup([trajectory, other])],
        normaliser="token",
        credit=CreditPolicy("per_branch"),
        group_std="none",
    )
    assert sum(float((row.weights * row.advantages)[0]) for row in rows[:3]) == pytest.approx(3.0)


def test_e4_discounted_follows_the_parent_path() -> None:
    session = two_turns_then_branches()
    leaves = session.tree.leaves()
    rewards: list[dict[str, Any]] = [
        {"score": 0.0},
        {"score": 6.0, "timeline": leaves[0].id},
        {"score": 3.0, "timeline": leaves[1].id},
    ]
    trajectory = Trajectory.from_session(session, rewards=rewards)
    found = answer_advantages(trajectory, CreditPolicy("discounted", 0.5))
    assert found == {"A1": [1.5] * 3, "AA": [6.0], "BBB": [3.0], "CCCC": [0.0]}


def test_e4_discounted_adds_the_rewards_of_turns_and_of_tools_in_turns() -> None:
    session = Session("s", CODEC)
    question = Message("user", "u")
    reply = commit_reply(session, [question], "A1")
    commit_reply(session, [question, reply, Message("user", "x")], "A22", tool="search")
    rewards: list[dict[str, Any]] = [
        {"score": 4.0},
        {"score": 1.0, "turn": 1},
        {"score": 2.0, "tool": "search", "turn": 2},
        {"score": 8.0, "tool": "search"},
    ]
    trajectory = Trajectory.from_session(session, rewards=rewards)
    # A22: 4 + 2; A1: 0.5 × (4 + 2) + 1. The reward of a tool in the whole session is for no answer.
    found = answer_advantages(trajectory, CreditPolicy("discounted", 0.5))
    assert found == {"A1": [4.0], "A22": [6.0]}
    assert 8.0 in [span.score for span in trajectory.samples[0].rewards]


def test_e6_an_unfinished_trajectory_is_masked_and_keeps_its_reward() -> None:
    cut = make_trajectory([[1, 2, 3]], reward=0.5, finished=False)
    group = TrajectoryGroup([cut, make_trajectory([[4]], reward=0.0)])
    rows = training_rows([group], mask_unfinished=True, group_std="none")
    assert rows[0].sample.response_mask.tolist() == [0, 0, 0]
    assert rows[0].weights.tolist() == [0, 0, 0]
    assert rows[0].sample.reward == 0.5
    assert rows[1].advantages.tolist() == [-0.25]
    assert token_rewards([rows[0].sample])[0].tolist() == [0, 0, 0.5]
    by_timeline = make_trajectory([[1, 2], [3]], rewards=[1.0, 0.0], finished=False)
    rows = training_rows([TrajectoryGroup([by_timeline, by_timeline])], mask_unfinished=True)
    assert not any(row.weights.any() or row.advantages.any() for row in rows)
    kept = training_rows([group], mask_unfinished=False)
    assert kept[0].sample.response_mask.tolist() == [1, 1, 1]


def test_e6_an_answer_that_was_cut_off_makes_a_trajectory_unfinished() -> None:
    from branchline import Generation, Request

    session = Session("s", CODEC)
    turn = session.prepare(Request((Message("user", "u"),)))
    ids = CODEC.encode_reply(Message("assistant", "half"))
    session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32), finish_reason="length"))
    assert not Trajectory.from_session(session, reward=0.5).finished
    assert Trajectory.from_session(session, reward=0.5, finished=True).finished
