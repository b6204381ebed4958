"""Rewards reach the tokens they are for: held against an assignment written from the definition, on random
trees of several agents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import CreditPolicy, ExportPolicy, Session, ToyCodec, Trajectory, TrajectoryGroup
from branchline.core.reward import read_rewards
from branchline.export.credit import CreditName, group_statistics, token_advantages
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
