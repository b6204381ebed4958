"""What a rollout costs in a Ray cluster on one machine, by the number of gateways: `make bench-ray`.

The sessions are those of `benchmarks.rollout`: an agent loop of ten turns on a scripted engine, scored,
exported and written. CPU time is that of the processes themselves, so it does not depend on who else uses the
machine; sessions/s does. The first row is the same rollout in one process, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from rich.console import Console

from benchmarks.measure import BenchmarkTable
from benchmarks.rollout.sessions import TASK, RolloutLoad, make_engine, run_loop_agent, score
from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import tune_gc
from branchline.gateway.server import Gateway
from branchline.rollout.ray_cluster import RayCluster, RayConfig
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.runners import Runner, make_runner
from branchline.rollout.session_gateway import SessionGateway
from branchline.rollout.sinks import JsonlSink

_GROUP = 8


@dataclass(frozen=True)
class ProcessTimes:
    """Wall time, and CPU time of each kind of process."""

    wall_s: float
    gateways_s: float
    runners_s: float
    driver_s: float


async def _measure(
    load: RolloutLoad, folder: Path, gateway: Gateway | SessionGateway, runner: Runner
) -> float:
    """Runs all sessions and returns the wall time."""
    rollout = Rollout(
        gateway,
        {"tool": runner},
        reward=score,
        sinks=[JsonlSink(folder)],
        config=RolloutConfig(n=_GROUP, concurrency=load.concurrency),
    )
    started = time.perf_counter()
    stats = await rollout.run([TASK] * (load.sessions // _GROUP))
    wall_s = time.perf_counter() - started
    assert stats.finished == stats.sessions == load.sessions // _GROUP * _GROUP
    assert stats.sampled_tokens == stats.delivered_tokens > 0
    return wall_s


async def _run_alone(load: RolloutLoad, folder: Path) -> ProcessTimes:
    codec, engine = make_engine(load.turns)
    async with Gateway(engine=engine, codec=codec, journal=folder / "journal") as gateway:
        cpu_s = time.process_time()
        wall_s = await _measure(load, folder, gateway, make_runner(run_loop_agent))
        return ProcessTimes(wall_s, 0.0, 0.0, time.process_time() - cpu_s)


async def _run_cluster(load: RolloutLoad, gateways: int, folder: Path) -> ProcessTimes:
    config = RayConfig(folder, gateways=gateways, runners=1, gateway=GatewayConfig(drain_s=1.0))
    async with RayCluster(partial(make_engine, load.turns), config) as cluster:
        before, driver_s = await cluster.processes(), time.process_time()
        wall_s = await _measure(load, folder, cluster.pool, cluster.runner(run_loop_agent))
        driver_s, after = time.process_time() - driver_s, await cluster.processes()
    used = {kind: sum(cpu for _, cpu in after[kind]) - sum(cpu for _, cpu in before[kind]) for kind in before}
    return ProcessTimes(wall_s, used["gateways"], used["runners"], driver_s)


def build_report(load: RolloutLoad, counts: list[int]) -> BenchmarkTable:
    report = BenchmarkTable(
        f"{load.sessions:,} sessions × {load.turns} turns, {load.concurrency} at the same time, "
        f"{os.cpu_count()} cores",
        ["gateways", "sessions/s", "CPU ms per session: gateways", "agents", "driver", "together"],
        [
            "One runner process. Driver: places, scores, reads and writes sessions.",
            f"CPU time; best of {load.repeats}. The first row is one process without Ray.",
        ],
    )
    runs: dict[str, list[ProcessTimes]] = {}
    for _ in range(load.repeats):
        for count in [0, *counts]:
            with tempfile.TemporaryDirectory() as folder:
                work = _run_cluster(load, count, Path(folder)) if count else _run_alone(load, Path(folder))
                runs.setdefault(str(count or "in one process"), []).append(asyncio.run(work))
    for name, times in runs.items():
        best = min(times, key=lambda one: one.gateways_s + one.runners_s + one.driver_s)
        parts = (best.gateways_s, best.runners_s, best.driver_s)
        shown = [f"{part / load.sessions * 1e3:.2f}" if part else "" for part in parts]
        together = f"{sum(parts) / load.sessions * 1e3:.2f}"
        report.add_row(name, f"{load.sessions / min(one.wall_s for one in times):.0f}", *shown, together)
    return report


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rollout.ray_processes", description=__doc__)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 1024 * 1024)
    tune_gc()
    try:
        load = RolloutLoad(options.sessions, options.turns, repeats=options.repeats)
        report = build_report(load, options.gateways)
    finally:
        ray.shutdown()
    report.print(Console(width=150))
    return 0


if __name__ == "__main__":
    sys.exit(main())
