"""Rewards reach the tokens they are for: held against an assignment written from the definition, on random
trees of several agents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import (
    CreditPolicy,
    ExportPolicy,
    Generation,
    Message,
    Request,
    Session,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
    export_samples,
)
from branchline.core.errors import ExportError
from branchline.core.reward import read_rewards
from branchline.core.sample import Sample
from branchline.export.credit import CreditName, group_statistics, token_advantages
from branchline.export.jsonl import read_jsonl, write_jsonl
from branchline.export.parquet import read_parquet, write_parquet
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from branchline.timelines.links import MergePolicy
from branchline.timelines.merge import merge
from branchline.tree.tree import Node, Tree

AGENTS = ("", "solver", "critic", "judge")
SHARES = st.sampled_from(["split", "first", "all"])


def random_tree(rng: Random, steps: int) -> Tree:
    """Returns the tree of a random agent with sub-agents; some calls are made by other agents."""
    codec = ToyCodec.chatml(strip_thinking=rng.random() < 0.3)
    runner = PlanRunner(Session("s", codec), codec)
    plan = PlanGenerator(rng).generate(steps)
    runner.run([replace(call, agent=rng.choice(AGENTS)) if rng.random() < 0.4 else call for call in plan])
    return runner.session.tree


def random_rewards(rng: Random, tree: Tree) -> list[dict[str, Any]]:
    """Returns rewards for the session, its agents, its timelines and its calls, in any order."""
    rewards: list[dict[str, Any]] = []
    agents = sorted({call.agent for call in tree.calls if call.agent})
    for _ in range(rng.randrange(8)):
        part: dict[str, Any] = rng.choice(
            [
                {},
                {"agent": rng.choice(agents)} if agents else {},
                {"timeline": rng.choice(tree.nodes[1:]).id},
                {"call": rng.choice(tree.calls).id},
            ]
        )
        extras = {rng.choice("ab"): rng.randrange(9)} if rng.random() < 0.5 else {}
        rewards.append({"score": rng.randrange(-4, 5) / 4, **part, **extras})
    return rewards


# -- the definition ----------------------------------------------------------------------------------


def is_for(reward: Mapping[str, Any], *parts: str) -> bool:
    return set(reward) & {"call", "turn", "timeline", "tool", "agent"} == set(parts)


def rewards_that_count(rewards: Sequence[Mapping[str, Any]], agent: str, path: Sequence[Node]) -> list[Any]:
    """Returns the rewards of a sample, the most precise first: the timeline's, the agent's, the session's."""
    found = []
    for node in reversed(path):
        # A timeline ends, or ended before it was continued, with an answer.
        if node.is_sampled:
            found += [one for one in rewards if is_for(one, "timeline") and one["timeline"] == node.id][-1:]
    found = found[:1]
    found += [one for one in rewards if is_for(one, "agent") and one["agent"] == agent][-1:]
    return found + [one for one in rewards if is_for(one)][-1:]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), SHARES)
def test_each_trained_token_has_the_reward_of_its_timeline_its_agent_or_the_session(
    seed: int, steps: int, shares: str
) -> None:
    rng = Random(seed)
    tree = random_tree(rng, steps)
    rewards = [dict(reward) for reward in read_rewards(random_rewards(rng, tree) or [{"score": 1}])]
    trajectory = Trajectory.from_tree(tree, rewards=rewards, policy=ExportPolicy(shares=shares))  # type: ignore[arg-type]
    for sample in trajectory.samples:
        nodes = [tree.nodes[answer.node] for answer in sample.answers]
        path = nodes[-1].path()
        # All trained tokens of a sample are of one agent, so that one reward is right for all of them.
        assert {node.agent for node in path if node.is_sampled} == {sample.agent}
        counted = rewards_that_count(rewards, sample.agent, path)
        assert sample.reward == (counted[0]["score"] if counted else None)
        extras: dict[str, Any] = {}
        for reward in reversed(counted):
            extras |= reward.get("extras", {})
        assert (json.loads(sample.reward_extras) if sample.reward_extras else {}) == extras
        for answer in sample.answers:
            of_call = [one["score"] for one in rewards if is_for(one, "call") and one["call"] == answer.call]
            spans = [span.score for span in sample.rewards if span.call and span.start == answer.start]
            assert spans == of_call[-1:]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["token", "message"]))
