"""From rewards to advantages and loss weights: group statistics, credit, normalisers.

Group statistics are by episode: an episode with many samples counts once. A failed episode is left out, and a
group with one episode gets advantage 0. The advantage of a token follows from the credit policy, its weight
is its share times a normaliser.

If an agent has a reward of its own in some episode of a group, its tokens are compared with its rewards in
the group's other episodes. In an episode without one its tokens have the episode's reward, and that counts;
an episode in which it has no trained tokens is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from branchline.core.choices import GroupStd as GroupStd
from branchline.core.choices import Normaliser as Normaliser
from branchline.core.errors import ExportError
from branchline.core.sample import Sample
from branchline.core.token_arrays import Floats
from branchline.export.trajectory import Trajectory, TrajectoryGroup

CreditName = Literal["broadcast", "discounted", "per_branch"]
NO_ANSWER = -1
_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value."""
_EQUAL_STD = 1e-12
"""Rewards with at most this standard deviation, times their mean if that is above 1, are equal but for
rounding."""


@dataclass(frozen=True)
class CreditPolicy:
    """Which reward each trained token gets.

    `broadcast`: all tokens of an episode get its reward. `per_branch`: the tokens of a sample get the reward
    of its timeline. `discounted`: an answer gets the rewards of the timelines after it, discounted for each
    answer in between along the parent path, and those posted for itself and for answers after it; with
    several timelines after it, their mean.

    The tokens of an agent with a reward of its own get that in place of the episode's. Tokens for which
    nothing is given, because only other agents have rewards, have advantage 0.
    """

    name: CreditName = "broadcast"
    discount: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(CreditName):
            raise ExportError(f"credit: got {self.name!r}, expected one of {', '.join(get_args(CreditName))}")
        if not 0 <= self.discount <= 1:
            raise ExportError(f"discount: got {self.discount:g}, expected a number from 0 to 1")


@dataclass(frozen=True)
class GroupStatistics:
    """Mean and standard deviation of the rewards of a group's episodes, and the factor that follows."""

    mean: float
    std: float
    """The population's for `population`, else the sample's; 0 in a group of one."""
    episodes: int
    """Episodes that did not fail."""
    group_std: GroupStd = "sample"
    agents: Mapping[str, GroupStatistics] = field(default_factory=dict)
    """Those of each agent, if an agent has a reward of its own in some episode."""

    def of_agent(self, agent: str) -> GroupStatistics:
        """Returns the statistics that the rewards of an agent's tokens are compared with."""
        return self.agents.get(agent, self)

    def advantage(self, reward: float) -> float:
        """Returns (reward − mean) × scale."""
        return self.scale * (reward - self.mean)

    @property
    def has_equal_rewards(self) -> bool:
        return self.std <= _EQUAL_STD * max(1.0, abs(self.mean))

    @property
    def scale(self) -> float:
        """The factor from rewards to advantages: 1 / (standard deviation + 1e-4), or 1 for `none`; 0 in a
        group of one.

        Episodes with equal rewards are not scaled: the rewards of their parts may still differ.
        """
        if self.episodes < 2:
            return 0.0
        return 1.0 if self.group_std == "none" or self.has_equal_rewards else 1 / (self.std + _EPSILON)


def group_statistics(group: TrajectoryGroup, *, group_std: GroupStd = "sample") -> GroupStatistics:
    """Returns the statistics of a group's episodes. Raises ExportError for an episode without a reward."""
    if group_std not in get_args(GroupStd):
        raise ExportError(f"group_std: got {group_std!r}, expected one of {', '.join(get_args(GroupStd))}")
    rewards: list[float] = []
    finished = [trajectory for trajectory in group if not trajectory.failed]
    for index, trajectory in enumerate(group):
        if trajectory.failed:
            continue
        reward = trajectory.episode_reward
        if reward is None or not math.isfinite(reward):
            name = f"trajectories[{index}]" + (f" ({trajectory.session})" if trajectory.session else "")
            raise ExportError(f"{name}: reward: got {reward}, expected a finite number, or failed=True")
        rewards.append(reward)
    agents: dict[str, GroupStatistics] = {}
    rewarded = {agent for trajectory in finished for agent in trajectory.agent_rewards}
    if rewarded:
        trained = [_trained_agents(trajectory) for trajectory in finished]
        for agent in sorted(rewarded.union(*trained)):
            values = [
                trajectory.reward_of_agent(agent)
                for trajectory, names in zip(finished, trained, strict=True)
                if agent not in rewarded or agent in names or agent in trajectory.agent_rewards
            ]
            given = [value for value in values if value is not None]
            if not all(map(math.isfinite, given)):
                raise ExportError(f"reward of agent {agent!r}: got {given}, expected finite numbers")
            agents[agent] = _statistics(given, group_std)
    return replace(_statistics(rewards, group_std), agents=agents)


def _trained_agents(trajectory: Trajectory) -> set[str]:
    return {sample.agent for sample in trajectory.samples if sample.trained_tokens}


def _statistics(rewards: Sequence[float], group_std: GroupStd) -> GroupStatistics:
    count = len(rewards)
    mean = math.fsum(rewards) / count if rewards else 0.0
    spread = math.hypot(*(reward - mean for reward in rewards))
    divisor = count if group_std == "population" else count - 1
    return GroupStatistics(mean, spread / math.sqrt(divisor) if divisor > 0 else 0.0, count, group_std)


def advantages(group: TrajectoryGroup, *, group_std: GroupStd = "sample") -> list[float]:
    """Returns the group-relative advantage of each trajectory; 0 for a failed one and in a group of one."""
    statistics = group_statistics(group, group_std=group_std)
    return [
        0.0
        if trajectory.failed or trajectory.episode_reward is None
        else statistics.advantage(trajectory.episode_reward)
        for trajectory in group
    ]


