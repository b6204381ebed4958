"""A soak: sessions are opened, played, exported and finalized for SOAK_S seconds, and 2 % of all connections
misbehave. Memory stays flat, no session is lost, and every answer is in the journal.

`make soak` runs it; it prints a line every minute.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest

from branchline.runtime.managed_session import SessionEnded, SessionOpened, decode_session_record
from branchline.tree.journal import Journal
from branchline.tree.tree import TreeDelta
from tests.faults.conftest import FaultFigures
from tests.faults.misbehaving import KINDS, MisbehavingClients
from tests.faults.recorded_gateway import ADMIN, TIMEOUT_S, RecordedGateway, RecordedSession, check_tree
from tests.gateway.kill_server import ServerSettings

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif("SOAK_S" not in os.environ, reason="takes ten minutes: make soak"),
]

_SOAK_S = float(os.environ.get("SOAK_S", "600"))
_MAX_GROWTH = 0.05
_CLIENTS = 6
_MISBEHAVING_SHARE = 0.02
_TIME_OUT_S = 3.0
"""Short, so that they are hit; longer than a client that does nothing wrong needs on a busy machine."""
_SETTINGS = ServerSettings(
    {
        "header_timeout_s": _TIME_OUT_S,
        "body_timeout_s": _TIME_OUT_S,
        "write_timeout_s": _TIME_OUT_S,
        "connection_idle_s": _TIME_OUT_S,
    }
)
_CALLS_OF_MISBEHAVING = 20
"""Then their session is finalized, and the next ones misbehave in another."""


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class _Soak:
    """What was played. What must be in the journal is in a file: the test itself must not grow."""

    gateway: RecordedGateway
    acknowledged: Path
    sessions: int = 0
    calls: int = 0
    connections: int = 0
    lost: int = 0
    inexact: int = 0
    misbehaved: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    """What the server answered those that misbehaved."""
    rss_mib: list[float] = field(default_factory=list)

    async def play(self, stop: asyncio.Event, rng: Random) -> None:
        """One session after another, by a client that does nothing wrong."""
        while not stop.is_set():
            session = await self.open_session()
            for _ in range(rng.randint(2, 6)):
                assert await self.gateway.ask(session, f"{rng.random()}"), "a call was not answered"
            nodes = (await self.gateway.get(f"/sessions/{session.id}/tree"))["nodes"]
            lost, inexact = check_tree(nodes, session.answers)
            self.lost, self.inexact = self.lost + lost, self.inexact + inexact
            await self.finalize(session)
            samples = f"{self.gateway.url}/sessions/{session.id}/samples?format=tree"
            assert (await self.gateway.http.get(samples, headers=ADMIN)).is_success
            self.sessions += 1
            self.calls += len(session.answers)
            self.connections += len(session.answers) + 4

    async def open_session(self) -> RecordedSession:
        session = await self.gateway.open_session()
        assert session is not None, "no session was opened"
        self.gateway.sessions.remove(session)
        return session

    async def finalize(self, session: RecordedSession) -> None:
        url = f"{self.gateway.url}/sessions/{session.id}/finalize"
        assert (await self.gateway.http.post(url, json={"return": "session"}, headers=ADMIN)).is_success
        with self.acknowledged.open("a") as file:
            file.write(" ".join([session.id, *session.answers]) + "\n")

    async def misbehave(self, stop: asyncio.Event, rng: Random) -> None:
        """Lets 2 % of all connections misbehave, in sessions of their own."""
        running: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            session = await self.open_session()
            key = session.headers["authorization"].removeprefix("Bearer ")
            url = f"{self.gateway.url}/sessions/{session.id}"
            clients = MisbehavingClients(self.gateway.url, url, key, _TIME_OUT_S)
            while not stop.is_set() and clients.counts.total() < _CALLS_OF_MISBEHAVING:
                share = self.misbehaved.total() + clients.counts.total()
                if share < _MISBEHAVING_SHARE * self.connections:
                    running.add(task := asyncio.create_task(clients.misbehave(rng.choice(KINDS))))
                    task.add_done_callback(running.discard)
                await asyncio.sleep(0.01)
            if running:
                await asyncio.wait(set(running))
            self.misbehaved += clients.counts
            self.answered += clients.statuses
            await self.finalize(session)

    async def watch(self, stop: asyncio.Event, started: float) -> None:
        """Notes the gateway's memory, and prints a line every minute."""
        assert self.gateway.process is not None
        printed = started
        while not stop.is_set():
            self.rss_mib.append(resident_mib(self.gateway.process.pid))
            if time.monotonic() - printed >= min(60.0, _SOAK_S / 5):
                printed = time.monotonic()
                print(f"soak {printed - started:.0f} s: {self.describe()}", flush=True)
            await asyncio.sleep(_SOAK_S / 240)

    def describe(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.misbehaved.items()))
        return (
            f"{self.sessions} sessions, {self.calls} calls, {self.connections} connections, "
            f"{self.misbehaved.total()} that misbehaved ({kinds}), {self.lost} lost, {self.inexact} inexact, "
            f"{self.rss_mib[0]:.0f} MiB at the start, {self.rss_mib[-1]:.0f} MiB now"
        )

    def missing_in_journal(self) -> int:
        """How many acknowledged sessions and calls the journal does not have, or not as they ended."""
        recorded: dict[str, set[str]] = {}
        finalized: set[str] = set()
        with Journal(self.gateway.journal) as journal:
            for session_id, data in journal.replay():
                assert isinstance(data, bytes), data
                if session_id.startswith("$"):
                    continue
                record = decode_session_record(data)
                if isinstance(record, SessionOpened):
                    recorded[session_id] = set()
                elif isinstance(record, TreeDelta):
                    recorded[session_id].add(record.call.id)
                elif isinstance(record, SessionEnded) and record.state == "finalized":
                    finalized.add(session_id)
        missing = 0
        for line in self.acknowledged.read_text().splitlines():
            session_id, *calls = line.split()
            missing += session_id not in finalized
            missing += len(set(calls) - recorded.get(session_id, set()))
        return missing