def test_no_path_has_sampled_tokens_of_two_agents(seed: int, steps: int, compare: str) -> None:
    rng = Random(seed)
    codec = ToyCodec.chatml()
    runner = PlanRunner(Session("s", codec), codec)
    runner.run(PlanGenerator(rng).generate(steps))
    log = [replace(call, request=replace(call.request, agent=rng.choice(AGENTS))) for call in runner.to_log()]
    merged = merge(log, MergePolicy(compare="token", ignore_tools=False)).tree if compare == "token" else None
    for tree in (random_tree(rng, steps), merged):
        for leaf in tree.leaves() if tree is not None else ():
            assert len({node.agent for node in leaf.path() if node.is_sampled}) <= 1


# -- credit ------------------------------------------------------------------------------------------


def reward_of_token(
    rewards: Sequence[Mapping[str, Any]], agent: str, path: Sequence[Node], *, with_timeline: bool
) -> float | None:
    counted = rewards_that_count(rewards, agent, path)
    if not with_timeline:
        counted = [one for one in counted if "timeline" not in one]
    return counted[0]["score"] if counted else None


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from(["sample", "population", "none"]),
    st.sampled_from(["broadcast", "per_branch"]),
)
def test_advantages_compare_an_agent_with_itself(
    seed: int, episodes: int, group_std: str, credit: CreditName
) -> None:
    rng = Random(seed)
    trees, posted = [], []
    for _ in range(episodes):
        trees.append(random_tree(rng, 3))
        # Every episode has the session's reward, so that all tokens are rewarded.
        posted.append([{"score": rng.randrange(5) / 4}, *random_rewards(rng, trees[-1])])
    group = TrajectoryGroup(
        [
            Trajectory.from_tree(tree, rewards=list(read_rewards(rewards)))
            for tree, rewards in zip(trees, posted, strict=True)
        ]
    )
    statistics = group_statistics(group, group_std=group_std)  # type: ignore[arg-type]
    for trajectory, tree, rewards in zip(group, trees, posted, strict=True):
        rows = token_advantages(trajectory, statistics, CreditPolicy(credit))
        for row, sample in zip(rows, trajectory.samples, strict=True):
            path = tree.nodes[sample.answers[-1].node].path()
            reward = reward_of_token(rewards, sample.agent, path, with_timeline=credit == "per_branch")
            baseline = []
            is_rewarded = any(
                is_for(one, "agent") and one["agent"] == sample.agent for r in posted for one in r
            )
            for other, other_rewards in zip(group, posted, strict=True):
                is_own = any(is_for(one, "agent") and one["agent"] == sample.agent for one in other_rewards)
                acts = any(one.agent == sample.agent for one in other.samples)
                if is_own or acts or not is_rewarded:
                    baseline.append(reward_of_token(other_rewards, sample.agent, [], with_timeline=False))
            values = np.array(baseline, np.float64)
            expected = 0.0
            if len(values) > 1 and reward is not None:
                expected = reward - values.mean()
                spread = values.std(ddof=0 if group_std == "population" else 1)
                if group_std != "none" and spread > 1e-8:
                    expected /= spread + 1e-4
            np.testing.assert_allclose(row[sample.response_mask == 1], expected, rtol=1e-5, atol=1e-6)
            assert (row[sample.response_mask == 0] == 0).all()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_discounted_credit_pays_an_answer_with_the_reward_of_its_own_agent(
    seed: int, steps: int, discount: float
) -> None:
    rng = Random(seed)
    tree = random_tree(rng, steps)
    rewards = [{"score": 0.5}, *(one for one in random_rewards(rng, tree) if "call" not in one)]
    trajectory = Trajectory.from_tree(tree, rewards=list(read_rewards(rewards)))
    statistics = group_statistics(TrajectoryGroup([trajectory, trajectory]), group_std="none")
    rows = token_advantages(trajectory, statistics, CreditPolicy("discounted", discount))
    samples_at: dict[int, list[Sample]] = {}
    found: dict[int, set[float]] = {}
    for row, sample in zip(rows, trajectory.samples, strict=True):
        for answer in sample.answers:
            samples_at.setdefault(answer.node, []).append(sample)
            found.setdefault(answer.node, set()).update(row[answer.start : answer.end].tolist())
    # From each last answer up to every trained answer that it follows from.
    above = {node: parent_of(node, trajectory.parent_answers, set(samples_at)) for node in samples_at}
    returns: dict[int, list[float]] = {}
    for last in set(samples_at) - set(above.values()):
        node, factor = last, 1.0
        while node != -1:
            agent = tree.nodes[node].agent or ""
            values = [
                reward_of_token(
                    rewards, agent, tree.nodes[sample.answers[-1].node].path(), with_timeline=True
                )
                for sample in samples_at[last]
            ]
            baseline = reward_of_token(rewards, agent, [], with_timeline=False)
            assert baseline is not None
            value = sum(one for one in values if one is not None) / len(values)
            returns.setdefault(node, []).append(factor * (value - baseline))
            node, factor = above[node], factor * discount
    assert {node: len(values) for node, values in found.items()} == dict.fromkeys(found, 1)
    assert {node: values.pop() for node, values in found.items()} == pytest.approx(
        {node: np.mean(values) for node, values in returns.items()}, abs=1e-6
    )


