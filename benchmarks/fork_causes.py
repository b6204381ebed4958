"""Precision and recall of fork causes on generated episodes with a known cause for every branch.

The expected cause of a fork does not depend on the classifier: of its two branches, the one whose first call
is later in the plan was opened by that call, whose expected cause is the answer. Episodes under a template
that strips reasoning, without other actions, fork only for that reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from benchmarks.measure import BenchmarkTable
from branchline import Session, ToyCodec, Tree, classify_forks, merge
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator, PlannedCall
from branchline.timelines.causes import Cause, ForkReport
from branchline.timelines.links import MergePolicy
from branchline.tree.tree import Node

_EPISODES, _STEPS = 400, 10
_THINK_STRIP_EPISODES = 60
_NOT_PLANNED = "no fork planned"

Counts = Counter[tuple[str, str]]
"""Counts of (expected cause, classified cause)."""


def table() -> BenchmarkTable:
    own: Counts = Counter()
    foreign: Counts = Counter()
    for seed in range(_EPISODES):
        plan = PlanGenerator(Random(seed)).generate(_STEPS)
        _classify_episode(plan, ToyCodec.chatml(), seed, None, own, foreign)
    for seed in range(_THINK_STRIP_EPISODES):
        plan = PlanGenerator(Random(seed), reasoning=True).generate(_STEPS, only=[])
        _classify_episode(plan, ToyCodec.chatml(strip_thinking=True), seed, Cause.THINK_STRIP, own, foreign)
    report = BenchmarkTable(
        f"Causes of forks on {_EPISODES + _THINK_STRIP_EPISODES} generated episodes",
        ["cause", "n", "precision", "recall", "unknown", "foreign n", "precision", "recall", "unknown"],
        [
            "Own: the session's tree. Foreign: the same calls as a shuffled log, merged by token. A log does",
            "not say what reached its client, so a retry or a cancelled call in it looks like best-of-n.",
        ],
    )
    for cause in sorted({cause for pair in [*own, *foreign] for cause in pair}):
        report.add_row(cause, *_precision_recall(own, cause), *_precision_recall(foreign, cause))
    report.add_row("all", *_overall(own), *_overall(foreign))
    return report


def _classify_episode(
    plan: Sequence[PlannedCall],
    codec: ToyCodec,
    seed: int,
    only_cause: Cause | None,
    own: Counts,
    foreign: Counts,
) -> None:
    session = Session("episode", codec)
    runner = PlanRunner(session, codec)
    runner.run(plan)
    own.update(_pairs(session.tree, classify_forks(session.tree), plan, range(len(plan)), only_cause))
    log = runner.to_log()
    Random(seed).shuffle(log)
    merged = merge(log, MergePolicy(compare="token"))
    planned = [line - 1 for line in merged.line_of_call]
    foreign.update(_pairs(merged.tree, classify_forks(merged.tree), plan, planned, only_cause))


def _pairs(
    tree: Tree,
    fork_report: ForkReport,
    plan: Sequence[PlannedCall],
    planned: Sequence[int],
    only_cause: Cause | None,
) -> list[tuple[str, str]]:
    """Returns (expected, classified) for every fork; `planned` maps calls of the tree to calls of the
    plan."""
    opened = _first_planned(tree, planned)
    pairs: list[tuple[str, str]] = []
    for fork in fork_report.forks:
        opener = plan[max(opened[fork.branch.id], opened[fork.sibling.id])]
        pairs.append((only_cause or opener.expected_cause or _NOT_PLANNED, fork.cause))
    return pairs


def _first_planned(tree: Tree, planned: Sequence[int]) -> dict[int, int]:
    """Returns for each node the first call of the plan whose path contains it."""
    first: dict[int, int] = {}
    for call in sorted(tree.calls, key=lambda call: planned[call.index]):
        for output in call.outputs:
            node: Node | None = tree.nodes[output]
            while node is not None and node.id not in first:
                first[node.id] = planned[call.index]
                node = node.parent
    return first


def _precision_recall(counts: Counts, cause: str) -> tuple[str, str, str, str]:
    expected_count = sum(count for (expected, _), count in counts.items() if expected == cause)
    found_count = sum(count for (_, found), count in counts.items() if found == cause)
    right = counts[cause, cause]
    unknown = counts[cause, Cause.UNKNOWN]
    return (
        str(expected_count),
        _percent(right, found_count),
        _percent(right, expected_count),
        _percent(unknown, expected_count),
    )


def _overall(counts: Counts) -> tuple[str, str, str, str]:
    total = sum(counts.values())
    right = sum(count for (expected, found), count in counts.items() if expected == found)
    unknown = sum(count for (_, found), count in counts.items() if found == Cause.UNKNOWN)
    return (str(total), _percent(right, total - unknown), _percent(right, total), _percent(unknown, total))


def _percent(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "–"
