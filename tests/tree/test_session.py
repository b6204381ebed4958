"""A session: commits survive in the journal, a failed journal stops commits, snapshots do not change."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

import branchline.tree.journal as journal_module
from branchline import Generation, Journal, Message, Request, Session, ToyCodec, Tree, timelines_of
from branchline.core.call import Delivery
from branchline.core.errors import JournalError, TreeError
from branchline.export.jsonl import report_to_json, sample_to_json
from branchline.export.samples import ExportPolicy, export_samples
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator
from tests.hang import HANG_S

CODEC = ToyCodec.chatml()
NOON = datetime(2026, 3, 1, 12)
PERMISSIVE_POLICY = ExportPolicy(include_missing_logprobs=True)


def test_a_reopened_session_continues_token_exact(tmp_path: Path) -> None:
    plan = PlanGenerator(Random(5)).generate(10)
    half = len(plan) // 2
    straight = PlanRunner(Session("s", CODEC, started_at=NOON), CODEC)
    straight.run(plan)
    with Journal(tmp_path / "j") as journal:
        before = PlanRunner(Session("s", CODEC, journal=journal, started_at=NOON), CODEC)
        for planned in plan[:half]:
            before.commit(planned)
        journal.flush()
    with Journal(tmp_path / "j") as journal:
        after = PlanRunner(Session.reopen("s", CODEC, journal), CODEC)
        for planned in plan[half:]:
            after.commit(planned)
    tree, expected = after.session.tree, straight.session.tree
    assert [line.ids.tolist() for line in timelines_of(tree)] == [
        line.ids.tolist() for line in timelines_of(expected)
    ]
    assert tree.calls == expected.calls
    assert [tree.delivery(call) for call in tree.calls] == [
        expected.delivery(call) for call in expected.calls
    ]


def test_reopening_an_unknown_session_gives_an_empty_tree(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        assert not Session.reopen("new", CODEC, journal).tree.calls


def test_a_commit_is_durable_when_its_future_resolves(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        session = Session("s", CODEC, journal=journal)
        turn = session.prepare(Request((Message("user", "p"),)))
        committed = session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "A"))))
        assert committed.durable is not None
        committed.durable.result(timeout=HANG_S)
        assert len(list(journal.read("s"))) == 1
        delivered = session.record_delivery(committed.call, Delivery.DELIVERED)
        assert delivered is not None
        delivered.result(timeout=HANG_S)
        assert len(list(journal.read("s"))) == 2


def test_a_session_with_a_failed_journal_rejects_commits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    session = Session("s", CODEC, journal=journal)
    turn = session.prepare(Request((Message("user", "p"),)))
    journal.failure = JournalError("disk full")
    with pytest.raises(JournalError):
        session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "A"))))
    assert not session.tree.calls
    journal.close()


def test_a_record_that_the_journal_rejects_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "j") as journal:
        session = Session("s", CODEC, journal=journal)
        turn = session.prepare(Request((Message("user", "p" * 1000),)))
        answer = Generation(CODEC.encode_reply(Message("assistant", "A")))
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "_MAX_RECORD_BYTES", 400)
            with pytest.raises(JournalError):
                session.commit(turn, answer)
        assert not session.tree.calls
        session.commit(turn, answer)
        journal.flush()
        assert len(Session.reopen("s", CODEC, journal).tree.calls) == 1


def test_a_session_that_is_in_the_journal_must_be_reopened(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        session = Session("s", CODEC, journal=journal)
        session.commit(
            session.prepare(Request((Message("user", "p"),))),
            Generation(CODEC.encode_reply(Message("assistant", "A"))),
        )
        journal.flush()
        with pytest.raises(TreeError, match="reopen"):
            Session("s", CODEC, journal=journal)


# -- snapshots -----------------------------------------------------------------------------------------


def tree_contents(tree: Tree) -> dict[str, Any]:
    """Everything that a reader can get from a tree."""
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
    runner = PlanRunner(Session("s", CODEC), CODEC)
    tree = runner.session.tree
    snapshots: list[tuple[Tree, dict[str, Any]]] = []
    for planned in plan:
        runner.commit(planned)
        snapshots.append((runner.session.snapshot(), tree_contents(tree)))
    for snapshot, expected in snapshots:
        assert tree_contents(snapshot) == expected
    last = snapshots[-1][0]
    assert not {id(node) for node in last.nodes} & {id(node) for node in tree.nodes}
    # A snapshot prepares the same prompts as the original.
    other = PlanRunner(Session("s", CODEC, tree=last), CODEC)
    for planned in plan:
        assert other.prepare(planned).prompt_ids.tolist() == runner.prepare(planned).prompt_ids.tolist()


def test_concurrent_readers_see_complete_commits_only() -> None:
    plan = PlanGenerator(Random(3)).generate(150)
    session = Session("s", CODEC)
    runner = PlanRunner(session, CODEC)
    started, finished = threading.Event(), threading.Event()
    problems: list[str] = []
    call_counts: set[int] = set()

    def read() -> None:
        while not finished.is_set():
            tree = session.snapshot()
            call_counts.add(len(tree.calls))
            last = max((max(call.outputs) for call in tree.calls), default=0)
            if last != len(tree.nodes) - 1:
                problems.append(f"{len(tree.calls)} calls up to node {last} of {len(tree.nodes)}")
            children = [child.id for node in tree.nodes for child in node.all_children()]
            if sorted(children) != list(range(1, len(tree.nodes))):
                problems.append(f"{len(children)} children of {len(tree.nodes)} nodes")
            sampled = sum(len(node.sampled_ids) for node in tree.nodes if node.output is not None)  # type: ignore[arg-type, misc]
            if tree.calls and export_samples(tree, PERMISSIVE_POLICY).report.sampled_tokens != sampled:
                problems.append(f"{sampled} sampled tokens, and the report has others")
            started.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    started.wait()
    runner.run(plan)
    finished.set()
    for reader in readers:
        reader.join()
    assert problems == []
    assert len(call_counts) > 1
