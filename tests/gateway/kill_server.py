"""A gateway process that kills itself with SIGKILL at a named point, for the test that restarts it.

    BRANCHLINE_KILL=journaled:7 python -m tests.gateway.kill_server FOLDER PORT ADMIN_KEY

prints `ready` once it listens and kills itself the seventh time a call reaches that point. FOLDER keeps the
journal, the phase counts of the calls in flight, and the ids of the calls at the kill point. The engine's
replies depend only on the prompt, except for a mark that distinguishes several replies to one prompt: so
every answer in a tree can be checked against the ids before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from branchline.chat.toy import ToyCodec
from branchline.chat.vision import ImageSpan
from branchline.core.call import Delivery
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
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
SETTINGS_VARIABLE = "BRANCHLINE_TEST_SETTINGS"
"""`ServerSettings` as JSON."""
READY = b"ready\n"


class KillPoint(StrEnum):
    """The points at which a process can kill itself."""

    REPLAY = "replay"
    """While the journal is replayed."""
    STREAMING = "streaming"
    """Part of a stream was sent."""
    ENGINE_END = "engine_end"
    """The engine has finished; the call is not in the tree."""
    COMMITTED = "committed"
    """The call is in the tree and queued for the journal."""
    QUEUED = "queued"
    """The journal's writer has the call and has written nothing."""
    TRANSACTION = "transaction"
    """The call is written in an open transaction."""
    JOURNALED = "journaled"
    """The call is in the journal; its final event was not sent."""
    FINISHED = "finished"
    """The finish reason of a stream was sent, its [DONE] was not."""
    DELIVERED = "delivered"
    """The answer was sent; the journal does not have the delivery."""


BEFORE_JOURNAL = (KillPoint.STREAMING, KillPoint.ENGINE_END, KillPoint.QUEUED, KillPoint.TRANSACTION)
"""A call killed here is not in the journal."""
AFTER_JOURNAL = (KillPoint.JOURNALED, KillPoint.FINISHED, KillPoint.DELIVERED)
"""A call killed here is in the journal; at the other points it may be."""


class ServerSettings(msgspec.Struct, frozen=True):
    """What a test changes about the server."""

    limits: dict[str, float] = {}
    """Fields of its GatewayConfig."""
    event_loop: Literal["asyncio", "uvloop"] = "asyncio"
    busy_s: float = 0.0
    """The event loop is blocked for up to this time, again and again."""


class Phase(IntEnum):
    """The phase of a call in flight."""

    SAMPLING = 0
    COMMITTING = 1
    JOURNALED = 2


# -- replies -----------------------------------------------------------------------------------------


def reply_to(prompt_ids: Ids, mark: str = "") -> Message:
    """The reply to a prompt; half of the replies have a mark, so that a second reply differs."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes()).hexdigest()
    text = digest[: 20 + 4 * int(digest[0], 16)] + (f" #{mark}" if is_marked(digest) else "")
    return Message("assistant", text, reasoning_content=digest[-12:] if digest[2] in "0123" else "")


def is_marked(digest: str) -> bool:
    return int(digest[1], 16) % 2 == 1


def is_reply(prompt_ids: Ids, ids: Ids) -> bool:
    """Whether `ids` are a reply to the prompt."""
    mark = CODEC.parse(ids).content.partition(" #")[2]
    return CODEC.encode_reply(reply_to(prompt_ids, mark)).tolist() == ids.tolist()


# -- kill points -------------------------------------------------------------------------------------


class PhaseCounts:
    """Calls in flight by phase, in a memory-mapped file: the kernel keeps it when the process dies."""

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
    return np.fromfile(folder / "phase_counts", np.int64).tolist()


def read_killed_calls(folder: Path) -> list[str]:
    """The calls at the kill point when the process killed itself."""
    file = folder / "killed_calls"
    return file.read_text().split() if file.exists() else []


class Failpoint:
    """Kills the process when a kill point was reached as often as the countdown says."""

    def __init__(self, spec: str, killed_calls: Path) -> None:
        point, _, countdown = spec.partition(":")
        self._point = KillPoint(point) if point else None
        self._countdown = int(countdown or 0)
        self._killed_calls = killed_calls
        killed_calls.unlink(missing_ok=True)

    def reach(self, point: KillPoint, *calls: str, is_last: bool = False) -> None:
        if point == self._point:
            self._countdown -= 1
            if self._countdown <= 0 or is_last:
                self._killed_calls.write_text("\n".join(calls))
                os.kill(os.getpid(), signal.SIGKILL)


class Engine(ScriptedEngine):
    """The scripted engine, with its calls counted by phase."""

    def __init__(self, phase_counts: PhaseCounts) -> None:
        super().__init__(
            CODEC, lambda request: reply_to(request.prompt_ids, secrets.token_hex(3)), chunk_size=9
        )
        self._phase_counts = phase_counts

    @staticmethod
    def _reply(request: ScriptedRequest) -> Message:
        return reply_to(request.prompt_ids, secrets.token_hex(3))

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        self.received_prompts.clear()  # the scripted engine keeps both for tests
        self.received_images.clear()
        with self._phase_counts.count_during(Phase.SAMPLING):
            async for chunk in super().generate(prompt_ids, params, session=session, images=images):
                yield chunk


class _Connection:
    """The journal's connection, with kill points before calls are written and before they are committed."""

    def __init__(self, db: Any, failpoint: Failpoint) -> None:
        self._db = db
        self._failpoint = failpoint
        self._uncommitted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *values: Any) -> Any:
        is_insert = statement.startswith("INSERT INTO records")  # one statement, one transaction
        if is_insert:
            self._begin_writing(values[0][2::4])
        if (is_insert or statement == "COMMIT") and self._uncommitted:
            self._failpoint.reach(KillPoint.TRANSACTION, *self._uncommitted)
        return self._db.execute(statement, *values)

    def executemany(self, statement: str, rows: Any) -> Any:
        self._begin_writing([record for _, _, record, _ in rows])
        return self._db.executemany(statement, rows)

    def _begin_writing(self, records: Any) -> None:
        decoded = [msgspec.msgpack.decode(record) for record in records]
        self._uncommitted = [record[2][1] for record in decoded if record[0] == "commit"]
        if self._uncommitted:
            self._failpoint.reach(KillPoint.QUEUED, *self._uncommitted)