def token_advantages(
    trajectory: Trajectory, statistics: GroupStatistics, credit: CreditPolicy
) -> list[Floats]:
    """Returns the advantage of each response token, for each sample of a trajectory; 0 where nothing is
    trained."""
    rows = [np.zeros(len(sample.response_ids), np.float32) for sample in trajectory.samples]
    if trajectory.failed or not any(sample.trained_tokens for sample in trajectory.samples):
        return rows
    if credit.name == "discounted":
        by_answer = _discounted_returns(trajectory, statistics, credit.discount)
        for row, sample in zip(rows, trajectory.samples, strict=True):
            for answer in sample.answers:
                row[answer.start : answer.end] = by_answer[answer.node]
        return rows
    for row, sample in zip(rows, trajectory.samples, strict=True):
        row[sample.response_mask != 0] = _advantage(
            trajectory, statistics, sample, sample.agent, is_per_branch=credit.name == "per_branch"
        )
    return rows


def _advantage(
    trajectory: Trajectory, statistics: GroupStatistics, sample: Sample, agent: str, *, is_per_branch: bool
) -> float:
    """Returns the advantage that a sample gives to an agent's tokens; with `is_per_branch` that of the
    sample's timeline, if that has a reward."""
    reward = _timeline_reward(trajectory, sample) if is_per_branch else None
    if reward is None:
        reward = trajectory.reward_of_agent(agent)
    return 0.0 if reward is None else statistics.of_agent(agent).advantage(reward)


def _timeline_reward(trajectory: Trajectory, sample: Sample) -> float | None:
    """Returns the reward of a sample's timeline, or None. Without rewards of agents it is the sample's, as in
    samples that were built by hand."""
    if not trajectory.agent_rewards:
        return sample.reward
    return sample.reward if any(span.is_timeline for span in sample.rewards) else None


def _discounted_returns(
    trajectory: Trajectory, statistics: GroupStatistics, discount: float
) -> Mapping[int, float]:
    """Returns the discounted advantage of each answer."""
    ends: dict[int, list[tuple[float, Sample]]] = {}
    own: dict[int, float] = {}
    agent_of: dict[int, str] = {}
    for index, sample in enumerate(trajectory.samples):
        if sum(answer.end - answer.start for answer in sample.answers) != sample.trained_tokens:
            raise ExportError(
                f"samples[{index}]: {sample.trained_tokens} trained tokens, of which not all belong to its "
                "answers, expected the samples of a session for discounted credit"
            )
        for answer in sample.answers:
            ends.setdefault(answer.node, []).append((float(sample.shares[answer.start]), sample))
            agent_of[answer.node] = sample.agent
            own[answer.node] = sum(
                span.score for span in sample.rewards if span.call and span.start == answer.start
            )
    children: dict[int, list[int]] = {}
    for node in ends:
        children.setdefault(_trained_parent(node, trajectory.parent_answers, ends), []).append(node)
    # Parents first; the credit of an answer is computed after that of the answers that continue it.
    order = list(children.get(NO_ANSWER, ()))
    for node in order:
        order += children.get(node, ())

    def returns(agent: str) -> dict[int, float]:
        """The returns of all answers, where the tokens after them have the reward of one agent."""
        scale = statistics.of_agent(agent).scale
        totals: dict[int, tuple[float, int]] = {}
        for node in reversed(order):
            below = [totals[child] for child in children.get(node, ())]
            count = sum(leaves for _, leaves in below)
            total = discount * sum(credit for credit, _ in below)
            if not count:
                weight = sum(share for share, _ in ends[node])
                shared = sum(
                    share * _advantage(trajectory, statistics, sample, agent, is_per_branch=True)
                    for share, sample in ends[node]
                )
                total, count = shared / weight, 1
            totals[node] = total + scale * own[node] * count, count
        return {node: total / count for node, (total, count) in totals.items()}

    # Agents without a reward of their own have the same returns.
    computed: dict[tuple[float, float, float | None], dict[int, float]] = {}
    found: dict[int, float] = {}
    for node, agent in agent_of.items():
        compared = statistics.of_agent(agent)
        key = compared.mean, compared.scale, trajectory.reward_of_agent(agent)
        if key not in computed:
            computed[key] = returns(agent)
        found[node] = computed[key][node]
    return found


def _trained_parent(node: int, parents: Mapping[int, int], trained: Collection[int]) -> int:
    """Returns the closest trained answer that an answer continues, or NO_ANSWER."""
    parent = parents.get(node, NO_ANSWER)
    while parent != NO_ANSWER and parent not in trained:
        parent = parents.get(parent, NO_ANSWER)
    return parent


def token_weights(trajectory: Trajectory, normaliser: Normaliser) -> list[NDArray[np.float64]]:
    """Returns share × normaliser of each response token, for each sample of a trajectory."""
    if normaliser not in get_args(Normaliser):
        raise ExportError(
            f"normaliser: got {normaliser!r}, expected one of {', '.join(get_args(Normaliser))}"
        )
    shares = [sample.shares.astype(np.float64) for sample in trajectory.samples]
    sums = [float(values.sum()) for values in shares]
    if normaliser in ("token", "constant"):
        return shares
    if normaliser == "trajectory":
        total = sum(sums)
        return [values / total if total else values for values in shares]
    count = sum(value > 0 for value in sums)
    return [values / (value * count) if value else values for values, value in zip(shares, sums, strict=True)]


def token_rewards(samples: Sequence[Sample]) -> list[Floats]:
    """Returns the reward of each sample on its last response token, 0 elsewhere, as PPO trainers take it."""
    rows = [np.zeros(len(sample.response_ids), np.float32) for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        if len(row) and sample.reward is not None:
            row[-1] = sample.reward
    return rows
