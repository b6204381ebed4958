"""A session: the tree of one episode, its codec and its journal.

    turn = session.prepare(request)
    generation = await engine.generate(turn.prompt_ids, params)
    call = session.commit(turn, generation).call

A failed generation changes nothing. A commit is planned, written to the journal in commit order and applied;
`durable` resolves once the record is durable, and a reply must not be sent before that.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
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
    """A committed call and its durability."""

    call: Call
    durable: Future[int] | None
    """Resolves once the call is in the journal; None if the session has no journal."""


class Session:
    """One episode of one task by one or more agents.

    `history` decides whether the next prompt is built as the chat template renders the conversation or as it
    was sampled. `restore_reasoning` decides whether reasoning that a client drops is restored.
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
        """The time that templates show during the whole session; stored with every call for restarts."""
        self.codec = codec.with_clock(self.started_at)
        self.history: HistoryPolicy = history
        self.tree = tree or Tree(restore_reasoning=restore_reasoning)
        self._journal = journal
        if journal is not None and tree is None and next(journal.read(id), None) is not None:
            raise TreeError(f"session {id} is in the journal already: reopen it with Session.reopen")
        # Makes plan, journal and apply atomic; prepare only reads an append-only tree and needs no lock.
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
        """Restores a session from its journal; an unknown id gives an empty session."""
        tree = Tree(restore_reasoning=restore_reasoning)
        for data in journal.read(id):
            tree.apply(decode_record(data))
        started = datetime.fromtimestamp(tree.calls[0].template_time) if tree.calls else None
        return cls(id, codec, history=history, journal=journal, tree=tree, started_at=started)

    def prepare(self, request: Request) -> Turn:
        return self.tree.prepare(request, self.codec, self.history)

    def prepare_ids(self, request: Request, prompt_ids: Ids) -> Turn:
        """Prepares a raw prompt from its ids."""
        return self.tree.prepare_ids(request, prompt_ids, self.codec)

    def commit(self, turn: Turn, *generations: Generation, call_id: str = "") -> CommitResult:
        """Adds the outputs of a turn, one generation per choice."""
        with self._commit_lock:
            delta = self.tree.plan(turn, generations, call_id, self.codec, self.started_at.timestamp())
            durable = self._append_record(delta)
            return CommitResult(self.tree.apply(delta), durable)

    def record_delivery(self, call: Call, delivery: Delivery = Delivery.DELIVERED) -> Future[int] | None:
        """Records the delivery of a call's outputs."""
        record = Delivered(call.index, delivery)
        with self._commit_lock:
            # Lazy: if a successful delivery is lost in a crash, the call is pending until a call continues
            # it.
            durable = self._append_record(record, lazy=delivery is Delivery.DELIVERED)
            self.tree.apply(record)
            return durable

    def snapshot(self) -> Tree:
        """Returns a copy of the current tree, to be read while other threads commit."""
        return self.tree.copy(self._commit_lock)

    def _append_record(self, record: TreeRecord, *, lazy: bool = False) -> Future[int] | None:
        if self._journal is None:
            return None
        if self._journal.failure is not None:
            raise self._journal.failure
        durable = self._journal.append(self.id, encode_record(record), lazy=lazy)
        # A rejection is immediate: a record that the journal will never hold must not enter the tree.
        rejection = durable.exception() if durable.done() else None
        if rejection is not None:
            raise rejection
        return durable
