"""A gateway process that dies by kill -9 at a named place, for the test that restarts it.

    BRANCHLINE_KILL=journaled:7 python -m tests.gateway.kill_server FOLDER PORT ADMIN_KEY

prints `ready` once it listens and kills itself the seventh time a call comes to that place. What outlives it
lies in FOLDER: the journal, the board, which says how far the calls in flight were, and the ids of the calls
that were at the place. What the engine says follows from the prompt alone, but for a mark that tells one
answer to a prompt from another: so every answer in a tree can be checked against the ids before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.chat.toy import ToyCodec
from branchline.core.call import Delivery
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.asgi import AsgiRequest
from branchline.gateway.config import GatewayConfig
from branchline.gateway.protocols import chat
from branchline.gateway.server import Gateway
from branchline.runtime import call_lifecycle
from branchline.tree import journal
from branchline.tree.journal import Journal
from branchline.tree.session import Session

CODEC = ToyCodec.chatml()
KILL_VARIABLE = "BRANCHLINE_KILL"
READY = b"ready\n"


class KillPoint(StrEnum):
    """Where a process can be made to kill itself."""

    REPLAY = "replay"
    """While it reads its journal again."""
    STREAMING = "streaming"
    """Some of a stream has left."""
    ENGINE_END = "engine_end"
    """The engine is done, the call is not in the tree."""
    COMMITTED = "committed"
    """The call is in the tree, the journal has been asked to write it."""
    QUEUED = "queued"
    """Whoever writes the journal has taken the call up and written nothing."""
    TRANSACTION = "transaction"
    """The call is written, and the transaction that writes it is open."""
    JOURNALED = "journaled"
    """The call is in the journal, nothing of its end has left."""
    FINISHED = "finished"
    """The finish of a stream has left, its [DONE] has not."""
    DELIVERED = "delivered"
    """The answer is handed over, the journal does not know."""


BEFORE_JOURNAL = (KillPoint.STREAMING, KillPoint.ENGINE_END, KillPoint.QUEUED, KillPoint.TRANSACTION)
"""A call killed here is in no journal."""
AFTER_JOURNAL = (KillPoint.JOURNALED, KillPoint.FINISHED, KillPoint.DELIVERED)
"""A call killed here is in the journal; of the other places nobody can say."""


class Phase(IntEnum):
    """How far a call in flight is."""

    SAMPLING = 0
    COMMITTING = 1
    JOURNALED = 2


# -- what the engine says ----------------------------------------------------------------------------


def reply_to(prompt_ids: Ids, mark: str = "") -> Message:
    """The one thing to say behind these ids; every second has a mark, so that asking again shows."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes()).hexdigest()
    text = digest[: 20 + 4 * int(digest[0], 16)] + (f" #{mark}" if is_marked(digest) else "")
    return Message("assistant", text, reasoning_content=digest[-12:] if digest[2] in "0123" else "")


def is_marked(digest: str) -> bool:
    return int(digest[1], 16) % 2 == 1


def is_reply(prompt_ids: Ids, ids: Ids) -> bool:
    """Whether these ids are what the engine says behind those."""
    mark = CODEC.parse(ids).content.partition(" #")[2]
    return CODEC.encode_reply(reply_to(prompt_ids, mark)).tolist() == ids.tolist()


# -- where it dies -----------------------------------------------------------------------------------


class PhaseCounts:
    """Calls in flight by phase, in a shared map of a file: the kernel keeps it when the process dies."""

    def __init__(self, file: Path) -> None:
        self._counts = np.memmap(file, np.int64, "w+", shape=(len(Phase),))

    @contextmanager
    def count_during(self, phase: Phase) -> Iterator[None]:
        self._counts[phase] += 1
        try:
            yield
        finally:
            self._counts[phase] -= 1

    def add(self, phase: Phase, count: int) -> None:
        self._counts[phase] += count


def read_phase_counts(folder: Path) -> list[int]:
    """How many calls were in each phase when the process died."""
    return np.fromfile(folder / "board", np.int64).tolist()


def read_killed_calls(folder: Path) -> list[str]:
    """The calls that were at the place where the process killed itself."""
    file = folder / "dead"
    return file.read_text().split() if file.exists() else []


class Failpoint:
    """Kills the process when calls have come to a place as often as a countdown says."""

    def __init__(self, spec: str, dead: Path) -> None:
        place, _, countdown = spec.partition(":")
        self._place = KillPoint(place) if place else None
        self._left = int(countdown or 0)
        self._dead = dead
        dead.unlink(missing_ok=True)

    def reach(self, place: KillPoint, *calls: str, at_last: bool = False) -> None:
        if place == self._place:
            self._left -= 1
            if self._left <= 0 or at_last:
                self._dead.write_text("\n".join(calls))
                os.kill(os.getpid(), signal.SIGKILL)


