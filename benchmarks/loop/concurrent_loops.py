"""Many concurrent loops on one core: how close is the total time to the ideal, and are loops treated evenly?

The ideal is a lower bound. With a slow engine it is the waiting time of one trajectory: its answers and tool
calls in sequence. With an instant engine one core makes all answers, and the ideal is the time of the same
calls in sequence, directly on their sessions and without loops or tools; it is measured in the same run. The
difference is the cost of loops and tools.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import BenchmarkTable, percentile
from branchline.chat.toy import ToyCodec
from branchline.chat.vision import ImageSpan
from branchline.core.call import Request
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.process import tune_gc
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.model import SessionModel
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.runtime.call_lifecycle import run_call
from branchline.runtime.call_record import CallRecord, CallRequest, CallResult
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore

TOOL_S = 0.05
_TOOL_RESULT = "waited"
_PROMPT = (Message("user", "Wait until it is time."),)


@dataclass(frozen=True)
class LoadConfig:
    """The size of the benchmark."""

    loops: int = 1000
    turns: int = 5
    """Answers of each loop; all but the last call the tool."""
    answer_s: float = 2.0
    """Seconds per answer of the slow engine: a hundred tokens at fifty per second."""
    repeats: int = 3


class WaitTool(BaseTool):
    """Sleeps."""

    name = "wait"
    schema = function_schema(name, "Waits.", {"type": "object", "properties": {"round": {"type": "integer"}}})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        await asyncio.sleep(TOOL_S)
        return ToolResult(_TOOL_RESULT)


@dataclass
class SlowEngine(ScriptedEngine):
    """Streams an answer over some seconds without using CPU time."""

    answer_s: float = 0.0

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(prompt_ids, params, session=session, images=images):
            if self.answer_s:
                await asyncio.sleep(self.answer_s / 4)
            yield chunk


def _engine(config: LoadConfig, answer_s: float = 0.0) -> SlowEngine:
    def rule(request: ScriptedRequest) -> Message:
        done = request.prompt_text.count(_TOOL_RESULT)
        if done == config.turns - 1:
            return Message("assistant", "it is time")
        return Message("assistant", tool_calls=(ToolCall("wait", f'{{"round": {done}}}'),))

    # Four chunks per answer.
    return SlowEngine(ToyCodec.chatml(), rule, chunk_size=5, answer_s=answer_s)


@dataclass
class LoadTimes:
    """The times of one run."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    loop_times_s: list[float] = field(default_factory=list)
    """The duration of each loop."""


async def _run_loops(config: LoadConfig, engine: SlowEngine, limits: LoopLimits | None) -> LoadTimes:
    times = LoadTimes()
    sessions = SessionStore(engine.codec)
    tools = ToolRegistry([WaitTool()]).select()
    task = Task(_PROMPT, agent_name="tool", limits=limits)
    models = [SessionModel(sessions.open(SessionOptions())[0], engine) for _ in range(config.loops)]

    async def one(model: SessionModel) -> None:
        started = time.perf_counter()
        async with AgentLoop(model, LoopState.begin(task), tools=tools) as loop:
            state = await loop.run()
        assert state.assistant_turns == config.turns, state.stop_reason
        times.loop_times_s.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as group:
        for model in models:
            group.create_task(one(model))
    return times


async def _run_calls(config: LoadConfig, engine: SlowEngine) -> LoadTimes:
    """The same calls in sequence."""
    sessions = SessionStore(engine.codec)
    managed_sessions = [sessions.open(SessionOptions())[0] for _ in range(config.loops)]
    for managed in managed_sessions:
        messages = list(_PROMPT)
        for turn in range(config.turns):
            request = Request(tuple(messages), (WaitTool.schema,))
            call_request = CallRequest(request, SamplingParams(max_tokens=4096), stream=True)
            record = CallRecord(managed.id, "bench", f"call-{turn}")
            events = [event async for event in run_call(managed, engine, call_request, record)]
            assert isinstance(events[-1], CallResult)
            answer = events[-1].message
            messages += [
                answer,
                *(Message("tool", _TOOL_RESULT, tool_call_id=call.id) for call in answer.tool_calls),
            ]
    return LoadTimes()


