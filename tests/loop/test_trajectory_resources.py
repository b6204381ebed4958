"""Tools and interactions of a trajectory: when they are created and released, and their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from branchline.core.errors import ToolError
from branchline.core.message import Message
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.interaction import BaseInteraction, InteractionConfig, InteractionResponse
from branchline.loop.persistence import Fault
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.state import LoopPhase, LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import ToolSelection
from tests.loop.fake_tools import RecordingTool
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTurn,
    loop_harness,
    move_clock,
    pass_control,
    run,
)

LAST_TURN = LoopScript((ScriptedTurn("end"),))


class FaultyInteraction(BaseInteraction):
    """Ends the conversation; `hangs` and `fails` name a method that does not return."""

    name = "interaction"

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        self._hangs, self._fails = hangs, fails
        self.reached = asyncio.Event()
        self.events: list[str] = []

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        await self._record("start")
        return arguments, None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        return InteractionResponse(True, "half a \ud800 pair")

    async def score(self, state: Any) -> float | None:
        return 1.0

    async def finalize(self, state: Any) -> None:
        await self._record("finalize")

    async def _record(self, method: str) -> None:
        self.events.append(method)
        if method == self._fails:
            raise LookupError("the socket is closed")
        if method == self._hangs:
            self.reached.set()
            await asyncio.Event().wait()


def context_for(
    s: LoopHarness, tool: RecordingTool, interaction: FaultyInteraction | None = None, **options: Any
) -> AgentContext:
    interactions = InteractionRegistry([interaction] if interaction else [])
    return AgentContext(s.model, ToolRegistry([tool]), interactions, **options)


def task_for(s: LoopHarness, interaction: FaultyInteraction | None = None) -> Task:
    return Task(s.task().messages, agent_name="tool", interaction=interaction.name if interaction else "")


# -- creation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tool", "interaction"])
def test_a_loop_cancelled_during_creation_can_be_resumed(where: str) -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool = RecordingTool(hangs=["create"] if where == "tool" else [])
            interaction, cancel = (
                FaultyInteraction(hangs="start" if where == "interaction" else ""),
                CancelToken(),
            )
            state = LoopState.begin(task_for(s, interaction))
            running = asyncio.create_task(run_agent(state, context_for(s, tool, interaction, cancel=cancel)))
            await (tool.wait_for("create") if where == "tool" else interaction.reached.wait())
            cancel.cancel()
            state = await running
            assert (state.is_cancelled, state.phase, s.engine.requests) == (True, LoopPhase.PENDING, [])
            if where == "tool":
                assert (tool.events, interaction.events) == (["create", "create cancelled"], [])
            else:
                assert (tool.events, interaction.events) == (["create", "release"], ["start"])
            state = LoopState.decode(state.encode())
            assert (await run_agent(state, context_for(s, RecordingTool(), FaultyInteraction()))).is_finished

    run(test)


def test_a_loop_cancelled_during_creation_can_run_again_in_the_same_block() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool, cancel = RecordingTool(hangs=["create"]), CancelToken()
            async with AgentLoop(s.model, LoopState.begin(s.task()), tools=ToolSelection((tool,))) as loop:
                running = asyncio.create_task(loop.run(cancel))
                await tool.wait_for("create")
                cancel.cancel()
                assert (await running).is_cancelled
                tool._hangs = ()
                assert (await loop.run()).is_finished
            assert tool.events == ["create", "create cancelled", "create", "calc_reward", "release"]

    run(test)


def test_a_loop_does_not_run_outside_its_block() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool = RecordingTool()
            loop = AgentLoop(s.model, LoopState.begin(s.task(), "t"), tools=ToolSelection((tool,)))
            with pytest.raises(RuntimeError, match="loop of t: runs outside its block, expected inside"):
                await loop.run()
            cancel = CancelToken()
            cancel.cancel()
            async with loop:
                await loop.run(cancel)
            with pytest.raises(RuntimeError, match="outside its block"):
                await loop.run()
            assert tool.events == []

    run(test)


def test_with_a_cancelled_token_nothing_is_created() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool, interaction, cancel = RecordingTool(), FaultyInteraction(), CancelToken()
            cancel.cancel()
            state = LoopState.begin(task_for(s, interaction))
            state = await run_agent(state, context_for(s, tool, interaction, cancel=cancel))
            assert (state.is_cancelled, tool.events, interaction.events) == (True, [], [])

    run(test)


def test_for_a_finished_state_nothing_is_created() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            state = await run_agent(LoopState.begin(task_for(s)), context_for(s, RecordingTool()))
            written, broken, interaction = (
                state.encode(),
                RecordingTool(fails=["create"]),
                FaultyInteraction(fails="start"),
            )
            state = await run_agent(LoopState.decode(written), context_for(s, broken, interaction))
            assert state.encode() == written
            assert (broken.events, interaction.events, len(s.engine.requests)) == ([], [], 1)

    run(test)


def test_a_cancellation_during_restore_keeps_the_saved_state() -> None:
    class Restored(RecordingTool):
        def save(self, instance: Any) -> Any:
            return {"saved": True}

        async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
            await self._record("restore")
            return saved

    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("a long answer", cancel_points=(2,)),))) as s:
            cancel, state = CancelToken(), LoopState.begin(task_for(s))
            running = asyncio.create_task(run_agent(state, context_for(s, Restored(), cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            state = await running
            slow, cancel = Restored(hangs=["restore"]), CancelToken()
            running = asyncio.create_task(run_agent(state, context_for(s, slow, cancel=cancel)))
            await slow.wait_for("restore")
            cancel.cancel()
            state = await running
            assert (state.is_cancelled, state.tool_states) == (True, {"recorder": {"saved": True}})

    run(test)


# -- time limits -------------------------------------------------------------------------------------


def test_create_and_release_have_time_limits() -> None:
    async def test() -> None:
        limits = LoopLimits(tool_create_timeout_s=7, tool_release_timeout_s=300)
        async with loop_harness(LAST_TURN) as s:
            slow = RecordingTool(hangs=["create"])
            running = asyncio.create_task(
                run_agent(LoopState.begin(task_for(s)), context_for(s, slow, limits=limits))
            )
            await slow.wait_for("create")
            move_clock(7)
            with pytest.raises(ToolError, match="tool 'recorder': create: timed out after 7 s"):
                await running
            stuck, state = RecordingTool(hangs=["release"]), LoopState.begin(task_for(s))
            running = asyncio.create_task(run_agent(state, context_for(s, stuck, limits=limits)))
            await stuck.wait_for("release")
            move_clock(299)
            await pass_control(20)
            assert not running.done()
            move_clock(1)
            state = await running
            assert state.faults == [Fault("recorder", "release", "timed out after 300 s")]
            assert state.is_finished

    run(test)


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_failed_finalize_is_a_fault_and_the_trajectory_ends_normally(how: str) -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            interaction = (
                FaultyInteraction(hangs="finalize") if how == "hangs" else FaultyInteraction(fails="finalize")
            )
            state = LoopState.begin(task_for(s, interaction))
            running = asyncio.create_task(run_agent(state, context_for(s, RecordingTool(), interaction)))
            if how == "hangs":
                await interaction.reached.wait()
                move_clock(30)
            state = await running
            assert (state.is_finished, state.reward_score) == (True, 1.0)
            message = "timed out after 30 s" if how == "hangs" else "the socket is closed"
            assert state.faults == [Fault("interaction", "finalize", message)]
            assert LoopState.decode(state.encode()).messages[-1].content == "half a \ufffd pair"

    run(test)


@pytest.mark.parametrize("by_token", [False, True])
def test_a_failed_finalize_does_not_hide_a_cancellation(by_token: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("a long answer", cancel_points=(2,)),))) as s:
            interaction, cancel = FaultyInteraction(fails="finalize"), CancelToken()
            state = LoopState.begin(task_for(s, interaction))
            running = asyncio.create_task(
                run_agent(state, context_for(s, RecordingTool(), interaction, cancel=cancel))
            )
            await s.engine.at_cancel_point.wait()
            if by_token:
                cancel.cancel()
                assert await running is state
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert state.is_cancelled
            assert [fault.operation for fault in state.faults] == ["finalize"]

    run(test)


def test_a_failed_release_is_a_fault() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            state = LoopState.begin(task_for(s))
            state = await run_agent(state, context_for(s, RecordingTool(fails=["release"], reward=0.5)))
            assert state.faults == [Fault("recorder", "release", "release is broken")]
            assert state.reward_score == 0.5

    run(test)


def test_when_the_interaction_cannot_start_the_tools_are_released() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool = RecordingTool()
            loop = AgentLoop(
                s.model,
                LoopState.begin(s.task()),
                tools=ToolSelection((tool,)),
                interaction=InteractionConfig(FaultyInteraction(fails="start")),
            )
            async with loop:
                state = await loop.run()
                assert [str(fault) for fault in state.faults] == ["interaction: start: the socket is closed"]
                assert tool.events == ["create", "release"]
            assert tool.events == ["create", "release"]

    run(test)
