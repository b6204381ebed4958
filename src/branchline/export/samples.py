"""From a tree to samples: which timelines, which shares, and an account of every sampled token.

Outputs that must not be trained are pruned first; what is left is read leaf by leaf. A token that k leaves
share is carried by each with 1/k (`split`), by one alone (`first`), or by all in full (`all`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from branchline.core.errors import ExportError, MissingLogprobsError
from branchline.core.sample import DroppedTokens, ExportReport, Sample
from branchline.timelines.causes import Cause, DropReason, ForkReport, classify_forks
from branchline.timelines.timeline import NO_VERSION, Timeline
from branchline.tree.node import Node
from branchline.tree.tree import Tree

RESUMED = "resumed"
"""The tokens of a cancelled call that another went on from are that call's, and counted there."""
ShareMode = Literal["split", "first", "all"]
KeepMode = Literal["last", "random"]


@dataclass(frozen=True)
class ExportPolicy:
    """What is trained, and how shared tokens count."""

    shares: ShareMode = "split"
    drop: frozenset[str] = field(default_factory=lambda: frozenset(DropReason))
    """Reasons and causes whose outputs are not trained. By default only what never reached a client.

    A cause drops its branches, the first of siblings stays; of equal or alternative answers (`twin`,
    `best_of_n`) only those that nothing continues, so that `{Cause.TWIN}` is de-duplication."""
    include_inexact: bool = False
    """Train tokens that were sampled behind other ids than those before them (merged foreign logs)."""
    include_missing_logprobs: bool = False
    """Train tokens that came without logprobs."""
    max_samples: int | None = None
    """At most this many samples of a session; the one that ends last is always kept."""
    keep: KeepMode = "last"
    """Which samples stay when there are too many."""
    max_tokens: int | None = None
    """Tokens beyond this place are cut off a sample."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_samples", 1), ("max_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ExportError(f"{name}: got {value}, expected at least {least}, or None for no limit")


@dataclass(frozen=True)
class Export:
    """The samples of a session and the account of its tokens."""

    samples: list[Sample]
    report: ExportReport


def export_samples(
    tree: Tree,
    policy: ExportPolicy | None = None,
    *,
    session: str = "",
    reward: float | None = None,
    fork_report: ForkReport | None = None,
) -> Export:
    """The samples of a tree; reads, changes nothing. A session that goes on in another thread is read
    as `session.reading()` gives it."""
    policy = policy or ExportPolicy()
    fork_report = fork_report or classify_forks(tree)
    pruned = _pruned_nodes(tree, policy, fork_report)
    leaves = _limit_leaves(_kept_leaves(tree, pruned), policy)
    counts = _leaf_counts(leaves, pruned)
    seen: set[int] = set()
    samples: list[Sample] = []
    for leaf in leaves:
        timeline = Timeline(tree, leaf)
        sample = _build_sample(
            timeline, policy, _node_shares(timeline, policy.shares, counts, seen), session, reward
        )
        if sample is not None:
            samples.append(sample)
    report = _build_report(tree, policy, pruned, counts, len(samples))
    if report.missing_logprobs and not policy.include_missing_logprobs:
        raise MissingLogprobsError(
            f"{report.missing_logprobs} of {report.trained_tokens} sampled tokens came without logprobs; "
            "set missing_logprobs=True to train on them all the same"
        )
    return Export(samples, report)


def _pruned_nodes(tree: Tree, policy: ExportPolicy, judgement: ForkReport) -> dict[int, str]:
    """Sampled nodes that are not trained, with the reason."""
    pruned: dict[int, str] = {}
    below: dict[int, str] = {}
    for fork in judgement.forks:
        if fork.cause not in policy.drop or fork.cause in (Cause.RETRY, Cause.CANCELLED):
            continue
        if fork.cause not in (Cause.DUPLICATE, Cause.BEST_OF_N) or not fork.branch.children:
            below[fork.branch.id] = fork.cause
    for node in tree.nodes[1:]:
        assert node.parent is not None
        inherited = below.get(node.id) or below.get(node.parent.id)
        if inherited:
            below[node.id] = inherited
        if node.output is None:
            continue
        unseen = judgement.undelivered.get(node.id)
        if tree.is_resumed(tree.call_of(node)):
            pruned[node.id] = RESUMED
        elif unseen is not None and unseen in policy.drop:
            pruned[node.id] = unseen
        elif inherited:
            pruned[node.id] = inherited
        elif node.output.inexact and not policy.include_inexact:
            pruned[node.id] = "inexact"
        elif not tree.call_of(node).trainable:
            pruned[node.id] = "untrained"
    return pruned


def _kept_leaves(tree: Tree, pruned: dict[int, str]) -> list[Node]:
    """The deepest trained nodes: what is left of the leaves once pruned outputs are gone.

    A pruned output inside a path stays there as context of what follows it; it is only not trained.
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


