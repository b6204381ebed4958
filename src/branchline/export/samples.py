"""Exports a tree as samples, with shares and an account of every sampled token.

Outputs that must not be trained are pruned first; each remaining leaf becomes a sample. A token shared by k
leaves is trained with share 1/k in each (`split`), in one of them only (`first`), or fully in all (`all`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from branchline.core.call import count_not_applied
from branchline.core.errors import ExportError, InputError, MissingLogprobsError
from branchline.core.option_checks import check_count, check_flag, check_number
from branchline.core.reward import read_rewards, read_score
from branchline.core.sample import (
    AnswerSpan,
    DroppedTokens,
    DropReason,
    ExportReport,
    LogprobMeasurement,
    RewardSpan,
    Sample,
)
from branchline.export.rewards import (
    agent_rewards,
    assign_rewards,
    sample_extras,
    session_extras,
    session_reward,
)
from branchline.timelines.causes import Cause, ForkReport, classify_forks
from branchline.timelines.timeline import NO_VERSION, Timeline
from branchline.tree.tree import Node, Tree

ShareMode = Literal["split", "first", "all"]
KeepMode = Literal["last", "random"]
InexactMode = bool | Literal["context"]
DROPPABLE = frozenset({DropReason.RETRY, DropReason.CANCELLED, DropReason.LOST, *Cause})
"""What `ExportPolicy.drop` may contain."""


@dataclass(frozen=True)
class ExportPolicy:
    """Which outputs are trained, and how shared tokens count."""

    shares: ShareMode = "split"
    drop: frozenset[str] = frozenset({DropReason.RETRY, DropReason.CANCELLED, DropReason.LOST})
    """Drop reasons and fork causes whose outputs are not trained; by default, outputs that reached no client.

    A cause drops its branches but not the first sibling. `duplicate` and `best_of_n` drop only outputs that
    no call continues, and `duplicate` only outputs with equal ids, so it removes duplicates."""
    include_inexact: InexactMode = False
    """Train tokens whose context differs from the context they were sampled in. `context`: if all ids are
    known (repaired drift, other tools). True: also if ids were encoded from text or estimated (upstreams,
    logs without ids)."""
    include_missing_logprobs: bool = False
    """Train tokens without logprobs."""
    missing_logprob: float | None = None
    """Train tokens without logprobs and set their logprobs to this number; None leaves them NaN."""
    max_samples: int | None = None
    """Maximum number of samples of a session; that of the main history is always kept."""
    keep: KeepMode = "last"
    """Which samples to keep if there are more than `max_samples`."""
    max_tokens: int | None = None
    """Maximum length of a sample; later tokens are cut off."""
    seed: int = 0
    keep_calls: frozenset[str] = frozenset()
    """Ids of calls that are trained although they were cancelled: the last answer of an interrupted agent."""

    def __post_init__(self) -> None:
        for name, choice, choices in (
            ("shares", self.shares, get_args(ShareMode)),
            ("keep", self.keep, get_args(KeepMode)),
            ("include_inexact", self.include_inexact, (False, True, "context")),
            *(("drop", reason, sorted(DROPPABLE)) for reason in self.drop),
        ):
            if choice not in choices:
                raise ExportError(f"{name}: got {choice!r}, expected one of {', '.join(map(str, choices))}")
        try:
            check_flag("include_missing_logprobs", self.include_missing_logprobs)
        except InputError as error:
            raise ExportError(str(error)) from error
        try:
            if self.missing_logprob is not None:
                check_number("missing_logprob", self.missing_logprob, most=0)
            if self.max_samples is not None:
                check_count("max_samples", self.max_samples, 1)
            if self.max_tokens is not None:
                check_count("max_tokens", self.max_tokens, 0)
        except InputError as error:
            raise ExportError(f"{error}, or None") from error


@dataclass(frozen=True)
class Export:
    """The samples of a session and their report."""

    samples: list[Sample]
    report: ExportReport
    trained_nodes: frozenset[int] = frozenset()
    """The nodes of the tree that samples train."""


class SampleStream:
    """The samples of a tree, built one at a time, so that a large session need not fit into memory.

    `report` is complete after the last sample.
    """

    def __init__(
        self,
        tree: Tree,
        policy: ExportPolicy | None = None,
        *,
        session: str = "",
        reward: float | None = None,
        rewards: Sequence[Mapping[str, Any]] = (),
        fork_report: ForkReport | None = None,
        are_recorded: bool = False,
    ) -> None:
        """Takes what `export_samples` takes, and raises MissingLogprobsError before the first sample.
        `are_recorded` says that the rewards are those of a session, which were read when they were posted."""
        if rewards and not are_recorded:
            rewards = read_rewards(rewards)
        self.tree = tree
        self.policy = policy or ExportPolicy()
        self._session = session
        self._reward = session_reward(rewards) if reward is None else read_score(reward, "reward")
        fork_report = fork_report or classify_forks(tree)
        self._pruned = _pruned_nodes(tree, self.policy, fork_report)
        kept = _kept_leaves(tree, self._pruned)
        self.leaves = _limit_leaves(tree, kept, self.policy, fork_report.main_leaf)
        self.counts = _leaf_counts(tree, self.leaves, self._pruned)
        """For each trained node the number of samples through it."""
        self._has_rewards = bool(rewards)
        self._assigned = assign_rewards(tree, rewards, fork_report)
        self._agent_rewards = agent_rewards(rewards)
        self._session_extras = session_extras(rewards)
        self._sample_count = 0
        self._measurements: dict[int, LogprobMeasurement] = {}
        """By the index of the call; many samples share an answer."""
        report = _build_report(tree, self.policy, self._pruned, self.counts)
        self._report = replace(report, unnamed_conversations=fork_report.unnamed_conversations)
        policy = self.policy
        if report.missing_logprobs and policy.missing_logprob is None and not policy.include_missing_logprobs:
            raise MissingLogprobsError(
                f"{report.missing_logprobs} of {report.trained_tokens} sampled tokens came without logprobs; "
                "set include_missing_logprobs=True or missing_logprob to train on them"
            )

    def __iter__(self) -> Iterator[Sample]:
        return (sample for _, sample in self.with_leaves())

    def with_leaves(self) -> Iterator[tuple[Node, Sample]]:
        """Yields each sample with the node at the end of its timeline."""
        seen: set[int] = set()
        self._sample_count = 0
        for leaf in self.leaves:
            timeline = Timeline(self.tree, leaf)
            shares = _node_shares(timeline, self.policy.shares, self.counts, seen)
            sample = self._build_sample(timeline, shares)
            if sample is not None:
                self._sample_count += 1
                yield leaf, sample

    @property
    def report(self) -> ExportReport:
        """The account of every sampled token, with the number of samples that were built so far."""
        report = replace(self._report, samples=self._sample_count)
        if not self._has_rewards:
            return report
        limit = self.policy.max_tokens
        nodes = self.tree.nodes
        # An empty answer trains nothing, so no sample has its reward.
        trained = {
            node
            for node in self.counts
            if nodes[node].sampled_start < nodes[node].end
            and (limit is None or nodes[node].sampled_start < limit)
        }
        path_nodes = nodes_above(self.leaves) if self._sample_count else set()
        agents = {nodes[node].agent or "" for node in trained}
        return replace(
            report, unassigned_rewards=self._assigned.count_unassigned(trained, path_nodes, agents)
        )

    def _build_sample(self, timeline: Timeline, node_shares: Mapping[int, float]) -> Sample | None:
        """Returns the sample of a timeline, or None if it would train nothing."""
        policy = self.policy
        length = _sample_length(timeline, policy.max_tokens)
        shares = np.zeros(len(timeline), np.float32)
        inexact = 0
        for node in timeline.sampled_nodes:
            if node.id in node_shares:
                shares[node.sampled_start : node.end] = node_shares[node.id]
                if node.output is not None and node.output.inexact:
                    inexact += max(0, min(node.end, length) - node.sampled_start)
        trained = np.flatnonzero(shares[:length])
        if not len(trained):
            return None
        start = int(trained[0])
        response = slice(start, length)
        mask = (shares[response] > 0).astype(np.int8)
        logprobs = np.where(mask, timeline.logprobs[response], np.float32(0))
        missing = np.isnan(logprobs)
        if policy.missing_logprob is not None:
            logprobs[missing] = policy.missing_logprob
        last = timeline.leaf.output
        own = self._assigned.timeline_reward(timeline.nodes)
        answers = tuple(self._answer_spans(timeline, node_shares, start, length))
        rewards = tuple(self._reward_spans(timeline, answers, length - start))
        return Sample(
            prompt_ids=timeline.ids[:start],
            response_ids=timeline.ids[response],
            response_mask=mask,
            response_logprobs=logprobs,
            response_versions=np.where(mask, timeline.versions[response], np.int32(NO_VERSION)),
            shares=shares[response],
            agent=timeline.agent,
            session=self._session,
            calls=tuple(call.id for call in timeline.calls),
            finish_reason=last.finish_reason if last is not None and length == len(timeline) else "length",
            exact=inexact == 0,
            inexact_tokens=inexact,
            missing_logprobs=int(missing.sum()),
            truncated_tokens=len(timeline) - length,
            reward=self._agent_rewards.get(timeline.agent, self._reward) if own is None else own.score,
            media=tuple(
                media
                for node in timeline.nodes
                if node.message.parts and node.end <= length
                for media in node.message.media
            ),
            rewards=rewards,
            answers=answers,
            reward_extras=sample_extras(self._session_extras, rewards),
        )

    def _answer_spans(
        self, timeline: Timeline, node_shares: Mapping[int, float], start: int, length: int
    ) -> Iterator[AnswerSpan]:
        """Yields the trained answers of a sample."""
        measurements = self._measurements
        for node, call in zip(timeline.sampled_nodes, timeline.calls, strict=True):
            answer_start, answer_end = node.sampled_start, min(node.end, length)
            if node.id not in node_shares or answer_start >= answer_end:
                continue
            if call.index not in measurements:
                measurements[call.index] = LogprobMeasurement.from_sampling(call.sampling)
            yield AnswerSpan(
                answer_start - start, answer_end - start, call.id, node.id, measurements[call.index]
            )

    def _reward_spans(
        self, timeline: Timeline, answers: Sequence[AnswerSpan], length: int
    ) -> Iterator[RewardSpan]:
        """Yields the rewards of a sample's timeline, tools and agent, then those of its trained answers in
        order."""
        if not self._has_rewards:
            return
        for reward in self._assigned.for_timeline(timeline.nodes, timeline.agent):
            yield reward.span(0, length)
        for answer in answers:
            for reward in self._assigned.by_node.get(answer.node, ()):
                yield reward.span(answer.start, answer.end, answer.call)


def export_samples(
    tree: Tree,
    policy: ExportPolicy | None = None,
    *,
    session: str = "",
    reward: float | None = None,
    rewards: Sequence[Mapping[str, Any]] = (),
    fork_report: ForkReport | None = None,
) -> Export:
    """Returns the samples of a tree, which it does not change. Pass `session.snapshot()` for a session that
    other threads commit to. `rewards` are those of the session and of its parts, objects with a score; see
    `export/rewards.py`. `reward` overrides the one for the whole session. Raises MessageError for one that
    cannot be read."""
    stream = SampleStream(
        tree, policy, session=session, reward=reward, rewards=rewards, fork_report=fork_report
    )
    return Export(list(stream), stream.report, frozenset(stream.counts))


def export_nothing(tree: Tree, reason: DropReason) -> Export:
    """Returns no samples, and a report that lists every sampled token as dropped for a reason."""
    dropped = [
        DroppedTokens(reason, tree.call_of(node).id, len(node.sampled_ids))
        for node in tree.nodes
        if node.output is not None
        and node.sampled_ids is not None
        and not tree.is_resumed(tree.call_of(node))
    ]
    sampled = sum(entry.tokens for entry in dropped)
    return Export([], ExportReport(sampled, 0, tuple(dropped), not_applied=count_not_applied(tree.calls)))


def _pruned_nodes(tree: Tree, policy: ExportPolicy, fork_report: ForkReport) -> dict[int, str]:
    """Returns the sampled nodes that are not trained, with the reason."""
    pruned: dict[int, str] = {}
    dropped_causes: dict[int, str] = {}
    for fork in fork_report.forks:
        if fork.cause not in policy.drop or fork.cause in (Cause.RETRY, Cause.CANCELLED, Cause.DUPLICATE):
            continue
        if fork.cause != Cause.BEST_OF_N or not fork.branch.children:
            dropped_causes[fork.branch.id] = fork.cause
    if Cause.DUPLICATE in policy.drop:
        dropped_causes |= dict.fromkeys(_duplicate_outputs(tree, fork_report), Cause.DUPLICATE)
    for node in tree.nodes[1:]:
        assert node.parent is not None
        cause = dropped_causes.get(node.id) or dropped_causes.get(node.parent.id)
        if cause:
            dropped_causes[node.id] = cause
        if node.output is None:
            continue
        undelivered = fork_report.undelivered.get(node.id)
        if tree.is_resumed(tree.call_of(node)):
            pruned[node.id] = DropReason.RESUMED
        elif (
            undelivered is not None
            and undelivered in policy.drop
            and tree.call_of(node).id not in policy.keep_calls
        ):
            pruned[node.id] = undelivered
        elif cause:
            pruned[node.id] = cause
        elif node.output.inexact and (
            not policy.include_inexact or (node.output.estimated and policy.include_inexact == "context")
        ):
            pruned[node.id] = DropReason.INEXACT
        elif not tree.call_of(node).trainable:
            pruned[node.id] = DropReason.UNTRAINED
    return pruned


def _duplicate_outputs(tree: Tree, fork_report: ForkReport) -> Iterator[int]:
    """Yields the outputs that no call continues and whose prompt has another output with the same ids."""
    candidates = [
        fork.branch
        for fork in fork_report.forks
        if fork.cause == Cause.DUPLICATE and fork.branch.is_sampled and not fork.branch.children
    ]
    candidate_ids = {node.id for node in candidates}
    others = [node for node in tree.nodes if node.is_sampled and node.id not in candidate_ids]
    kept = {_prompt_and_ids(node) for node in others}
    for node in candidates:
        if _prompt_and_ids(node) in kept:
            yield node.id
        kept.add(_prompt_and_ids(node))


def _prompt_and_ids(node: Node) -> tuple[int, bytes]:
    return node.parent.id if node.parent is not None else 0, node.ids.tobytes()


def _kept_leaves(tree: Tree, pruned: dict[int, str]) -> list[Node]:
    """Returns the deepest trained nodes: the leaves of the tree without its pruned outputs.

    A pruned output inside a path remains as context of the nodes after it; it is only not trained.
    """
    has_trained_below = [False] * len(tree.nodes)
    leaves: list[Node] = []
    for node in reversed(tree.nodes):
        trained = node.is_sampled and node.id not in pruned
        if trained and not has_trained_below[node.id]:
            leaves.append(node)
        if node.parent is not None and (trained or has_trained_below[node.id]):
            has_trained_below[node.parent.id] = True
    leaves.reverse()
    return leaves


def _limit_leaves(tree: Tree, leaves: list[Node], policy: ExportPolicy, main_leaf: Node | None) -> list[Node]:
    """Returns at most `max_samples` leaves, always including the one that trains the last answer of the main
    history, or the last if that trains nothing."""
    limit = policy.max_samples
    if limit is None or len(leaves) <= limit:
        return leaves
    last_below: dict[int, Node] = {}
    for leaf in reversed(leaves):
        node: Node | None = leaf
        while node is not None and node.id not in last_below:
            last_below[node.id] = leaf
            node = node.parent
    answers = map(tree.answer_at, reversed(main_leaf.path() if main_leaf is not None else ()))
    main = next((last_below[one.id] for one in answers if one and one.id in last_below), leaves[-1])
    others = [leaf for leaf in leaves if leaf is not main]
    count = limit - 1
    if policy.keep == "last":
        kept = others[len(others) - count :]
    else:
        kept = [others[index] for index in random.Random(policy.seed).sample(range(len(others)), count)]
    return sorted([*kept, main], key=lambda leaf: leaf.id)


def _leaf_counts(tree: Tree, leaves: Sequence[Node], pruned: Mapping[int, str]) -> dict[int, int]:
    """Returns for each trained node the number of kept leaves below it."""
    below = [0] * len(tree.nodes)
    for leaf in leaves:
        below[leaf.id] += 1
    for node in reversed(tree.nodes):  # children follow their parents
        if node.parent is not None:
            below[node.parent.id] += below[node.id]
    trained = [node.id for node in tree.nodes if node.is_sampled and node.id not in pruned]
    return {node: below[node] for node in trained if below[node]}


def nodes_above(leaves: Sequence[Node]) -> set[int]:
    """Returns the nodes on the paths to some leaves."""
    found: set[int] = set()
    for leaf in leaves:
        node = leaf
        while node.parent is not None and node.id not in found:
            found.add(node.id)
            node = node.parent
    return found


def _node_shares(
    timeline: Timeline, shares: ShareMode, counts: Mapping[int, int], seen: set[int]
) -> dict[int, float]:
    """Returns the share of each trained node of a timeline; nodes without a share are context."""
    node_shares: dict[int, float] = {}
    for node in timeline.sampled_nodes:
        if node.id not in counts:
            continue
        if shares == "first":
            if node.id not in seen:
                node_shares[node.id] = 1.0
                seen.add(node.id)
        else:
            node_shares[node.id] = 1.0 if shares == "all" else 1.0 / counts[node.id]
    return node_shares


def _sample_length(timeline: Timeline, max_tokens: int | None) -> int:
    """Returns where a sample is cut off: never inside a message with media, whose placeholders belong
    together. Such a message is context, so no trained token is lost."""
    if max_tokens is None or max_tokens >= len(timeline):
        return len(timeline)
    cut = next(node for node in timeline.nodes if node.end > max_tokens)
    return cut.start if cut.message.media and not cut.is_sampled else max_tokens


def _build_report(
    tree: Tree, policy: ExportPolicy, pruned: Mapping[int, str], counts: Mapping[int, int]
) -> ExportReport:
    """Counts each sampled token once, as trained or as dropped for one reason. No samples are built yet."""
    sampled = trained = inexact = missing = 0
    dropped: list[DroppedTokens] = []
    for node in tree.nodes:
        if node.output is None or node.sampled_ids is None or pruned.get(node.id) == DropReason.RESUMED:
            continue
        count = len(node.sampled_ids)
        sampled += count
        call = tree.call_of(node).id
        if node.id not in counts:
            if count:
                dropped.append(DroppedTokens(pruned.get(node.id, DropReason.CAPPED), call, count))
            continue
        kept = count
        if policy.max_tokens is not None:
            kept = max(0, min(node.end, policy.max_tokens) - node.sampled_start)
            if kept < count:
                dropped.append(DroppedTokens(DropReason.OVER_LENGTH, call, count - kept))
        trained += kept
        inexact += kept if node.output.inexact else 0
        logprobs = node.output.logprobs
        missing += kept if logprobs is None else int(np.isnan(logprobs[:kept]).sum())
    return ExportReport(
        sampled,
        trained,
        tuple(dropped),
        inexact_tokens=inexact,
        missing_logprobs=missing,
        not_applied=count_not_applied(tree.calls),
    )
