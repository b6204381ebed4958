"""A trajectory: the outcome of one episode, as histories (messages) and as samples (tokens).

The main history is the conversation of the main agent as it ended (`timelines/main_history.py`); every other
timeline is an additional history.
Every trained token of the trajectory is in `samples`, whose shares count it once.

    trajectory = Trajectory.from_session(session, reward=1.0)
    group = TrajectoryGroup([trajectory, ...])          # the trajectories of one prompt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.sample import ExportReport, Sample
from branchline.export.histories import History, build_tree
from branchline.export.rewards import session_reward
from branchline.export.samples import ExportPolicy, export_samples
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.timeline import timelines_of
from branchline.tree.session import Session
from branchline.tree.tree import NO_NODE, Node, Tree


@dataclass(frozen=True)
class Trajectory:
    """The outcome of one episode."""

    samples: tuple[Sample, ...]
    history: History | None = None
    """The main history; None if the episode has no answers."""
    additional_histories: tuple[History, ...] = ()
    reward: float | None = None
    """The reward of the episode; None if only its timelines have rewards, which are on the samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    session: str = ""
    finished: bool = True
    """False if a limit cut the episode off before the agent was done."""
    failed: bool = False
    """True if the episode broke; it is left out of group statistics and trains nothing."""
    report: ExportReport | None = None
    """Accounts for every sampled token."""
    parent_answers: Mapping[int, int] = field(default_factory=dict)
    """The answer that each answer continues, by node id. A repeated answer, a spawned sub-agent and a
    compacted conversation continue the answer that they come from."""
    fork_causes: Mapping[str, int] = field(default_factory=dict)
    """The number of forks by cause."""

    @classmethod
    def from_session(
        cls,
        session: Session,
        *,
        reward: float | None = None,
        rewards: Sequence[Mapping[str, Any]] = (),
        metrics: Mapping[str, float] | None = None,
        policy: ExportPolicy | None = None,
        finished: bool | None = None,
        failed: bool = False,
    ) -> Trajectory:
        """Returns the trajectory of a session as it is now. `rewards` are those posted for it or for parts of
        it; `reward` overrides the one for the whole session. If `finished` is None, a main history whose last
        answer was cut off (`length`, `cancelled`) or did not reach its client is unfinished."""
        return cls.from_tree(
            session.snapshot(),
            session=session.id,
            reward=reward,
            rewards=rewards,
            metrics=metrics,
            policy=policy,
            finished=finished,
            failed=failed,
        )

    @classmethod
    def from_tree(
        cls,
        tree: Tree,
        *,
        session: str = "",
        reward: float | None = None,
        rewards: Sequence[Mapping[str, Any]] = (),
        metrics: Mapping[str, float] | None = None,
        policy: ExportPolicy | None = None,
        finished: bool | None = None,
        failed: bool = False,
    ) -> Trajectory:
        """As `from_session`, for a tree that nothing changes meanwhile."""
        fork_report = classify_forks(tree)
        reward = session_reward(rewards) if reward is None else reward
        export = export_samples(
            tree, policy, session=session, reward=reward, rewards=rewards, fork_report=fork_report
        )
        main: History | None = None
        others: list[History] = []
        for timeline in timelines_of(tree):
            nodes = timeline.nodes
            sampled = tuple(index for index, node in enumerate(nodes) if node.is_sampled)
            history = History(tuple(timeline.messages), sampled, agent=timeline.agent)
            if timeline.leaf is fork_report.main_leaf:
                main = history
            else:
                others.append(history)
        if finished is None:
            leaf = fork_report.main_leaf
            is_cut_off = leaf is not None and (
                leaf.id in fork_report.undelivered
                or (leaf.output is not None and leaf.output.finish_reason in ("length", "cancelled"))
            )
            finished = not is_cut_off
        return cls(
            samples=tuple(export.samples),
            history=main,
            additional_histories=tuple(others),
            reward=reward,
            metrics={} if metrics is None else metrics,
            session=session,
            finished=finished,
            failed=failed,
            report=export.report,
            parent_answers=_parent_answers(tree, fork_report),
            fork_causes=Counter(fork.cause.value for fork in fork_report.forks),
        )

    @classmethod
    def from_messages(
        cls,
        messages_and_choices: Sequence[object],
        *,
        codec: Codec | None = None,
        tools: object = None,
        additional_histories: Sequence[History] = (),
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        session: str = "",
        policy: ExportPolicy | None = None,
        history_policy: HistoryPolicy = "template",
        train_messages: bool = False,
        finished: bool | None = None,
        failed: bool = False,
    ) -> Trajectory:
        """Returns a trajectory that was built by hand from messages and choices (`export/histories.py`).

        Choices with the ids of their prompts and of their tokens give the samples of the session that they
        come from. Otherwise `codec` renders what is missing; such answers are inexact, and the policy decides
        whether they are trained (`include_inexact`, `include_missing_logprobs`).
        """
        main = History.read(messages_and_choices, tools, train_messages=train_messages)
        histories = [main, *additional_histories]
        if finished is None and main.calls:
            finished = main.calls[-1].outputs[0].finish_reason != "length"
        trajectory = cls.from_tree(
            build_tree(histories, codec, history=history_policy),
            session=session,
            reward=reward,
            metrics=metrics,
            policy=policy,
            finished=finished,
            failed=failed,
        )
        return replace(trajectory, history=main, additional_histories=tuple(additional_histories))

    @property
    def answer(self) -> str:
        """The text of the last message of the main history if the model sampled it, else an empty text."""
        if self.history is None or len(self.history.messages) - 1 not in self.history.sampled:
            return ""
        return self.history.messages[-1].content

    def with_reward(self, reward: float) -> Trajectory:
        """Returns the trajectory with a reward for the whole episode. Samples whose timelines have a reward
        of their own keep it."""
        samples = [
            sample if any(not span.call and not span.tool for span in sample.rewards) else
            replace(sample, reward=reward)
            for sample in self.samples
        ]  # fmt: skip
        return replace(self, reward=reward, samples=tuple(samples))

    @property
    def episode_reward(self) -> float | None:
        """The reward of the episode, else the mean of its samples' rewards, weighted by their shares. Samples
        without a reward are left out; None if all are."""
        if self.reward is not None:
            return self.reward
        total = weight = 0.0
        for sample in self.samples:
            if sample.reward is not None:
                shares = float(sample.shares.sum(dtype=np.float64))
                total, weight = total + sample.reward * shares, weight + shares
        return total / weight if weight else None


