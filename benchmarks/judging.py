"""Are causes right? Episodes are generated with the reason for every branch, and judged without it.

The truth of a fork does not depend on the judge: of the two branches, the one whose first call comes later
in the plan is the one that was opened, and that call's planned reason is the cause. Episodes played under
a template that strips thinking, in which nothing else happens, fork for that reason alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from benchmarks.measure import Report
from branchline import Cause, Judgement, MergePolicy, Session, ToyCodec, Tree, judge, merge
from branchline.testing.behaviours import Behaviour, PlannedCall
from branchline.testing.player import Player
from branchline.tree.node import Node

_EPISODES, _STEPS = 400, 10
_STRIPPED = 60
_NOT_PLANNED = "no fork planned"

Counts = Counter[tuple[str, str]]
"""How often a (truth, judged cause) was seen."""


def table() -> Report:
    own: Counts = Counter()
    foreign: Counts = Counter()
    for seed in range(_EPISODES):
        plan = Behaviour(Random(seed)).plan(_STEPS)
        _judge_episode(plan, ToyCodec.chatml(), seed, None, own, foreign)
    for seed in range(_STRIPPED):
        plan = Behaviour(Random(seed), reasoning=True).plan(_STEPS, only=[])
        _judge_episode(plan, ToyCodec.chatml(strip_thinking=True), seed, Cause.THINK_STRIP, own, foreign)
    report = Report(
        f"Causes of forks on {_EPISODES + _STRIPPED} generated episodes",
        ["cause", "n", "precision", "recall", "unknown", "foreign n", "precision", "recall", "unknown"],
        [
            "Own: the session's tree. Foreign: the same calls as a shuffled log, merged by token. A log does",
            "not say what reached its client, so a retry or a cancelled call in it looks like best-of-n.",
        ],
    )
    for cause in sorted({cause for pair in [*own, *foreign] for cause in pair}):
        report.row(cause, *_figures(own, cause), *_figures(foreign, cause))
    report.row("all", *_overall(own), *_overall(foreign))
    return report


def _judge_episode(
    plan: Sequence[PlannedCall],
    codec: ToyCodec,
    seed: int,
    only_cause: Cause | None,
    own: Counts,
    foreign: Counts,
) -> None:
    session = Session("episode", codec)
    player = Player(session, codec)
    player.play(plan)
    own.update(_pairs(session.tree, judge(session.tree), plan, range(len(plan)), only_cause))
    log = player.log()
    Random(seed).shuffle(log)
    merged = merge(log, MergePolicy(compare="token"))
    planned = [line - 1 for line in merged.line_of_call]
    foreign.update(_pairs(merged.tree, judge(merged.tree), plan, planned, only_cause))


def _pairs(
    tree: Tree,
    judgement: Judgement,
    plan: Sequence[PlannedCall],
    planned: Sequence[int],
    only_cause: Cause | None,
) -> list[tuple[str, str]]:
    """(truth, judged) of every fork; `planned` says which call of the plan each call of the tree is."""
    opened = _first_planned(tree, planned)
    pairs: list[tuple[str, str]] = []
    for fork in judgement.forks:
        opener = plan[max(opened[fork.branch.id], opened[fork.beside.id])]
        pairs.append((only_cause or opener.truth or _NOT_PLANNED, fork.cause))
    return pairs


def _first_planned(tree: Tree, planned: Sequence[int]) -> dict[int, int]:
    """For each node the first call of the plan that goes through it."""
    first: dict[int, int] = {}
    for call in sorted(tree.calls, key=lambda call: planned[call.index]):
        for output in call.outputs:
            node: Node | None = tree.nodes[output]
            while node is not None and node.id not in first:
                first[node.id] = planned[call.index]
                node = node.parent
    return first


def _figures(counts: Counts, cause: str) -> tuple[str, str, str, str]:
    of_truth = sum(count for (truth, _), count in counts.items() if truth == cause)
    of_judged = sum(count for (_, judged), count in counts.items() if judged == cause)
    right = counts[cause, cause]
    unknown = counts[cause, Cause.UNKNOWN]
    return (str(of_truth), _share(right, of_judged), _share(right, of_truth), _share(unknown, of_truth))


def _overall(counts: Counts) -> tuple[str, str, str, str]:
    total = sum(counts.values())
    right = sum(count for (truth, judged), count in counts.items() if truth == judged)
    unknown = sum(count for (_, judged), count in counts.items() if judged == Cause.UNKNOWN)
    return (str(total), _share(right, total - unknown), _share(right, total), _share(unknown, total))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