def _limit_leaves(leaves: list[Node], policy: ExportPolicy) -> list[Node]:
    """At most max_samples leaves, the final one always among them."""
    most = policy.max_samples
    if most is None or len(leaves) <= most:
        return leaves
    if policy.keep == "last":
        return leaves[-max(1, most) :]
    others = random.Random(policy.seed).sample(range(len(leaves) - 1), max(0, most - 1))
    return [*(leaves[place] for place in sorted(others)), leaves[-1]]


def _leaf_counts(leaves: Sequence[Node], pruned: Mapping[int, str]) -> dict[int, int]:
    """How many kept leaves each trained node lies above."""
    counts: dict[int, int] = {}
    for leaf in leaves:
        for node in leaf.path():
            if node.is_sampled and node.id not in pruned:
                counts[node.id] = counts.get(node.id, 0) + 1
    return counts


def _node_shares(
    timeline: Timeline, shares: ShareMode, counts: Mapping[int, int], seen: set[int]
) -> dict[int, float]:
    """The share of each trained node of a timeline; a node without one is context in this sample."""
    given: dict[int, float] = {}
    for node in timeline.sampled_nodes:
        if node.id not in counts:
            continue
        if shares == "first":
            if node.id not in seen:
                given[node.id] = 1.0
                seen.add(node.id)
        else:
            given[node.id] = 1.0 if shares == "all" else 1.0 / counts[node.id]
    return given


def _build_sample(
    timeline: Timeline, policy: ExportPolicy, given: Mapping[int, float], session: str, reward: float | None
) -> Sample | None:
    """The sample of a timeline; None where it would train nothing."""
    length = len(timeline) if policy.max_tokens is None else min(len(timeline), policy.max_tokens)
    shares = np.zeros(len(timeline), np.float32)
    behind = 0
    for node in timeline.sampled_nodes:
        if node.id in given:
            shares[node.sampled_start : node.end] = given[node.id]
            if node.output is not None and node.output.inexact:
                behind += max(0, min(node.end, length) - node.sampled_start)
    trained = np.flatnonzero(shares[:length])
    if not len(trained):
        return None
    start = int(trained[0])
    response = slice(start, length)
    mask = (shares[response] > 0).astype(np.int8)
    logprobs = np.where(mask, timeline.logprobs[response], np.float32(0))
    last = timeline.leaf.output
    return Sample(
        prompt_ids=timeline.ids[:start],
        response_ids=timeline.ids[response],
        response_mask=mask,
        response_logprobs=logprobs,
        response_versions=np.where(mask, timeline.versions[response], np.int32(NO_VERSION)),
        shares=shares[response],
        agent=timeline.agent,
        session=session,
        calls=tuple(call.id for call in timeline.calls),
        finish_reason=last.finish_reason if last is not None and length == len(timeline) else "length",
        exact=behind == 0,
        inexact_tokens=behind,
        missing_logprobs=int(np.isnan(logprobs).sum()),
        truncated_tokens=len(timeline) - length,
        reward=reward,
        media=tuple(timeline.media),
        routed_experts=None if timeline.routed_experts is None else timeline.routed_experts[response],
    )


def _build_report(
    tree: Tree, policy: ExportPolicy, pruned: Mapping[int, str], counts: Mapping[int, int], samples: int
) -> ExportReport:
    """The account: each sampled token is trained in some sample or dropped for one reason."""
    sampled = trained = inexact = missing = 0
    dropped: list[DroppedTokens] = []
    for node in tree.nodes:
        if node.output is None or node.sampled_ids is None or pruned.get(node.id) == RESUMED:
            continue
        count = len(node.sampled_ids)
        sampled += count
        call = tree.call_of(node).id
        if node.id not in counts:
            if count:
                dropped.append(DroppedTokens(pruned.get(node.id, "capped"), call, count))
            continue
        kept = count
        if policy.max_tokens is not None:
            kept = max(0, min(node.end, policy.max_tokens) - node.sampled_start)
            if kept < count:
                dropped.append(DroppedTokens("over_length", call, count - kept))
        trained += kept
        inexact += kept if node.output.inexact else 0
        given = node.output.logprobs
        missing += kept if given is None else int(np.isnan(given[:kept]).sum())
    return ExportReport(sampled, trained, tuple(dropped), samples, inexact, missing)