@dataclass(frozen=True)
class TrajectoryGroup:
    """The trajectories of one prompt, which are compared with each other."""

    trajectories: Sequence[Trajectory]
    id: str = ""

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def _parent_answers(tree: Tree, fork_report: ForkReport) -> dict[int, int]:
    """Returns the answer that each answer continues; the first answers of a tree continue none."""
    edge_sources = {edge.target.id: edge.source.id for edge in fork_report.edges}
    parents: dict[int, int] = {}
    is_ordered = True
    for node in tree.nodes:
        if node.is_sampled:
            parent = above = _parent_answer(node, edge_sources)
            is_ordered = is_ordered and parent < node.id
            # In a tree without chronological order edges may form a cycle; its last edge is left out.
            while not is_ordered and above not in (node.id, NO_NODE):
                above = parents.get(above, NO_NODE)
            parents[node.id] = NO_NODE if above == node.id else parent
    return parents


def _parent_answer(node: Node, edge_sources: Mapping[int, int]) -> int:
    above: Node | None = node
    while above is not None and above.parent is not None:
        if above is not node and above.is_sampled:
            return above.id
        if above is not node and above.source_id != NO_NODE:
            return above.source_id
        if above.id in edge_sources:
            return edge_sources[above.id]
        above = above.parent
    return NO_NODE
