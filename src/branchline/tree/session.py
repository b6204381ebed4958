"""A session: one episode's tree, its codec, and the journal that makes it survive.

    turn = session.prepare(request)
    generation = await engine.generate(turn.prompt_ids, params)
    call = session.commit(turn, generation).call

A failed generation touches nothing. A commit is planned, written to the journal in the order of commits
and applied; `durable` resolves once the record is safe, and a reply must not leave before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.errors import TreeError
from branchline.core.token_arrays import Ids
from branchline.tree.delta import Delivered, TreeRecord, decode_record, encode_record
from branchline.tree.journal import Journal
from branchline.tree.tree import Tree, Turn


@dataclass(frozen=True)
class CommitResult:
    """A call in the tree, and when it is safe."""

    call: Call
    durable: Future[int] | None
    """Resolves once the journal holds the call; None where the session has no journal."""


class Session:
    """One episode of one task by one or more agents.

    `history` and `restore_reasoning` say how the next prompt is built: as the chat template shows the
    conversation or as it was sampled, and whether a client that drops reasoning really drops it.
    """

    def __init__(
        self,
        id: str,
        codec: Codec,
        *,
        history: HistoryPolicy = "template",
        restore_reasoning: bool = True,
        journal: Journal | None = None,
        tree: Tree | None = None,
        started_at: datetime | None = None,
    ) -> None:
        self.id = id
        self.started_at = started_at or datetime.now()
        """What the clock of a template shows throughout; kept with every call, so that a restart keeps it."""
        self.codec = codec.with_clock(self.started_at)
        self.history: HistoryPolicy = history
        self.tree = tree or Tree(restore_reasoning=restore_reasoning)
        self._journal = journal
        if journal is not None and tree is None and next(journal.read(id), None) is not None:
            raise TreeError(f"session {id} is in the journal already: reopen it with Session.reopen")
        # Plan, journal and apply belong together; prepare reads an append-only tree and needs no lock.
        self._commit_lock = threading.Lock()

    @classmethod
    def reopen(
        cls,
        id: str,
        codec: Codec,
        journal: Journal,
        *,
        history: HistoryPolicy = "template",
        restore_reasoning: bool = True,
    ) -> Session:
        """The session as its journal has it; an unknown id is a session with nothing in it yet."""
        tree = Tree(restore_reasoning=restore_reasoning)
        for data in journal.read(id):
            tree.apply(decode_record(data))
        started = datetime.fromtimestamp(tree.calls[0].template_time) if tree.calls else None
        return cls(id, codec, history=history, journal=journal, tree=tree, started_at=started)

    def prepare(self, request: Request) -> Turn:
        return self.tree.prepare(request, self.codec, self.history)

    def prepare_ids(self, request: Request, prompt_ids: Ids) -> Turn:
        """The same for a bare prompt, whose ids are given."""
        return self.tree.prepare_ids(request, prompt_ids, self.codec)

    def commit(self, turn: Turn, *generations: Generation, call_id: str = "") -> CommitResult:
        """Adds the outputs of a turn, one generation for each choice."""
        with self._commit_lock:
            delta = self.tree.plan(turn, generations, call_id, self.codec, self.started_at.timestamp())
            durable = self._append_record(delta)
            return CommitResult(self.tree.apply(delta), durable)

    def record_delivery(self, call: Call, delivery: Delivery = Delivery.DELIVERED) -> Future[int] | None:
        """Records what became of a call's outputs."""
        record = Delivered(call.index, delivery)
        with self._commit_lock:
            # That all went well is a note: without it a call counts as under way, until somebody answers it.
            durable = self._append_record(record, lazy=delivery is Delivery.DELIVERED)
            self.tree.apply(record)
            return durable

    @contextmanager
    def snapshot(self) -> Iterator[Tree]:
        """The tree as it is now, for whoever reads it from another thread; commits go on meanwhile."""
        with self._commit_lock:
            moment = self.tree.snapshot()
        yield moment()

    def _append_record(self, record: TreeRecord, *, lazy: bool = False) -> Future[int] | None:
        if self._journal is None:
            return None
        if self._journal.failure is not None:
            raise self._journal.failure
        durable = self._journal.append(self.id, encode_record(record), lazy=lazy)
        # A refusal comes at once: what the journal will never hold must not be in the tree.
        refused = durable.exception() if durable.done() else None
        if refused is not None:
            raise refused
        return durable
