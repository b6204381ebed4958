"""A trajectory: the outcome of one episode, as histories (messages) and as samples (tokens).

The main history is the conversation of the main agent as it ended (`timelines/main_history.py`); every other
timeline is an additional history.
Every trained token of the trajectory is in `samples`, whose shares count it once.

    trajectory = Trajectory.from_session(session, reward=1.0)
    trajectory = Trajectory(messages_and_choices=[message, response], reward=1.0)     # by hand, as with ART
    group = TrajectoryGroup([trajectory, ...])          # the trajectories of one prompt
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.errors import InputError, MessageError
from branchline.core.reward import read_rewards, read_score
from branchline.core.sample import ExportReport, Sample
from branchline.export.hand_built import build_tree
from branchline.export.histories import History
from branchline.export.rewards import agent_rewards, sample_extras, session_reward
from branchline.export.samples import ExportPolicy, SampleStream, export_samples
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.log import LoggedOutput
from branchline.timelines.timeline import timelines_of
from branchline.tree.session import Session
from branchline.tree.tree import NO_NODE, Node, Tree


@dataclass(frozen=True)
class Trajectory:
    """The outcome of one episode.

    Built by hand, it takes the arguments of ART's trajectories: `messages_and_choices` are its main history,
    and its samples and report follow from them. Choices with the ids of their prompts and of their tokens
    give the samples of the session that they come from. `codec` renders what other choices lack; these are
    inexact, and `policy` decides whether they are trained (`include_inexact`, `include_missing_logprobs`).
    """

    samples: tuple[Sample, ...] = ()
    history: History | None = None
    """The main history; None if the episode has no answers."""
    additional_histories: Sequence[History] = ()
    reward: float | None = None
    """The reward of the episode; None if only its timelines or agents have rewards."""
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
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of agents by name. The tokens of such an agent get its reward, not that of the episode."""
    _: KW_ONLY
    messages_and_choices: Sequence[object] | None = field(default=None, repr=False)
    """The main history of a trajectory that was built by hand, as given."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools of the main history, as given."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logs: Sequence[str] = ()
    start_time: datetime | None = None
    initial_policy_version: int | None = None
    """The policy version of all tokens that were built by hand: the oldest that they can be of."""
    final_policy_version: int | None = None
    chat_template_kwargs: InitVar[Mapping[str, Any] | None] = None
    """Those of the main history."""
    codec: InitVar[Codec | None] = None
    policy: InitVar[ExportPolicy | None] = None
    history_policy: InitVar[HistoryPolicy] = "template"
    train_messages: InitVar[bool] = False
    """Assistant messages of the main history that are no choices are trained too."""

    def __post_init__(
        self,
        chat_template_kwargs: Mapping[str, Any] | None,
        codec: Codec | None,
        policy: ExportPolicy | None,
        history_policy: HistoryPolicy,
        train_messages: bool,
    ) -> None:
        given = self.messages_and_choices
        if self.report is not None:  # built already, or from a tree
            if given is not None and (self.history is None or given != self.history.messages_and_choices):
                raise InputError(
                    "messages_and_choices: got others than its samples have, build a new Trajectory"
                )
            self._check_rewards()
            return
        _check_list("additional_histories", self.additional_histories, "histories")
        others = tuple(
            History.of(raw, f"additional_histories[{index}]")
            for index, raw in enumerate(self.additional_histories)
        )
        if given is None and not any(history.choices for history in others):
            object.__setattr__(self, "additional_histories", others)
            return
        if self.samples or self.history is not None:
            raise InputError("messages_and_choices: got them and samples or a history, expected one of them")
        main = History.read(
            () if given is None else given,
            self.tools,
            chat_template_kwargs=chat_template_kwargs,
            train_messages=train_messages,
        )
        _check_list("logs", self.logs, "texts")
        if not isinstance(self.metadata, Mapping):
            raise MessageError("metadata", self.metadata, "an object")
        if not isinstance(self.start_time, datetime | None):
            raise MessageError("start_time", self.start_time, "a datetime or None")
        version = _read_version("initial_policy_version", self.initial_policy_version)
        _read_version("final_policy_version", self.final_policy_version)
        hand_built = build_tree([main, *others], codec, history=history_policy, version=version or 0)
        fork_report = classify_forks(hand_built.tree)
        fork_report.main_leaf = hand_built.main_leaf
        reward = _read_reward(self.reward)
        export = export_samples(
            hand_built.tree,
            policy,
            session=self.session,
            reward=reward,
            rewards=[{"score": score, "agent": name} for name, score in self.agent_rewards.items()],
            fork_report=fork_report,
        )
        own: dict[str, object] = {
            "samples": tuple(export.samples),
            "history": main,
            "additional_histories": others,
            "reward": reward,
            "metrics": _read_metrics(self.metrics),
            "finished": self.finished and _is_finished(hand_built.main_answer),
            "report": export.report,
            "parent_answers": _parent_answers(hand_built.tree, fork_report),
            "fork_causes": _count_causes(fork_report),
            "messages_and_choices": main.messages_and_choices,
            "tools": main.tools,
            "metadata": copy.deepcopy(dict(self.metadata)),
            "logs": tuple(self.logs),
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

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
        it, objects with a score; `reward` overrides the one for the whole session. If `finished` is None, a
        main history whose last answer was cut off (`length`, `cancelled`) or did not reach its client is
        unfinished. Raises MessageError for a reward that cannot be read."""
        return cls.from_tree(
            session.snapshot(),
            session=session.id,
            reward=reward,
            rewards=read_rewards(rewards) if rewards else (),
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
        """As `from_session`, for a tree that nothing changes meanwhile, with the rewards as its session has
        recorded them."""
        fork_report = classify_forks(tree)
        reward = session_reward(rewards) if reward is None else read_score(reward, "reward")
        stream = SampleStream(
            tree,
            policy,
            session=session,
            reward=reward,
            rewards=rewards,
            fork_report=fork_report,
            are_recorded=True,
        )
        samples = tuple(stream)
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
            samples=samples,
            history=main,
            additional_histories=tuple(others),
            reward=reward,
            metrics={} if metrics is None else metrics,
            session=session,
            finished=finished,
            failed=failed,
            report=stream.report,
            parent_answers=_parent_answers(tree, fork_report),
            fork_causes=_count_causes(fork_report),
            agent_rewards=agent_rewards(rewards),
        )

    @classmethod
    def from_messages(
        cls,
        messages_and_choices: Sequence[object],
        *,
        codec: Codec | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
        """Returns a trajectory that was built by hand, as the constructor does. If `finished` is None, a main
        history whose last choice was cut off (`length`) or cancelled is unfinished."""
        trajectory = cls(
            messages_and_choices=messages_and_choices,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            additional_histories=tuple(additional_histories),
            reward=reward,
            metrics={} if metrics is None else metrics,
            session=session,
            failed=failed,
            codec=codec,
            policy=policy,
            history_policy=history_policy,
            train_messages=train_messages,
        )
        return trajectory if finished is None else replace(trajectory, finished=finished)

    @property
    def answer(self) -> str:
        """The text of the last message of the main history if the model sampled it, else an empty text."""
        if self.history is None or len(self.history.messages) - 1 not in self.history.sampled:
            return ""
        return self.history.messages[-1].content

    def with_reward(self, reward: float, extras: Mapping[str, Any] | None = None) -> Trajectory:
        """Returns the trajectory with a reward for the whole episode, and what was posted with it. Timelines
        and agents that have a reward of their own keep it."""
        reward = read_score(reward, "reward")
        samples = [self._sample_with_reward(sample, reward, extras or {}) for sample in self.samples]
        return replace(self, reward=reward, samples=tuple(samples))

    def _check_rewards(self) -> None:
        """Raises InputError if a reward is another one than that of the samples, as after `replace`."""
        for sample in self.samples:
            own = [span.score for span in sample.rewards if span.agent and not span.tool]
            recorded: list[float | None] = [*own[-1:]]
            if not any(span.is_timeline for span in sample.rewards):
                recorded.append(sample.reward)
            name, given, hint = "reward", self.reward, "with_reward changes both"
            if own or sample.agent in self.agent_rewards:
                name, given = f"agent_rewards[{sample.agent!r}]", self.agent_rewards.get(sample.agent)
                hint = "build a Trajectory with other rewards"
            for reward in recorded:
                if reward != given:
                    raise InputError(
                        f"{name}: got {given!r}, expected that of the samples, {reward!r}; {hint}"
                    )

    def _sample_with_reward(self, sample: Sample, reward: float, extras: Mapping[str, Any]) -> Sample:
        if not any(span.is_timeline for span in sample.rewards):
            sample = replace(sample, reward=self.agent_rewards.get(sample.agent, reward))
        return replace(sample, reward_extras=sample_extras(extras, sample.rewards))

    @cached_property
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

    def reward_of_agent(self, agent: str) -> float | None:
        """Returns the reward of an agent's tokens: its own, else that of the episode. None if neither is
        given and another agent has a reward, because that is not for these tokens."""
        own = self.agent_rewards.get(agent)
        if own is not None or (self.reward is None and self.agent_rewards):
            return own
        return self.episode_reward


@dataclass(frozen=True)
class TrajectoryGroup:
    """The trajectories of one prompt, which are compared with each other."""

    trajectories: Sequence[Trajectory]
    """May be given with the exceptions of those that failed among them, as with ART."""
    id: str = ""
    _: KW_ONLY
    exceptions: Sequence[BaseException] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Sequence[str] = ()

    def __post_init__(self) -> None:
        given: list[object] = list(self.trajectories)
        for index, item in enumerate(given):
            if not isinstance(item, Trajectory | BaseException):
                raise MessageError(f"trajectories[{index}]", type(item).__name__, "a Trajectory")
        raised = [item for item in given if isinstance(item, BaseException)]
        if raised or not isinstance(self.trajectories, Sequence):
            trajectories = [item for item in given if isinstance(item, Trajectory)]
            object.__setattr__(self, "trajectories", trajectories)
            object.__setattr__(self, "exceptions", (*self.exceptions, *raised))

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def _count_causes(fork_report: ForkReport) -> Counter[str]:
    return Counter(fork.cause.value for fork in fork_report.forks)


def _is_finished(answer: LoggedOutput | None) -> bool:
    return answer is None or not (answer.is_cut or answer.finish_reason == "length")


def _read_reward(reward: object) -> float | None:
    return None if reward is None else read_score(reward, "reward")


def _check_list(name: str, values: object, kind: str) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise MessageError(name, values, f"a list of {kind}")


def _read_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise MessageError("metrics", metrics, "an object of numbers")
    for name, value in metrics.items():
        if not isinstance(value, int | float | np.number | np.bool_):
            raise MessageError(f"metrics.{name}", value, "a number")
    return dict(metrics)


def _read_version(name: str, version: object) -> int | None:
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise MessageError(name, version, "an integer from 0 on, or None")
    return version


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