def parent_of(node: int, parents: Mapping[int, int], trained: set[int]) -> int:
    node = parents.get(node, -1)
    while node != -1 and node not in trained:
        node = parents.get(node, -1)
    return node


def test_tokens_that_nobody_rewarded_train_nothing_and_count_in_no_baseline() -> None:
    def episode(**rewards: float) -> Trajectory:
        tree = two_agents()
        posted = [
            {"score": score, **({"agent": name} if name != "all" else {})} for name, score in rewards.items()
        ]
        return Trajectory.from_tree(tree, rewards=posted)

    group = TrajectoryGroup(
        [episode(solver=1.0), episode(solver=0.0, critic=4.0), episode(all=2.0), episode(all=3.0, solver=2.0)]
    )
    statistics = group_statistics(group, group_std="none")
    assert statistics.of_agent("solver").mean == (1 + 0 + 2 + 2) / 4
    assert (statistics.of_agent("critic").mean, statistics.of_agent("critic").episodes) == (
        (4 + 2 + 3) / 3,
        3,
    )
    found = []
    for trajectory in group:
        rows = token_advantages(trajectory, statistics, CreditPolicy())
        found.append(
            {sample.agent: float(row[0]) for row, sample in zip(rows, trajectory.samples, strict=True)}
        )
    assert found == [
        {"solver": -0.25, "critic": 0.0},
        {"solver": -1.25, "critic": 1.0},
        {"solver": 0.75, "critic": -1.0},
        {"solver": 0.75, "critic": 0.0},
    ]


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_reward_of_an_agent_that_is_not_finite_is_refused(score: float) -> None:
    trajectory = Trajectory(two_samples(), reward=0.5, agent_rewards={"critic": score})
    with pytest.raises(ExportError, match="reward of agent 'critic': got"):
        group_statistics(TrajectoryGroup([trajectory]))


def two_samples() -> tuple[Sample, ...]:
    return tuple(export_samples(two_agents(), reward=0.5).samples)


def two_agents() -> Tree:
    session = Session("s", ToyCodec())
    for agent in ("solver", "critic"):
        turn = session.prepare(Request((Message("user", agent),), agent=agent))
        ids = session.codec.encode_reply(Message("assistant", "ok"))
        call = session.commit(turn, Generation(ids, np.full(len(ids), -1, np.float32))).call
        session.record_delivery(call)
    return session.tree


