"""A session with a journal: what was committed comes back, and a failed journal stops it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from random import Random

import pytest

import branchline.tree.journal as journal_module
from branchline import (
    Delivery,
    Generation,
    Journal,
    JournalError,
    Message,
    Request,
    Session,
    ToyCodec,
    TreeError,
    timelines_of,
)
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator

CODEC = ToyCodec.chatml()
NOON = datetime(2026, 3, 1, 12)


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


def test_a_commit_is_durable_when_its_future_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        session = Session("s", CODEC, journal=journal)
        turn = session.prepare(Request((Message("user", "p"),)))
        committed = session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "A"))))
        assert committed.durable is not None
        committed.durable.result(timeout=10)
        assert len(list(journal.read("s"))) == 1
        delivered = session.record_delivery(committed.call, Delivery.DELIVERED)
        assert delivered is not None
        delivered.result(timeout=10)
        assert len(list(journal.read("s"))) == 2


def test_a_session_whose_journal_failed_takes_no_commit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    session = Session("s", CODEC, journal=journal)
    turn = session.prepare(Request((Message("user", "p"),)))
    journal._failure = JournalError("disk full")
    with pytest.raises(JournalError):
        session.commit(turn, Generation(CODEC.encode_reply(Message("assistant", "A"))))
    assert not session.tree.calls
    journal.close()


def test_a_record_the_journal_refuses_changes_nothing(
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
