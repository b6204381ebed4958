"""While one tenant sends what is huge, slow or endless, others' calls stay fast and exact."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from branchline.core.token_arrays import as_ids
from tests.faults.attacker import ATTACKS
from tests.faults.conftest import FaultFigures
from tests.faults.gateway_process import ROOT, GatewayProcess, gateway_process, reply_text

ATTACK_S = float(os.environ.get("BRANCHLINE_ATTACK_S", "8"))
QUIET_S = 2.0
OTHERS = 4
"""Sessions that do nothing wrong."""
MAX_P99_MS = 100.0


async def _open_session(gateway: GatewayProcess, http: httpx.AsyncClient) -> Any:
    response = await http.post(f"{gateway.url}/sessions", headers=gateway.admin_headers)
    return response.raise_for_status().json()


class OtherTenant:
    """An agent with a conversation that grows to a few turns and begins again."""

    def __init__(self, session: Any, http: httpx.AsyncClient) -> None:
        self.session = session
        self.http = http
        self.latencies_s: list[float] = []
        self.answers: dict[str, tuple[list[int], list[int]]] = {}
        """The acknowledged prompt and output by call."""
        self.inexact = 0

    async def run(self, until_s: float) -> None:
        messages: list[dict[str, str]] = []
        while time.monotonic() < until_s:
            messages = messages[:6] if len(messages) < 6 else []
            messages.append({"role": "user", "content": f"{len(self.answers)} please"})
            body = {"messages": messages, "return_token_ids": True, "stream": False}
            headers = {"authorization": f"Bearer {self.session['api_key']}"}
            started = time.monotonic()
            url = f"{self.session['base_url']}/chat/completions"
            response = await self.http.post(url, json=body, headers=headers)
            self.latencies_s.append(time.monotonic() - started)
            answer = response.raise_for_status().json()
            (choice,) = answer["choices"]
            self.answers[answer["id"]] = (answer["prompt_token_ids"], choice["token_ids"])
            self.inexact += choice["message"]["content"] != reply_text(as_ids(answer["prompt_token_ids"]))
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            await asyncio.sleep(0.05)

    async def count_lost(self, gateway: GatewayProcess) -> int:
        """Acknowledged answers that are not in the tree with the ids that the client received."""
        url = f"{gateway.url}/sessions/{self.session['id']}/tree"
        tree = (await self.http.get(url, headers=gateway.admin_headers)).raise_for_status().json()
        paths: dict[int, list[int]] = {}
        recorded: dict[str, tuple[list[int], list[int]]] = {}
        for node in tree["nodes"]:
            path = paths.get(node["parent"], []) + node["ids"]
            paths[node["id"]] = path
            if node["call"] is not None:
                start = len(path) - sum(count for count, origin in node["spans"] if origin == "sampled")
                recorded[node["call"]] = (path[:start], path[start:])
        return sum(recorded.get(call) != answer for call, answer in self.answers.items())


async def _grow(session: Any, http: httpx.AsyncClient) -> None:
    """Gives the attacker's session a tree that takes time to export."""
    headers = {"authorization": f"Bearer {session['api_key']}"}
    for index in range(300):
        body = {"messages": [{"role": "user", "content": f"{index} " + "word " * 300}]}
        await http.post(f"{session['base_url']}/chat/completions", json=body, headers=headers)


@dataclass
class Measured:
    """What the others saw before and during an attack, and the answers that the attacker got."""

    others: list[OtherTenant]
    quiet_ms: NDArray[np.float64]
    attacked_ms: NDArray[np.float64]
    attacker_got: dict[str, int]


async def _run_all(others: list[OtherTenant], seconds: float) -> NDArray[np.float64]:
    """The latencies of all their calls."""
    for other in others:
        other.latencies_s.clear()
    await asyncio.gather(*[other.run(time.monotonic() + seconds) for other in others])
    return 1000 * np.array([latency_s for other in others for latency_s in other.latencies_s])


async def _measure(gateway: GatewayProcess, kind: str) -> Measured:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        attacker = await _open_session(gateway, http)
        others = [OtherTenant(await _open_session(gateway, http), http) for _ in range(OTHERS)]
        if kind.startswith("read_"):
            await _grow(attacker, http)
        await _run_all(others, 0.5)  # fills caches
        quiet_ms = await _run_all(others, QUIET_S)
        control_url = f"{gateway.url}/sessions/{attacker['id']}"
        keys = [attacker["base_url"], attacker["api_key"], control_url, attacker["control_key"]]
        command = [sys.executable, "-m", "tests.faults.attacker", kind, *keys]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
            try:
                await asyncio.to_thread(process.stdout.readline)
                attacked_ms = await _run_all(others, ATTACK_S)
                process.stdin.write("\n")
                process.stdin.flush()
                line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 30)
            finally:
                process.kill()
        return Measured(others, quiet_ms, attacked_ms, json.loads(line))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
def test_others_are_not_delayed(kind: str, tmp_path: Path, fault_figures: FaultFigures) -> None:
    async def test() -> None:
        with gateway_process(tmp_path) as gateway:
            measured = await _measure(gateway, kind)
            async with httpx.AsyncClient(timeout=60) as http:
                for other in measured.others:
                    other.http = http
                lost = sum([await other.count_lost(gateway) for other in measured.others])
            inexact = sum(other.inexact for other in measured.others)
            quiet_ms, p99_ms = (
                float(np.percentile(latencies_ms, 99))
                for latencies_ms in (measured.quiet_ms, measured.attacked_ms)
            )
            note = f"{quiet_ms:.1f} ms without the attack, median {np.median(measured.attacked_ms):.1f} ms, "
            note += f"{len(measured.attacked_ms)} calls, {gateway.rss_mib:.0f} MiB, "
            note += f"attacker got {measured.attacker_got}"
            fault_figures.add(kind, lost=lost, inexact=inexact, p99_ms=p99_ms, note=note)
            assert (lost, inexact) == (0, 0)
            assert p99_ms < MAX_P99_MS, f"p99 {p99_ms:.1f} ms ({note})"

    asyncio.run(test())
