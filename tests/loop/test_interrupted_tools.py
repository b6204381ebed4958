"""Interrupted tool calls: a finished call counts once, and one that may count twice is a fault."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.loop.agent_loop import AgentLoop
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, Tool, ToolResult, ToolSelection
from branchline.loop.tools.functions import tool
from tests.hang import HANG_S
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    move_clock,
    pass_control,
    run,
)

SCRIPT = LoopScript(
    (
        ScriptedTurn("one", tool_calls=(ScriptedToolCall(),)),
        ScriptedTurn("two", tool_calls=(ScriptedToolCall(), ScriptedToolCall())),
        ScriptedTurn("end"),
    )
)
ONE_CALL = LoopScript((ScriptedTurn("one", tool_calls=(ScriptedToolCall(),)), ScriptedTurn("end")))


class CountingTool(BaseTool):
    """Its reward is the number of its calls that had an effect; it waits before the effect and after it."""

    name = "act"
    schema = ScriptedTool.schema

    def __init__(self, rounds_before: int = 0, rounds_after: int = 0, *, is_repeatable: bool = False) -> None:
        self._rounds = rounds_before, rounds_after
        self.is_repeatable = is_repeatable

    async def create(self, trajectory: str, **arguments: Any) -> list[int]:
        return []

    async def execute(self, instance: list[int], arguments: Mapping[str, Any]) -> ToolResult:
        await pass_control(self._rounds[0])
        instance.append(1)
        await pass_control(self._rounds[1])
        return ToolResult(f"{arguments['turn']}.{arguments['index']}", reward=1.0)

    async def calc_reward(self, instance: list[int]) -> float | None:
        return float(len(instance))

    def save(self, instance: list[int]) -> list[int]:
        return instance

    async def restore(self, trajectory: str, saved: list[int], **arguments: Any) -> list[int]:
        return list(saved)


async def run_once(
    s: LoopHarness, one: Tool, state: LoopState, cancel: CancelToken | None = None, **limits: Any
) -> LoopState:
    tools = ToolSelection((one,))
    async with AgentLoop(s.model, state, tools=tools, limits=LoopLimits(**limits)) as loop:
        return await loop.run(cancel)


async def run_interrupted(one: Tool, moments: list[int], script: LoopScript = SCRIPT) -> LoopState:
    """The final state of a loop that is cancelled after each of these numbers of event loop rounds."""
    async with loop_harness(script) as s:
        state = LoopState.begin(s.task(), "t")
        for moment in moments:
            cancel = CancelToken()
            task = asyncio.create_task(run_once(s, one, state, cancel))
            await pass_control(moment)
            cancel.cancel()
            state = LoopState.decode((await task).encode())
        return await run_once(s, one, state)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=4), st.integers(0, 3))
def test_a_finished_call_counts_once_whenever_the_cancellation_comes(moments: list[int], before: int) -> None:
    async def test() -> None:
        state = await run_interrupted(CountingTool(before), moments)
        assert (state.reward_score, state.tool_rewards) == (3.0, [1.0, 1.0, 1.0])

    run(test)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=4), st.integers(1, 3))
def test_a_reward_that_counts_a_call_twice_comes_with_a_fault(moments: list[int], after: int) -> None:
    async def test() -> None:
        state = await run_interrupted(CountingTool(0, after), moments)
        assert len(state.tool_rewards) == 3
        assert state.reward_score == 3.0 or "repeated" in [fault.operation for fault in state.faults]

    run(test)


@pytest.mark.parametrize("moment", range(40))
def test_a_cancellation_at_every_single_round_keeps_the_reward(moment: int) -> None:
    async def test() -> None:
        state = await run_interrupted(CountingTool(1), [moment], ONE_CALL)
        assert state.reward_score == 1.0

    run(test)


class GatedTool(CountingTool):
    """Has its effect, then waits for a gate; `swallows` makes it ignore cancellations."""

    def __init__(self, *, swallows: bool = False, is_repeatable: bool = False) -> None:
        super().__init__(is_repeatable=is_repeatable)
        self.reached, self.gate, self._swallows = asyncio.Event(), asyncio.Event(), swallows

    async def execute(self, instance: list[int], arguments: Mapping[str, Any]) -> ToolResult:
        instance.append(1)
        self.reached.set()
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if not self._swallows:
                    raise
        return ToolResult("done")


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_a_call_that_runs_again_is_a_fault_unless_the_tool_is_repeatable(is_repeatable: bool) -> None:
    async def test() -> None:
        async with loop_harness(ONE_CALL) as s:
            gated, cancel = GatedTool(is_repeatable=is_repeatable), CancelToken()
            task = asyncio.create_task(run_once(s, gated, LoopState.begin(s.task(), "t"), cancel))
            await gated.reached.wait()
            cancel.cancel()
            state = await task
            assert (state.started_calls, state.faults) == ([0], [])
            gated.gate.set()
            state = await run_once(s, gated, LoopState.decode(state.encode()))
            assert (state.reward_score, state.started_calls) == (2.0, [])
            assert [str(fault) for fault in state.faults] == (
                []
                if is_repeatable
                else ["act: repeated: a call of turn 1 was cancelled while it ran, and ran again"]
            )

    run(test)


def test_a_call_that_finishes_in_the_grace_period_is_recorded() -> None:
    async def test() -> None:
        async with loop_harness(ONE_CALL) as s:
            gated, cancel = GatedTool(swallows=True), CancelToken()
            task = asyncio.create_task(run_once(s, gated, LoopState.begin(s.task(), "t"), cancel))
            await gated.reached.wait()
            cancel.cancel()
            await pass_control()
            assert not task.done()
            gated.gate.set()
            state = await task
            assert state.is_cancelled
            state = await run_once(s, gated, LoopState.decode(state.encode()))
            assert (state.reward_score, state.faults) == (1.0, [])

    run(test)


@pytest.mark.parametrize("by", ["token", "task", "wall_clock"])
def test_a_tool_that_swallows_cancellation_delays_it_by_the_grace_period_only(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with loop_harness(ONE_CALL) as s:
            gated, cancel, limits = GatedTool(swallows=True), CancelToken(), {"cancel_grace_s": 2.0}
            if by == "wall_clock":
                limits["wall_clock_s"] = 10.0
            begun = LoopState.begin(s.task(), "t")
            task = asyncio.create_task(run_once(s, gated, begun, cancel, **limits))
            await gated.reached.wait()
            if by == "token":
                cancel.cancel()
            elif by == "task":
                task.cancel()
            else:
                move_clock(10)
            await pass_control(8)
            move_clock(1.9)
            await pass_control(8)
            assert not task.done(), "the grace period is not over"
            move_clock(0.2)
            if by == "task":
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            assert begun.is_cancelled == (by != "wall_clock")
            assert (begun.stop_reason is StopReason.WALL_CLOCK) == (by == "wall_clock")
            before = begun.encode()
            gated.gate.set()
            await pass_control(8)
            assert begun.encode() == before, "the result of abandoned work is dropped"

    with caplog.at_level(logging.WARNING, "branchline.loop"):
        run(test)
    assert "GatedTool.execute: abandoned, it still ran 2 s after its cancellation" in caplog.text


def test_the_default_grace_period_is_one_second() -> None:
    assert LoopLimits().cancel_grace_s == 1.0


def test_a_function_in_a_thread_that_ends_in_the_grace_period_runs_once() -> None:
    async def test() -> None:
        started, gate, runs = threading.Event(), threading.Event(), list[int]()

        @tool(name="act")
        def act(turn: int, index: int) -> str:
            started.set()
            assert gate.wait(HANG_S)
            runs.append(turn)
            return "done"

        async with loop_harness(ONE_CALL) as s:
            cancel = CancelToken()
            task = asyncio.create_task(run_once(s, act, LoopState.begin(s.task(), "t"), cancel))
            await asyncio.to_thread(started.wait, 20)
            cancel.cancel()
            await pass_control()
            gate.set()
            state = await run_once(s, act, LoopState.decode((await task).encode()))
            assert (runs, state.faults, state.stop_reason) == ([0], [], StopReason.STOP)

    run(test)
