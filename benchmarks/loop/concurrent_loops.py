"""Many loops at once on one core: do they finish when they could, and does each get its turn?

Ideal is what nobody can beat. Where answers take their time, it is the waiting of one trajectory: answers and
tools, one behind the other. Where answers come at once, one core has to make all of them, and ideal is the
time the same calls take one by one, straight on their sessions, with no loop and no tool around them; it is
measured in the same run. The rest is what loops and tools cost.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import BenchmarkTable, percentile
from branchline.chat.toy import ToyCodec
from branchline.core.call import Request
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.process import tune_gc
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.model import SessionModel
from branchline.loop.state import LoopLimits, LoopState, Task
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.registry import ToolRegistry
from branchline.runtime.call_lifecycle import run_call
from branchline.runtime.call_record import CallRecord, CallRequest, CallResult
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore

TOOL_S = 0.05
_TOOL_RESULT = "waited"
_PROMPT = (Message("user", "Wait until it is time."),)


@dataclass(frozen=True)
class LoadConfig:
    """How much of it."""

    loops: int = 1000
    turns: int = 5
    """Answers of each loop; all but the last call the tool."""
    answer_s: float = 2.0
    """How long the slow engine takes for one: a hundred tokens at fifty a second."""
    repeats: int = 3


class WaitTool(BaseTool):
    """Takes its time."""

    name = "wait"
    schema = function_schema(name, "Waits.", {"type": "object", "properties": {"round": {"type": "integer"}}})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        await asyncio.sleep(TOOL_S)
        return ToolResult(_TOOL_RESULT)


@dataclass
class SlowEngine(ScriptedEngine):
    """Answers bit by bit over some seconds, as engines with many guests do; costs no time of ours."""

    answer_s: float = 0.0

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(prompt_ids, params, session=session):
            if self.answer_s:
                await asyncio.sleep(self.answer_s / 4)
            yield chunk


def _engine(crowd: LoadConfig, answer_s: float = 0.0) -> SlowEngine:
    def rule(ask: ScriptedRequest) -> Message:
        done = ask.prompt_text.count(_TOOL_RESULT)
        if done == crowd.turns - 1:
            return Message("assistant", "it is time")
        return Message("assistant", tool_calls=(ToolCall("wait", f'{{"round": {done}}}'),))

    # Four chunks an answer.
    return SlowEngine(ToyCodec.chatml(), rule, chunk_size=5, answer_s=answer_s)


@dataclass
class LoadTimes:
    """What one crowd took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    loop_times_s: list[float] = field(default_factory=list)
    """How long each loop took from its first step to its last."""


async def _run_loops(crowd: LoadConfig, engine: SlowEngine, limits: LoopLimits | None) -> LoadTimes:
    outcome = LoadTimes()
    sessions = SessionStore(engine.codec)
    tools = ToolRegistry([WaitTool()]).select()
    task = Task(_PROMPT, agent_name="tool", limits=limits)
    models = [SessionModel(sessions.open(SessionOptions())[0], engine) for _ in range(crowd.loops)]

    async def one(model: SessionModel) -> None:
        began = time.perf_counter()
        async with AgentLoop(model, LoopState.begin(task), tools=tools) as loop:
            state = await loop.run()
        assert state.assistant_turns == crowd.turns, state.reason
        outcome.loop_times_s.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for model in models:
            group.create_task(one(model))
    return outcome


async def _run_calls(crowd: LoadConfig, engine: SlowEngine) -> LoadTimes:
    """The same calls, one behind the other."""
    sessions = SessionStore(engine.codec)
    lives = [sessions.open(SessionOptions())[0] for _ in range(crowd.loops)]
    for live in lives:
        messages = list(_PROMPT)
        for turn in range(crowd.turns):
            request = Request(tuple(messages), (WaitTool.schema,))
            asked = CallRequest(request, SamplingParams(max_tokens=4096), stream=True)
            record = CallRecord(live.id, "bench", f"call-{turn}")
            events = [event async for event in run_call(live, engine, asked, record)]
            assert isinstance(events[-1], CallResult)
            said = events[-1].answers[0].message
            messages += [
                said,
                *(Message("tool", _TOOL_RESULT, tool_call_id=call.id) for call in said.tool_calls),
            ]
    return LoadTimes()


def _timed(work: Coroutine[Any, Any, LoadTimes], *, tuned_gc: bool = True) -> LoadTimes:
    """One run; garbage is collected as in a program that called `calm_gc`, or as Python does."""
    gc.collect()
    thresholds = gc.get_threshold()
    if tuned_gc:
        tune_gc()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        outcome = asyncio.run(work)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    outcome.wall_s, outcome.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return outcome


def build_report(crowd: LoadConfig) -> BenchmarkTable:
    report = BenchmarkTable(
        f"{crowd.loops:,} loops × {crowd.turns} turns on one core, a tool of {TOOL_S * 1e3:.0f} ms a turn",
        ["engine", "ideal s", "took s", "× ideal", "target", "CPU µs a turn", "slowest / median", "target"],
        [
            f"Slow: an answer takes {crowd.answer_s:g} s in four pieces; ideal is the waiting of one loop.",
            "At once: one core makes all answers; ideal is the CPU time of the same calls without loops and",
            f"tools, one by one in the same run; best of {crowd.repeats}. Counted: with a limit on tokens,",
            "so that each prompt is counted before it is asked. Sessions, trees and the toy engine are in",
            "the same process. Garbage is collected as `calm_gc` has it, which `branchline serve` calls, and",
            "which a program that runs this many loops should call too; one row shows Python's own way.",
        ],
    )
    _pin_to_one_core()
    turns = crowd.loops * crowd.turns
    waits_s = (crowd.turns - 1) * TOOL_S
    slow = _timed(_run_loops(crowd, _engine(crowd, crowd.answer_s), None))
    _add_row(report, "slow", crowd.turns * crowd.answer_s + waits_s, slow, turns)
    lengths = LoopLimits(response_length=1_000_000)
    sides: dict[str, Callable[[], LoadTimes]] = {
        "calls alone": lambda: _timed(_run_calls(crowd, _engine(crowd))),
        "at once": lambda: _timed(_run_loops(crowd, _engine(crowd), None)),
        "at once, counted": lambda: _timed(_run_loops(crowd, _engine(crowd), lengths)),
        "at once, collected as Python does": lambda: _timed(
            _run_loops(crowd, _engine(crowd), None), tuned_gc=False
        ),
    }
    taken = [{name: side() for name, side in sides.items()} for _ in range(crowd.repeats)]
    best = {name: min([one[name] for one in taken], key=lambda outcome: outcome.cpu_s) for name in sides}
    calls = best.pop("calls alone")
    report.add_row(
        "calls alone", "", f"{calls.cpu_s:.2f}", "", "", f"{calls.cpu_s / turns * 1e6:.0f}", "", ""
    )
    for name, outcome in best.items():
        _add_row(report, name, max(calls.cpu_s, waits_s), outcome, turns, is_target=name == "at once")
    overhead_s = (best["at once"].cpu_s - calls.cpu_s) / turns
    report.add_row("loop and tool alone", "", "", "", "", f"{overhead_s * 1e6:.0f}", "", "")
    return report


def _add_row(
    report: BenchmarkTable, name: str, ideal_s: float, took: LoadTimes, turns: int, is_target: bool = True
) -> None:
    # A core that is shared with others is not ours all the time: where it is the core that is waited for,
    # the time we had of it is what counts.
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
    """One core, where the system lets us say so; elsewhere one thread has to do."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
