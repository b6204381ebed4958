"""A soak: sessions are opened, played, exported and finalized for SOAK_S seconds, and memory stays flat.

`make soak` runs it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.faults.conftest import FaultFigures
from tests.faults.recorded_gateway import ADMIN, RecordedGateway

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif("SOAK_S" not in os.environ, reason="takes ten minutes: make soak"),
]

_SOAK_S = float(os.environ.get("SOAK_S", "600"))
_MAX_GROWTH = 0.05
_CLIENTS = 6


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_memory_stays_flat(tmp_path: Path, fault_figures: FaultFigures) -> None:
    async def test() -> None:
        async with RecordedGateway(tmp_path) as gateway:
            assert gateway.process is not None
            stop = asyncio.Event()
            clients = [asyncio.create_task(_play(gateway, stop, Random(seed))) for seed in range(_CLIENTS)]
            start, figures = time.monotonic(), list[float]()
            while time.monotonic() - start < _SOAK_S:
                await asyncio.sleep(_SOAK_S / 60)
                figures.append(resident_mib(gateway.process.pid))
            stop.set()
            played = sum(await asyncio.gather(*clients))
            # In the first half, caches fill up and the number of closed sessions in memory reaches its limit.
            middle = sorted(figures[len(figures) // 2 : len(figures) * 3 // 4])
            end = sorted(figures[len(figures) * 3 // 4 :])
            before, after = middle[len(middle) // 2], end[len(end) // 2]
            fault_figures.add(
                "soak", note=f"{_SOAK_S:g} s, {played} sessions, {before:.0f} MiB, at the end {after:.0f} MiB"
            )
            assert after < before * (1 + _MAX_GROWTH)

    asyncio.run(asyncio.wait_for(test(), _SOAK_S + 120))


async def _play(gateway: RecordedGateway, stop: asyncio.Event, rng: Random) -> int:
    played = 0
    while not stop.is_set():
        session = await gateway.open_session()
        assert session is not None
        gateway.sessions.remove(session)  # not checked: the test itself must not grow
        for _ in range(rng.randint(2, 6)):
            assert await gateway.ask(session, f"{rng.random()}")
        url = f"{gateway.url}/sessions/{session.id}"
        assert (
            await gateway.http.post(f"{url}/finalize", json={"return": "session"}, headers=ADMIN)
        ).is_success
        assert (await gateway.http.get(f"{url}/samples?format=tree", headers=ADMIN)).is_success
        played += 1
    return played
