"""A tree is read as it was at one moment, while it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from branchline import Session, ToyCodec, Tree, export_samples
from branchline.export.jsonl import report_to_json, sample_to_json
from branchline.export.samples import ExportPolicy
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator

CODEC = ToyCodec.chatml()
PERMISSIVE_POLICY = ExportPolicy(include_missing_logprobs=True)


def _tree_contents(tree: Tree) -> dict[str, Any]:
    """Everything that a reader can see of a tree."""
    export = export_samples(tree, PERMISSIVE_POLICY)
    return {
        "nodes": [(node.id, node.parent and node.parent.id, node.ids.tolist()) for node in tree.nodes],
        "children": [[child.id for child in node.all_children()] for node in tree.nodes],
        "leaves": [leaf.id for leaf in tree.leaves()],
        "calls": [(call.id, tree.delivery(call), tree.is_resumed(call)) for call in tree.calls],
        "samples": [sample_to_json(sample) for sample in export.samples],
        "report": report_to_json(export.report),
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_is_the_tree_at_the_time_it_was_taken(seed: int) -> None:
    plan = PlanGenerator(Random(seed)).generate(12)
    player = PlanRunner(Session("s", CODEC), CODEC)
    tree = player.session.tree
    then: list[tuple[Callable[[], Tree], dict[str, Any]]] = []
    for planned in plan:
        player.commit(planned)
        then.append((tree.snapshot(), _tree_contents(tree)))
    for moment, told in then:
        assert _tree_contents(moment()) == told
    again = then[-1][0]()
    assert not {id(node) for node in again.nodes} & {id(node) for node in tree.nodes}
    # It is a whole tree: what is asked of it next is answered alike.
    other = PlanRunner(Session("s", CODEC, tree=again), CODEC)
    for planned in plan:
        assert other.prepare(planned).prompt_ids.tolist() == player.prepare(planned).prompt_ids.tolist()


def test_readers_in_threads_see_whole_commits_only() -> None:
    plan = PlanGenerator(Random(3)).generate(150)
    session = Session("s", CODEC)
    player = PlanRunner(session, CODEC)
    begun, over = threading.Event(), threading.Event()
    wrong: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        while not over.is_set():
            with session.snapshot() as tree:
                seen.add(len(tree.calls))
                last = max((max(call.outputs) for call in tree.calls), default=0)
                if last != len(tree.nodes) - 1:
                    wrong.append(f"{len(tree.calls)} calls up to node {last} of {len(tree.nodes)}")
                children = [child.id for node in tree.nodes for child in node.all_children()]
                if sorted(children) != list(range(1, len(tree.nodes))):
                    wrong.append(f"{len(children)} children of {len(tree.nodes)} nodes")
                sampled = sum(len(node.sampled_ids) for node in tree.nodes if node.output is not None)  # type: ignore[arg-type]
                if tree.calls and export_samples(tree, PERMISSIVE_POLICY).report.sampled_tokens != sampled:
                    wrong.append(f"{sampled} sampled tokens, and the report has others")
            begun.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    begun.wait()
    player.run(plan)
    over.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert len(seen) > 1


def test_a_commit_waits_for_no_reader() -> None:
    plan = PlanGenerator(Random(1)).generate(4)
    session = Session("s", CODEC)
    player = PlanRunner(session, CODEC)
    player.commit(plan[0])
    with session.snapshot() as tree:
        committing = threading.Thread(target=player.run, args=(plan, range(1, len(plan))))
        committing.start()
        committing.join(10)
        assert not committing.is_alive()
        assert len(tree.calls) == 1
    assert len(session.tree.calls) > 1
