"""Kills during weight updates: versions never go back, and a gateway killed while paused starts paused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from tests.faults.conftest import FaultFigures
from tests.faults.recorded_gateway import ADMIN, RecordedGateway

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")

_KILLS = 15


class WeightUpdater:
    """Pauses and resumes the policy under growing versions, and notes what was acknowledged."""

    def __init__(self, gateway: RecordedGateway) -> None:
        self._gateway = gateway
        self.version = 0
        """The last acknowledged version."""
        self.sent_version = 0
        """The last version that was sent, acknowledged or not."""
        self.paused: bool | None = False
        """Whether the policy is paused; None if a request was not acknowledged."""

    async def run(self, stop: asyncio.Event, rng: Random) -> None:
        while not stop.is_set():
            if not await self._post("pause", {}, paused=True):
                return
            await asyncio.sleep(rng.uniform(0, 0.05))
            self.sent_version += 1
            if not await self._post("resume", {"version": self.sent_version}, paused=False):
                return
            await asyncio.sleep(rng.uniform(0, 0.1))

    async def _post(self, verb: str, body: dict[str, int], *, paused: bool) -> bool:
        self.paused = None
        try:
            response = await self._gateway.http.post(
                f"{self._gateway.url}/policy/{verb}", json=body, headers=ADMIN
            )
        except Exception:
            return False
        assert response.status_code == 200, response.text
        self.version, self.paused = response.json()["version"], paused
        return True


def test_kills_during_weight_updates(tmp_path: Path, fault_figures: FaultFigures) -> None:
    async def test() -> None:
        rng = Random(3)
        paused_restarts = inexact_versions = 0
        async with RecordedGateway(tmp_path) as gateway:
            updater = WeightUpdater(gateway)
            for _ in range(_KILLS):
                stop = asyncio.Event()
                load = [asyncio.create_task(gateway.run_load(stop, Random(rng.random()))) for _ in range(4)]
                updates = asyncio.create_task(updater.run(stop, Random(rng.random())))
                await asyncio.sleep(rng.uniform(0.2, 0.7))
                await gateway.kill()
                stop.set()
                await asyncio.gather(*load, updates)
                await gateway.start()
                state = await gateway.get("/engines")
                assert updater.version <= state["version"] <= updater.sent_version
                if updater.paused is not None:
                    assert state["paused"] == updater.paused
                paused_restarts += state["paused"]
                if state["version"]:
                    refused = await gateway.http.post(
                        f"{gateway.url}/policy/resume", json={"version": state["version"] - 1}, headers=ADMIN
                    )
                    assert refused.status_code == 400
                    assert str(state["version"]) in refused.text
                assert (await gateway.http.post(f"{gateway.url}/policy/resume", headers=ADMIN)).is_success
                updater.sent_version, updater.paused = max(updater.sent_version, state["version"]), False
            lost, inexact = await gateway.check()
            for session in gateway.sessions:
                for line in (await gateway.get(f"/sessions/{session.id}/timelines"))["timelines"]:
                    versions = [version for version in line["versions"] if version >= 0]
                    inexact_versions += versions != sorted(versions)
            fault_figures.add(
                "kills during weight updates",
                lost=lost,
                inexact=inexact + inexact_versions,
                note=f"{_KILLS} kills, {updater.version} updates, {paused_restarts} restarts while paused",
            )
            assert (lost, inexact, inexact_versions) == (0, 0, 0)

    asyncio.run(asyncio.wait_for(test(), 300))