def test_memory_stays_flat_and_no_session_is_lost(tmp_path: Path, fault_figures: FaultFigures) -> None:
    async def test() -> None:
        async with RecordedGateway(tmp_path, _SETTINGS) as gateway:
            await gateway.http.aclose()
            # Each request has a connection of its own.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            gateway.http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits)
            soak, stop, started = _Soak(gateway, tmp_path / "acknowledged"), asyncio.Event(), time.monotonic()
            watching = asyncio.create_task(soak.watch(stop, started))
            clients = [asyncio.create_task(soak.play(stop, Random(seed))) for seed in range(_CLIENTS)]
            clients.append(asyncio.create_task(soak.misbehave(stop, Random(_CLIENTS))))
            # It ends early if a client finds a fault.
            await asyncio.wait(clients, timeout=_SOAK_S, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await asyncio.gather(watching, *clients)
            await gateway.kill()
            missing = await asyncio.to_thread(soak.missing_in_journal)
            # In the first half, caches fill up and the number of closed sessions in memory reaches its limit.
            figures = soak.rss_mib
            middle = sorted(figures[len(figures) // 2 : len(figures) * 3 // 4])
            end = sorted(figures[len(figures) * 3 // 4 :])
            before, after = middle[len(middle) // 2], end[len(end) // 2]
            note = (
                f"{_SOAK_S:g} s, {soak.describe()}, {before:.0f} MiB half-way, {after:.0f} MiB at the end; "
            )
            note += f"{gateway.broken} broken, {missing} missing in the journal; answered: {soak.answered}"
            print(f"soak: {note}", flush=True)
            fault_figures.add("soak", lost=soak.lost + missing, inexact=soak.inexact, note=note)
            assert (soak.lost, soak.inexact, missing, gateway.broken) == (0, 0, 0, 0)
            assert not [status for status in soak.answered if status.endswith(" nothing")]
            assert set(soak.misbehaved) == set(KINDS)
            assert after < before * (1 + _MAX_GROWTH)

    asyncio.run(asyncio.wait_for(test(), _SOAK_S + 600))
