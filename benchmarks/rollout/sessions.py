"""What a rollout costs: sessions of an agent loop with and without it, on a scripted engine.

The bare side is the agent loop alone: each loop gets a session of a gateway, asks it over HTTP and ends; the
program keeps nothing. The other sides run the same loops as a rollout, which scores each session, exports its
samples and writes it. Both sides run in this process, with the engine and the gateway.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkTable
from branchline.chat.toy import ToyCodec
from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.export.trajectory import Trajectory
from branchline.gateway.process import tune_gc
from branchline.gateway.server import Gateway
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.http_model import HttpModel
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.task import Task
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import JsonlSink, MemorySink, Sink

_RESULT = "looked"
_ANSWER = "This is the answer of one turn, and it is a sentence long."


@dataclass(frozen=True)
class RolloutLoad:
    """The size of the benchmark."""

    sessions: int = 1000
    turns: int = 10
    """Answers of each session; all but the last call a tool."""
    concurrency: int = 64
    repeats: int = 3


@dataclass(frozen=True)
class RolloutTimes:
    """The times of one side."""

    wall_s: float
    cpu_s: float


class LookTool(BaseTool):
    """Answers at once."""

    name = "look"
    schema = function_schema(name, "Looks.", {"type": "object", "properties": {"round": {"type": "integer"}}})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(_RESULT)


_TOOLS = ToolRegistry([LookTool()])
TASK = {"prompt": "Look around.", "agent_name": "tool", "answer": _ANSWER}


async def _run_loop(session: Any) -> None:
    async with HttpModel(session.base_url, session.api_key) as model:
        context = AgentContext(model, _TOOLS, report=False)
        await run_agent(LoopState.begin(Task.read(TASK)), context)


async def run_loop_agent(_task: Mapping[str, Any], session: Any) -> None:
    await _run_loop(session)


def score(task: Mapping[str, Any], trajectory: Trajectory) -> float:
    return float(trajectory.answer == task["answer"])


def make_engine(turns: int) -> tuple[ToyCodec, ScriptedEngine]:
    """Returns an engine whose answers call the tool until the last turn, and its codec."""

    def rule(request: ScriptedRequest) -> Message:
        done = request.prompt_text.count(_RESULT)
        if done == turns - 1:
            return Message("assistant", _ANSWER)
        return Message("assistant", _ANSWER, tool_calls=(ToolCall("look", f'{{"round": {done}}}'),))

    codec = ToyCodec.chatml()
    return codec, ScriptedEngine(codec, rule, chunk_size=64)


def _gateway(load: RolloutLoad, journal: Path | None) -> Gateway:
    codec, engine = make_engine(load.turns)
    return Gateway(engine=engine, codec=codec, journal=journal)


async def _run_bare(load: RolloutLoad, folder: Path, *, has_journal: bool) -> None:
    async with _gateway(load, folder / "journal" if has_journal else None) as gateway:
        places = asyncio.Semaphore(load.concurrency)

        async def one() -> None:
            async with places:
                session = await gateway.session()
                await _run_loop(session)
                await session.sessions.end_session(session.managed, "finalized")
                gateway.sessions.evict(session.managed)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.sessions):
                group.create_task(one())


async def _run_rollout(load: RolloutLoad, folder: Path, *, has_journal: bool, writes: bool) -> None:
    async with _gateway(load, folder / "journal" if has_journal else None) as gateway:
        sink: Sink = JsonlSink(folder) if writes else MemorySink()
        rollout = Rollout(
            gateway,
            {"tool": run_loop_agent},
            reward=score if writes else None,
            sinks=[sink],
            config=RolloutConfig(n=8, concurrency=load.concurrency),
        )
        stats = await rollout.run([TASK] * (load.sessions // 8))
        assert stats.finished == load.sessions // 8 * 8
        assert stats.sampled_tokens == stats.delivered_tokens > 0


def _timed(work: Callable[[Path], Awaitable[None]]) -> RolloutTimes:
    gc.collect()
    thresholds = gc.get_threshold()
    tune_gc()
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            asyncio.run(_call(work, Path(folder)))
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
        return RolloutTimes(time.perf_counter() - wall, time.process_time() - cpu)


async def _call(work: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    await work(folder)


def build_report(load: RolloutLoad) -> BenchmarkTable:
    """Measures all sides in turn, several times, and returns the best of each."""
    report = BenchmarkTable(
        f"{load.sessions:,} sessions × {load.turns} turns, {load.concurrency} at the same time",
        ["", "sessions/s", "CPU ms per session", "CPU beside the bare loop", "target"],
        [
            "Bare: the agent loop over HTTP with a session of the gateway; nothing is kept.",
            "Rollout: the same loops, with a reward function, exported samples, and trajectories.jsonl and",
            f"samples.jsonl written as each session ends. CPU time; best of {load.repeats}.",
        ],
    )
    sides: dict[str, Callable[[Path], Awaitable[None]]] = {
        "bare loop": lambda folder: _run_bare(load, folder, has_journal=False),
        "rollout, in memory": lambda folder: _run_rollout(load, folder, has_journal=False, writes=False),
        "rollout": lambda folder: _run_rollout(load, folder, has_journal=False, writes=True),
        "bare loop, journal": lambda folder: _run_bare(load, folder, has_journal=True),
        "rollout, journal": lambda folder: _run_rollout(load, folder, has_journal=True, writes=True),
    }
    runs = [{name: _timed(side) for name, side in sides.items()} for _ in range(load.repeats)]
    best = {name: min([one[name] for one in runs], key=lambda times: times.cpu_s) for name in sides}
    for name, times in best.items():
        bare = best["bare loop, journal" if "journal" in name else "bare loop"]
        overhead = times.cpu_s / bare.cpu_s - 1
        report.add_row(
            name,
            f"{load.sessions / times.wall_s:.0f}",
            f"{times.cpu_s / load.sessions * 1e3:.2f}",
            "" if times is bare else f"{overhead:+.0%}",
            "" if times is bare else report.target_cell("at most +20 %", overhead <= 0.2),
        )
    return report
