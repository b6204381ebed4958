"""Clients that close half requests around their time-outs, while the event loop is busy, hurt nobody else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Literal

import httpx
import pytest

from tests.faults.conftest import FaultFigures
from tests.faults.misbehaving import KINDS
from tests.faults.recorded_gateway import ROOT, RecordedGateway
from tests.gateway.kill_server import ServerSettings

ATTACK_S = 20.0
TIMEOUT_S = 0.5
BUSY_S = 0.3
"""The event loop is blocked again and again, for up to this time."""
LIMITS = {"header_timeout_s": TIMEOUT_S, "body_timeout_s": TIMEOUT_S, "write_timeout_s": TIMEOUT_S}
CLIENTS, ATTACKERS = 4, 100


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kinds", [("closed_at_time_out",), KINDS], ids=["closed", "all"])
def test_misbehaving_connections_hurt_nobody_else(
    event_loop: Literal["asyncio", "uvloop"],
    kinds: tuple[str, ...],
    tmp_path: Path,
    fault_figures: FaultFigures,
) -> None:
    async def test() -> None:
        gateway = RecordedGateway(tmp_path, ServerSettings(LIMITS, event_loop, BUSY_S))
        async with gateway:
            attacked = await gateway.open_session()
            assert attacked is not None
            without = frozenset({attacked.id})  # its answers were cut off
            stop = asyncio.Event()
            load = [asyncio.create_task(gateway.run_load(stop, Random(seed))) for seed in range(CLIENTS)]
            key = attacked.headers["authorization"].removeprefix("Bearer ")
            keys = [gateway.url, f"{gateway.url}/sessions/{attacked.id}", key, str(TIMEOUT_S)]
            command = [sys.executable, "-m", "tests.faults.misbehaving", *keys, str(ATTACKERS), *kinds]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with subprocess.Popen(command, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
                try:
                    await asyncio.sleep(ATTACK_S)
                    output, _ = await asyncio.to_thread(process.communicate, "\n", 30)
                finally:
                    process.kill()
            stop.set()
            await asyncio.gather(*load)
            attack = json.loads(output)
            await assert_time_outs_apply(gateway)
            lost, inexact = await gateway.check(without)
            await gateway.kill()
            await gateway.start()  # and everything is in the journal
            lost_in_journal, _ = await gateway.check(without)
            answers = sum(len(session.answers) for session in gateway.sessions)
            note = f"{answers} answers to others, {gateway.broken} of their connections broken; "
            note += f"misbehaved: {attack['counts']}, answered: {attack['statuses']}"
            name = f"{'/'.join(kinds[:1])}{'…' if len(kinds) > 1 else ''} under a busy {event_loop} loop"
            fault_figures.add(name, lost=lost + lost_in_journal, inexact=inexact, note=note)
            assert (lost, lost_in_journal, inexact, gateway.broken, gateway.refused) == (0, 0, 0, 0, 0)
            assert answers > 0
            assert not [status for status in attack["statuses"] if status.endswith(" nothing")]

    asyncio.run(asyncio.wait_for(test(), ATTACK_S + 120))


async def assert_time_outs_apply(gateway: RecordedGateway) -> None:
    """A connection that sends half a head is still answered with 408: the server's own loop goes on."""
    address = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET / HT")
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