def test_a_trajectory_built_by_hand_may_have_rewards_of_agents() -> None:
    trajectory = Trajectory(two_samples(), reward=0.5, agent_rewards={"critic": 2.0})
    rows = token_advantages(trajectory, group_statistics(TrajectoryGroup([trajectory] * 2)), CreditPolicy())
    assert [row.tolist() for row in rows] == [[0.0] * len(row) for row in rows]
    scored = trajectory.with_reward(1.0, {"by": "me"})
    assert [(sample.reward, sample.reward_extras) for sample in scored.samples] == [
        (1.0, '{"by":"me"}'),
        (2.0, '{"by":"me"}'),
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_reward_that_is_added_to_a_trajectory_equals_one_that_was_posted(seed: int, steps: int) -> None:
    rng = Random(seed)
    tree = random_tree(rng, steps)
    rewards = read_rewards([{"score": 1.0, "old": 1}, *random_rewards(rng, tree)])
    posted = Trajectory.from_tree(tree, rewards=[*rewards, {"score": 0.25, "extras": {"a": 9}}])
    added = Trajectory.from_tree(tree, rewards=rewards).with_reward(0.25, {"a": 9})
    for one, other in zip(posted.samples, added.samples, strict=True):
        assert (one.reward, one.reward_extras) == (other.reward, other.reward_extras)


def test_rewards_with_agents_and_extras_survive_files(tmp_path: Path) -> None:
    rewards = read_rewards(
        [
            {"score": 1, "a": 1},
            {"score": 2, "agent": "critic", "b": "½"},
            {"score": 3, "call": "call-0", "c": []},
        ]
    )
    samples = export_samples(two_agents(), reward=1.0, rewards=rewards).samples
    assert [sample.reward_extras for sample in samples] == ['{"a":1}', '{"a":1,"b":"½"}']
    assert [[(span.agent, span.extras) for span in sample.rewards] for sample in samples] == [
        [("", '{"c":[]}')],
        [("critic", '{"b":"½"}')],
    ]
    for write, read, name in (
        (write_jsonl, read_jsonl, "s.jsonl"),
        (write_parquet, read_parquet, "s.parquet"),
    ):
        write(samples, tmp_path / name)
        for one, other in zip(samples, read(tmp_path / name), strict=True):
            assert (one.reward, one.rewards, one.reward_extras) == (
                other.reward,
                other.rewards,
                other.reward_extras,
            )


def test_rewards_of_calls_are_in_the_scale_of_their_agent() -> None:
    group = TrajectoryGroup(
        [
            Trajectory.from_tree(
                two_agents(),
                rewards=[
                    {"score": score, "agent": "solver"},
                    {"score": 4 * score},
                    {"score": 0.5, "call": "call-0"},
                    {"score": 0.5, "call": "call-1"},
                ],
            )
            for score in (0.0, 1.0)
        ]
    )
    statistics = group_statistics(group, group_std="population")
    for trajectory, sign in zip(group, (-1, 1), strict=True):
        solver, critic = token_advantages(trajectory, statistics, CreditPolicy("discounted"))
        assert float(solver[0]) == pytest.approx(sign + 0.5 / 0.5, abs=1e-3)
        assert float(critic[0]) == pytest.approx(sign + 0.5 / 2, abs=1e-3)


def test_the_reward_of_an_agent_whose_answers_no_sample_trains_is_counted() -> None:
    tree = two_agents()
    rewards = [{"score": 1, "agent": "solver"}, {"score": 1, "agent": "critic"}]
    assert export_samples(tree, rewards=rewards).report.unassigned_rewards == 0
    export = export_samples(tree, ExportPolicy(max_samples=1), rewards=rewards)
    assert [sample.agent for sample in export.samples] in (["solver"], ["critic"])
    assert export.report.unassigned_rewards == 1
