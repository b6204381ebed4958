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

from benchmarks.measure import Report, percentile
from branchline.chat.toy import ToyCodec
from branchline.core.call import Request
from branchline.core.message import Message, ToolCall
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import Ask, ScriptedEngine
from branchline.gateway.calls import Asked, Done, run_call
from branchline.gateway.live import SessionOptions
from branchline.gateway.process import calm_gc
from branchline.gateway.record import CallRecord
from branchline.gateway.sessions import Sessions
from branchline.loop.machine import AgentLoop
from branchline.loop.model import SessionModel
from branchline.loop.state import LoopLimits, LoopState, Task
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.registry import ToolRegistry

TOOL_S = 0.05
_SAID = "waited"
_PROMPT = (Message("user", "Wait until it is time."),)


@dataclass(frozen=True)
class Crowd:
    """How much of it."""

    loops: int = 1000
    turns: int = 5
    """Answers of each loop; all but the last call the tool."""
    answer_s: float = 2.0
    """How long the slow engine takes for one: a hundred tokens at fifty a second."""
    repeats: int = 3


class Wait(BaseTool):
    """Takes its time."""

    name = "wait"
    schema = function_schema(name, "Waits.", {"type": "object", "properties": {"round": {"type": "integer"}}})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        await asyncio.sleep(TOOL_S)
        return ToolResult(_SAID)


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


def _engine(crowd: Crowd, answer_s: float = 0.0) -> SlowEngine:
    def rule(ask: Ask) -> Message:
        done = ask.text.count(_SAID)
        if done == crowd.turns - 1:
            return Message("assistant", "it is time")
        return Message("assistant", calls=(ToolCall("wait", f'{{"round": {done}}}'),))

    # Four chunks an answer.
    return SlowEngine(ToyCodec.chatml(), rule, chunk_size=5, answer_s=answer_s)


@dataclass
class Outcome:
    """What one crowd took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    each_s: list[float] = field(default_factory=list)
    """How long each loop took from its first step to its last."""


async def _loops(crowd: Crowd, engine: SlowEngine, limits: LoopLimits | None) -> Outcome:
    outcome = Outcome()
    sessions = Sessions(engine.codec)
    tools = ToolRegistry([Wait()]).select()
    task = Task(_PROMPT, agent_name="tool", limits=limits)
    models = [SessionModel(sessions.open(SessionOptions())[0], engine) for _ in range(crowd.loops)]

    async def one(model: SessionModel) -> None:
        began = time.perf_counter()
        async with AgentLoop(model, LoopState.begin(task), tools=tools) as loop:
            state = await loop.run()
        assert state.assistant_turns == crowd.turns, state.reason
        outcome.each_s.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for model in models:
            group.create_task(one(model))
    return outcome


async def _calls(crowd: Crowd, engine: SlowEngine) -> Outcome:
    """The same calls, one behind the other."""
    sessions = Sessions(engine.codec)
    lives = [sessions.open(SessionOptions())[0] for _ in range(crowd.loops)]
    for live in lives:
        messages = list(_PROMPT)
        for turn in range(crowd.turns):
            asked = Asked(Request(tuple(messages), (Wait.schema,)), SamplingParams(max_tokens=4096))
            record = CallRecord(live.id, "bench", f"call-{turn}", streamed=True)
            events = [event async for event in run_call(live, engine, asked, record)]
            assert isinstance(events[-1], Done)
            said = events[-1].answers[0].message
            messages += [said, *(Message("tool", _SAID, answers=call.id) for call in said.calls)]
    return Outcome()


def _timed(work: Coroutine[Any, Any, Outcome], *, calm: bool = True) -> Outcome:
    """One run; garbage is collected as in a program that called `calm_gc`, or as Python does."""
    gc.collect()
    thresholds = gc.get_threshold()
    if calm:
        calm_gc()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        outcome = asyncio.run(work)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    outcome.wall_s, outcome.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return outcome


def table(crowd: Crowd) -> Report:
    report = Report(
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
    _pin()
    turns = crowd.loops * crowd.turns
    waits_s = (crowd.turns - 1) * TOOL_S
    slow = _timed(_loops(crowd, _engine(crowd, crowd.answer_s), None))
    _row(report, "slow", crowd.turns * crowd.answer_s + waits_s, slow, turns)
    lengths = LoopLimits(response_length=1_000_000)
    sides: dict[str, Callable[[], Outcome]] = {
        "calls alone": lambda: _timed(_calls(crowd, _engine(crowd))),
        "at once": lambda: _timed(_loops(crowd, _engine(crowd), None)),
        "at once, counted": lambda: _timed(_loops(crowd, _engine(crowd), lengths)),
        "at once, collected as Python does": lambda: _timed(_loops(crowd, _engine(crowd), None), calm=False),
    }
    taken = [{name: side() for name, side in sides.items()} for _ in range(crowd.repeats)]
    best = {name: min([one[name] for one in taken], key=lambda outcome: outcome.cpu_s) for name in sides}
    calls = best.pop("calls alone")
    report.row("calls alone", "", f"{calls.cpu_s:.2f}", "", "", f"{calls.cpu_s / turns * 1e6:.0f}", "", "")
    for name, outcome in best.items():
        _row(report, name, max(calls.cpu_s, waits_s), outcome, turns, is_target=name == "at once")
    overhead_s = (best["at once"].cpu_s - calls.cpu_s) / turns
    report.row("loop and tool alone", "", "", "", "", f"{overhead_s * 1e6:.0f}", "", "")
    return report


def _row(
    report: Report, name: str, ideal_s: float, took: Outcome, turns: int, is_target: bool = True
) -> None:
    # A core that is shared with others is not ours all the time: where it is the core that is waited for,
    # the time we had of it is what counts.
    took_s = took.wall_s if name == "slow" else took.cpu_s
    ratio, spread = took_s / ideal_s, max(took.each_s) / percentile(took.each_s, 0.5)
    report.row(
        name,
        f"{ideal_s:.2f}",
        f"{took_s:.2f}",
        f"{ratio:.2f}",
        report.target("≤ 1.5", ratio <= 1.5) if is_target else "",
        f"{took.cpu_s / turns * 1e6:.0f}",
        f"{spread:.2f}",
        report.target("≤ 1.5", spread <= 1.5) if is_target else "",
    )


def _pin() -> None:
    """One core, where the system lets us say so; elsewhere one thread has to do."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