def _install(failpoint: Failpoint, phase_counts: PhaseCounts) -> None:
    """Installs the kill points."""
    commit_and_wait, commit, deliver = call_lifecycle.commit_call, Session.commit, Session.record_delivery
    encode_delta, encode_end, send = (
        chat.ChatStream.encode_delta,
        chat.ChatStream.encode_end,
        AsgiRequest.send_chunk,
    )
    ending: ContextVar[str] = ContextVar("ending")
    open_file, replay = Journal.__init__, Journal.replay

    async def commit_and_journal(managed: Any, turn: Any, generations: Any, record: Any) -> Any:
        with phase_counts.count_during(Phase.COMMITTING):
            failpoint.reach(KillPoint.ENGINE_END, record.call_id)
            call = await commit_and_wait(managed, turn, generations, record)
        phase_counts.add(Phase.JOURNALED, 1)
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
            phase_counts.add(Phase.JOURNALED, -1)
        return deliver(session, call, delivery)

    def delta(stream: Any, event: Any) -> Any:
        failpoint.reach(KillPoint.STREAMING, stream.call_id)
        return encode_delta(stream, event)

    def end(stream: Any, event: Any) -> Any:
        ending.set(stream.call_id)
        return encode_end(stream, event)

    async def send_bytes(http: Any, data: bytes, *, last: bool = False) -> None:
        await send(http, data, last=last)
        if last:
            failpoint.reach(KillPoint.FINISHED, ending.get())

    def open_journal(own: Any, *args: Any, **options: Any) -> None:
        open_file(own, *args, **options)
        own._db = _Connection(own._db, failpoint)

    def replay_all(own: Any) -> Any:
        for record in replay(own):
            failpoint.reach(KillPoint.REPLAY)
            yield record
        failpoint.reach(KillPoint.REPLAY, is_last=True)

    call_lifecycle.commit_call = commit_and_journal
    AsgiRequest.send_chunk = send_bytes  # type: ignore[assignment, method-assign]
    Session.commit, Session.record_delivery = commit_call, deliver_call  # type: ignore[assignment, method-assign]
    chat.ChatStream.encode_delta, chat.ChatStream.encode_end = delta, end  # type: ignore[assignment, method-assign]
    Journal.__init__ = open_journal  # type: ignore[assignment, method-assign]
    Journal.replay = replay_all  # type: ignore[assignment, method-assign]
    journal._CHECKPOINT_BYTES = 256 * 1024  # often enough that kills meet the checkpoint too


async def be_busy(busy_s: float) -> None:
    """Blocks the event loop again and again."""
    while True:
        time.sleep(random.uniform(0, busy_s))
        await asyncio.sleep(random.uniform(0, busy_s))


async def serve(folder: Path, port: int, admin_key: str, settings: ServerSettings) -> None:
    phase_counts = PhaseCounts(folder / "phase_counts")
    _install(Failpoint(os.environ.get(KILL_VARIABLE, ""), folder / "killed_calls"), phase_counts)
    limits: dict[str, Any] = settings.limits
    gateway = Gateway(
        engine=Engine(phase_counts),
        codec=CODEC,
        journal=folder / "journal",
        durability="process",
        port=port,
        config=GatewayConfig(admin_key=admin_key, **limits),
    )
    async with gateway:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        busy = asyncio.create_task(be_busy(settings.busy_s)) if settings.busy_s else None
        await gateway.serve_until(asyncio.Event())
        del busy


def main(folder: str, port: str, admin_key: str) -> None:
    settings = msgspec.json.decode(os.environ.get(SETTINGS_VARIABLE, "{}"), type=ServerSettings)
    factory: Any = None
    if settings.event_loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(Path(folder), int(port), admin_key, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
