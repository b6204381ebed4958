"""A full disk and a damaged journal cost no acknowledged answer, and no restart."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from branchline.tree.journal import Journal
from branchline.tree.journal_repair import check_journal, repair_journal
from tests.faults.conftest import FaultFigures
from tests.faults.recorded_gateway import RecordedGateway

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the file size of another process")

_ROUNDS = 8
_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_a_disk_that_is_full_and_has_space_again(tmp_path: Path, fault_figures: FaultFigures) -> None:
    """The limit of the process's file size stands for the disk: a write beyond it fails partway."""

    async def test() -> None:
        rng = Random(1)
        async with RecordedGateway(tmp_path) as gateway:
            assert gateway.process is not None
            stop = asyncio.Event()
            load = [asyncio.create_task(gateway.run_load(stop, Random(seed))) for seed in range(6)]
            longest_s = 0.0
            for _ in range(_ROUNDS):
                await asyncio.sleep(0.5)
                before, wal = gateway.refused, Path(f"{gateway.journal}-wal")
                size = max(wal.stat().st_size, gateway.journal.stat().st_size) + rng.randrange(30_000)
                limit = (size, resource.RLIM_INFINITY)
                resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, limit)
                await asyncio.sleep(1.0)
                full = gateway.refused
                assert full > before, "the disk was never full"
                resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, _UNLIMITED)
                start = time.monotonic()
                session = None
                while session is None or not await gateway.ask(session, "is there space again?"):
                    session = session or await gateway.open_session()
                    assert time.monotonic() - start < 10
                    await asyncio.sleep(0.02)
                longest_s = max(longest_s, time.monotonic() - start)
            stop.set()
            await asyncio.gather(*load)
            live = await gateway.check()
            await gateway.kill()
            assert check_journal(gateway.journal).damages == ()
            await gateway.start()
            restarted = await gateway.check()
            answers = sum(len(session.answers) for session in gateway.sessions)
            fault_figures.add(
                "disk full and back",
                lost=live[0] + restarted[0],
                inexact=live[1] + restarted[1],
                note=f"{_ROUNDS} times, {answers} answers, {gateway.refused} refused with 503, "
                f"service back after at most {longest_s:.1f} s",
            )
            assert live == restarted == (0, 0)

    asyncio.run(asyncio.wait_for(test(), 300))


def test_a_damaged_journal(tmp_path: Path, fault_figures: FaultFigures) -> None:
    async def test() -> None:
        rng = Random(2)
        quarantined: frozenset[str] = frozenset()
        async with RecordedGateway(tmp_path) as gateway:
            for _ in range(_ROUNDS):
                stop = asyncio.Event()
                load = [asyncio.create_task(gateway.run_load(stop, Random(rng.random()))) for _ in range(4)]
                await asyncio.sleep(0.6)
                await gateway.kill()
                stop.set()
                await asyncio.gather(*load)
                with Journal(gateway.journal):
                    pass  # moves the WAL into the main file
                quarantined |= damage_records(gateway.journal, rng, 2)
                await gateway.start()
                lost, inexact = await gateway.check(without=quarantined)
                assert (lost, inexact) == (0, 0)
                for session_id in quarantined:
                    refused = await gateway.http.get(
                        f"{gateway.url}/sessions/{session_id}/tree",
                        headers={"authorization": "Bearer ak-fault-test"},
                    )
                    assert refused.status_code in (404, 409), refused.text
            await gateway.kill()
            with Journal(gateway.journal):
                pass
            repaired = repair_journal(gateway.journal)
            await gateway.start()
            kept = 0
            for session in gateway.sessions:
                response = await gateway.http.get(
                    f"{gateway.url}/sessions/{session.id}/tree",
                    headers={"authorization": "Bearer ak-fault-test"},
                )
                kept += response.status_code == 200
            lost, inexact = await gateway.check(without=quarantined)
            fault_figures.add(
                "damaged journals",
                lost=lost,
                inexact=inexact,
                note=f"{len(quarantined)} sessions quarantined, {len(gateway.sessions)} played, "
                f"{kept} readable after the repair, {sum(repaired.dropped.values())} records dropped",
            )
            assert (lost, inexact) == (0, 0)

    asyncio.run(asyncio.wait_for(test(), 300))


def damage_records(journal: Path, rng: Random, count: int) -> frozenset[str]:
    """Changes a byte of some records of sessions; returns the sessions."""
    damaged: set[str] = set()
    with closing(sqlite3.connect(journal)) as disk:
        rows = disk.execute(
            "SELECT seq, name, record FROM records JOIN sessions ON id = session WHERE name NOT LIKE '$%'"
        ).fetchall()
        for seq, name, record in rng.sample(rows, count):
            position = rng.randrange(len(record))
            changed = (
                record[:position] + bytes([record[position] ^ 1 << rng.randrange(8)]) + record[position + 1 :]
            )
            disk.execute("UPDATE records SET record = ? WHERE seq = ?", (changed, seq))
            damaged.add(name)
        disk.commit()
    return frozenset(damaged)