def _timed(work: Coroutine[Any, Any, LoadTimes], *, tuned_gc: bool = True) -> LoadTimes:
    """One run, with the garbage collector as set by `tune_gc` or with Python's defaults."""
    gc.collect()
    thresholds = gc.get_threshold()
    if tuned_gc:
        tune_gc()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        times = asyncio.run(work)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    times.wall_s, times.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return times


def build_report(config: LoadConfig) -> BenchmarkTable:
    report = BenchmarkTable(
        f"{config.loops:,} loops × {config.turns} turns on one core, with a tool of {TOOL_S * 1e3:.0f} ms",
        ["engine", "ideal s", "took s", "× ideal", "target", "CPU µs per turn", "slowest / median", "target"],
        [
            f"Slow: an answer takes {config.answer_s:g} s; ideal is the waiting time of one loop.",
            "Instant: one core makes all answers; ideal is the CPU time of the same calls without loops and",
            f"tools, in sequence; best of {config.repeats}. Counted: with a token limit, so that",
            "each prompt is counted before it is sent. Sessions, trees and the toy engine are in the same",
            "process. The garbage collector is set by `tune_gc`, as in `branchline serve`; one row shows",
            "Python's defaults.",
        ],
    )
    _pin_to_one_core()
    turns = config.loops * config.turns
    waits_s = (config.turns - 1) * TOOL_S
    slow = _timed(_run_loops(config, _engine(config, config.answer_s), None))
    _add_row(report, "slow", config.turns * config.answer_s + waits_s, slow, turns)
    lengths = LoopLimits(response_length=1_000_000)
    variants: dict[str, Callable[[], LoadTimes]] = {
        "calls alone": lambda: _timed(_run_calls(config, _engine(config))),
        "instant": lambda: _timed(_run_loops(config, _engine(config), None)),
        "instant, counted": lambda: _timed(_run_loops(config, _engine(config), lengths)),
        "instant, default garbage collector": lambda: _timed(
            _run_loops(config, _engine(config), None), tuned_gc=False
        ),
    }
    runs = [{name: variant() for name, variant in variants.items()} for _ in range(config.repeats)]
    best = {name: min([run[name] for run in runs], key=lambda times: times.cpu_s) for name in variants}
    calls = best.pop("calls alone")
    report.add_row(
        "calls alone", "", f"{calls.cpu_s:.2f}", "", "", f"{calls.cpu_s / turns * 1e6:.0f}", "", ""
    )
    for name, times in best.items():
        _add_row(report, name, max(calls.cpu_s, waits_s), times, turns, is_target=name == "instant")
    overhead_s = (best["instant"].cpu_s - calls.cpu_s) / turns
    report.add_row("loop and tool alone", "", "", "", "", f"{overhead_s * 1e6:.0f}", "", "")
    return report


def _add_row(
    report: BenchmarkTable, name: str, ideal_s: float, took: LoadTimes, turns: int, is_target: bool = True
) -> None:
    # Other processes may share the core, so CPU time counts unless the run mostly waits.
    took_s = took.wall_s if name == "slow" else took.cpu_s
    ratio, spread = took_s / ideal_s, max(took.loop_times_s) / percentile(took.loop_times_s, 0.5)
    report.add_row(
        name,
        f"{ideal_s:.2f}",
        f"{took_s:.2f}",
        f"{ratio:.2f}",
        report.target_cell("≤ 1.5", ratio <= 1.5) if is_target else "",
        f"{took.cpu_s / turns * 1e6:.0f}",
        f"{spread:.2f}",
        report.target_cell("≤ 1.5", spread <= 1.5) if is_target else "",
    )


def _pin_to_one_core() -> None:
    """Uses one core, if the system supports that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