class Engine(ScriptedEngine):
    """The scripted engine, seen on the board."""

    def __init__(self, board: PhaseCounts) -> None:
        super().__init__(CODEC, lambda ask: reply_to(ask.prompt_ids, secrets.token_hex(3)), chunk_size=9)
        self._board = board

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncIterator[Chunk]:
        with self._board.count_during(Phase.SAMPLING):
            async for chunk in super().generate(prompt_ids, params, session=session):
                yield chunk


class _Connection:
    """The journal's connection, the moment before it commits within reach."""

    def __init__(self, db: Any, failpoint: Failpoint, calls: list[str]) -> None:
        self._db = db
        self._failpoint = failpoint
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "COMMIT" or statement.startswith("INSERT INTO records ("):
            self._failpoint.reach(KillPoint.TRANSACTION, *self._calls)
        return self._db.execute(statement, *values)


def _install(failpoint: Failpoint, board: PhaseCounts) -> None:
    """Puts the failpoint at its places."""
    commit_and_wait, commit, deliver = call_lifecycle.commit_call, Session.commit, Session.record_delivery
    said, end, send = chat.ChatStream.encode_delta, chat.ChatStream.encode_end, AsgiRequest.send_chunk
    ending: ContextVar[str] = ContextVar("ending")
    replay = Journal.replay

    async def commit_and_journal(live: Any, turn: Any, generations: Any, record: Any) -> Any:
        with board.count_during(Phase.COMMITTING):
            failpoint.reach(KillPoint.ENGINE_END, record.call_id)
            call = await commit_and_wait(live, turn, generations, record)
        board.add(Phase.JOURNALED, 1)
        failpoint.reach(KillPoint.JOURNALED, record.call_id)
        return call

    def commit_call(session: Any, *args: Any, **options: Any) -> Any:
        committed = commit(session, *args, **options)
        failpoint.reach(KillPoint.COMMITTED, committed.call.id)
        return committed

    def deliver_call(session: Any, call: Any, delivery: Delivery = Delivery.DELIVERED) -> Any:
        if delivery == Delivery.DELIVERED:
            failpoint.reach(KillPoint.DELIVERED, call.id)
        if delivery != Delivery.CANCELLED:
            board.add(Phase.JOURNALED, -1)
        return deliver(session, call, delivery)

    def say(stream: Any, event: Any) -> Any:
        failpoint.reach(KillPoint.STREAMING, stream.call_id)
        return said(stream, event)

    def say_end(stream: Any, event: Any) -> Any:
        ending.set(stream.call_id)
        return end(stream, event)

    async def send_bytes(exchange: Any, data: bytes, *, last: bool = False) -> None:
        await send(exchange, data, last=last)
        if last:
            failpoint.reach(KillPoint.FINISHED, ending.get())

    def at_failpoints(write: Any) -> Any:
        def write_batch(own: Any, batch: Any) -> Any:
            records = [msgspec.msgpack.decode(record) for _, record, _ in batch]
            written = [record[2][1] for record in records if record[0] == "commit"]
            if not written:
                return write(own, batch)
            failpoint.reach(KillPoint.QUEUED, *written)
            db = own._db
            own._db = _Connection(db, failpoint, written)
            try:
                return write(own, batch)
            finally:
                own._db = db

        return write_batch

    def replay_all(own: Any) -> Any:
        for record in replay(own):
            failpoint.reach(KillPoint.REPLAY)
            yield record
        failpoint.reach(KillPoint.REPLAY, at_last=True)

    call_lifecycle.commit_call = commit_and_journal
    AsgiRequest.send_chunk = send_bytes  # type: ignore[method-assign]
    Session.commit, Session.record_delivery = commit_call, deliver_call  # type: ignore[method-assign]
    chat.ChatStream.encode_delta, chat.ChatStream.encode_end = say, say_end  # type: ignore[method-assign]
    Journal._commit = at_failpoints(Journal._commit)  # type: ignore[method-assign]
    Journal._insert = at_failpoints(Journal._insert)  # type: ignore[method-assign]
    Journal.replay = replay_all  # type: ignore[method-assign]
    journal._CHECKPOINT_BYTES = 256 * 1024  # often enough that kills meet the checkpoint too


async def serve(folder: Path, port: int, admin_key: str) -> None:
    board = PhaseCounts(folder / "board")
    _install(Failpoint(os.environ.get(KILL_VARIABLE, ""), folder / "dead"), board)
    gateway = Gateway(
        engine=Engine(board),
        codec=CODEC,
        journal=folder / "journal",
        durability="process",
        port=port,
        config=GatewayConfig(admin_key=admin_key),
    )
    async with gateway:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
