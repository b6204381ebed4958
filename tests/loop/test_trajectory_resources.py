"""Who works with a model on one trajectory: when they are made, and what becomes of those that fail."""

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
from tests.loop.harness import LoopHarness, LoopScript, ScriptedTurn, loop_harness, move_clock, run

LAST_TURN = LoopScript((ScriptedTurn("end"),))


class FaultyInteraction(BaseInteraction):
    """Ends the conversation; `hangs` and `fails` name what does not go well."""

    name = "guest"

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        self._hangs, self._fails = hangs, fails
        self.reached = asyncio.Event()
        self.lines: list[str] = []

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        await self._do("start")
        return arguments, None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        return InteractionResponse(True, "half a \ud800 pair")

    async def score(self, state: Any) -> float | None:
        return 1.0

    async def finalize(self, state: Any) -> None:
        await self._do("finalize")

    async def _do(self, doing: str) -> None:
        self.lines.append(doing)
        if doing == self._fails:
            raise LookupError("the socket is closed")
        if doing == self._hangs:
            self.reached.set()
            await asyncio.Event().wait()


def context_for(
    s: LoopHarness, tool: RecordingTool, guest: FaultyInteraction | None = None, **options: Any
) -> AgentContext:
    guests = InteractionRegistry([guest] if guest else [])
    return AgentContext(s.model, ToolRegistry([tool]), guests, **options)


def task_for(s: LoopHarness, guest: FaultyInteraction | None = None) -> Task:
    return Task(s.task().messages, agent_name="tool", interaction=guest.name if guest else "")


# -- when they are made ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tool", "guest"])
def test_a_token_reaches_a_loop_that_is_still_gathering_and_it_can_go_on(where: str) -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool = RecordingTool(hangs=["create"] if where == "tool" else [])
            guest, cancel = FaultyInteraction(hangs="start" if where == "guest" else ""), CancelToken()
            state = LoopState.begin(task_for(s, guest))
            running = asyncio.create_task(run_agent(state, context_for(s, tool, guest, cancel=cancel)))
            await (tool.wait_for("create") if where == "tool" else guest.reached.wait())
            cancel.cancel()
            state = await running
            assert (state.is_cancelled, state.phase, s.engine.requests) == (True, LoopPhase.PENDING, [])
            if where == "tool":
                assert (tool.events, guest.lines) == (["create", "create cancelled"], [])
            else:
                assert (tool.events, guest.lines) == (["create", "release"], ["start"])
            state = LoopState.decode(state.encode())
            assert (await run_agent(state, context_for(s, RecordingTool(), FaultyInteraction()))).is_finished

    run(test)


def test_cancelled_while_it_gathers_a_loop_can_be_run_again_in_the_same_block() -> None:
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


def test_outside_its_block_a_loop_makes_nobody() -> None:
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


def test_a_token_that_was_used_lets_nobody_be_made() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            tool, guest, cancel = RecordingTool(), FaultyInteraction(), CancelToken()
            cancel.cancel()
            state = LoopState.begin(task_for(s, guest))
            state = await run_agent(state, context_for(s, tool, guest, cancel=cancel))
            assert (state.is_cancelled, tool.events, guest.lines) == (True, [], [])

    run(test)


def test_for_a_state_that_is_over_nobody_is_made() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            state = await run_agent(LoopState.begin(task_for(s)), context_for(s, RecordingTool()))
            written, broken, guest = (
                state.encode(),
                RecordingTool(fails=["create"]),
                FaultyInteraction(fails="start"),
            )
            state = await run_agent(LoopState.decode(written), context_for(s, broken, guest))
            assert state.encode() == written
            assert (broken.events, guest.lines, len(s.engine.requests)) == ([], [], 1)

    run(test)


def test_what_was_saved_outlives_a_cancel_while_it_is_given_back() -> None:
    class Kept(RecordingTool):
        def save(self, instance: Any) -> Any:
            return {"saved": True}

        async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
            await self._record("restore")
            return saved

    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("a long answer", cancel_points=(2,)),))) as s:
            cancel, state = CancelToken(), LoopState.begin(task_for(s))
            running = asyncio.create_task(run_agent(state, context_for(s, Kept(), cancel=cancel)))
            await s.engine.at_cancel_point.wait()
            cancel.cancel()
            state = await running
            slow, cancel = Kept(hangs=["restore"]), CancelToken()
            running = asyncio.create_task(run_agent(state, context_for(s, slow, cancel=cancel)))
            await slow.wait_for("restore")
            cancel.cancel()
            state = await running
            assert (state.is_cancelled, state.tool_states) == (True, {"recorder": {"saved": True}})

    run(test)


# -- how long they may take --------------------------------------------------------------------------


def test_the_limits_say_how_long_making_and_putting_away_may_take() -> None:
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
            for _ in range(20):
                await asyncio.sleep(0)
            assert not running.done(), "a sandbox may take its time"
            move_clock(1)
            state = await running
            assert state.faults == [Fault("recorder", "release", "timed out after 300 s")]
            assert state.is_finished

    run(test)


# -- those that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_an_interaction_that_cannot_be_put_away_takes_nothing_from_the_trajectory(how: str) -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            guest = (
                FaultyInteraction(hangs="finalize") if how == "hangs" else FaultyInteraction(fails="finalize")
            )
            state = LoopState.begin(task_for(s, guest))
            running = asyncio.create_task(run_agent(state, context_for(s, RecordingTool(), guest)))
            if how == "hangs":
                await guest.reached.wait()
                move_clock(30)
            state = await running
            assert (state.is_finished, state.reward_score) == (True, 1.0)
            words = "timed out after 30 s" if how == "hangs" else "the socket is closed"
            assert state.faults == [Fault("guest", "finalize", words)]
            assert LoopState.decode(state.encode()).messages[-1].content == "half a \ufffd pair"

    run(test)


@pytest.mark.parametrize("by_token", [False, True])
def test_an_interaction_that_cannot_be_put_away_hides_no_cancellation(by_token: bool) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("a long answer", cancel_points=(2,)),))) as s:
            guest, cancel = FaultyInteraction(fails="finalize"), CancelToken()
            state = LoopState.begin(task_for(s, guest))
            running = asyncio.create_task(
                run_agent(state, context_for(s, RecordingTool(), guest, cancel=cancel))
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


def test_a_release_that_fails_is_in_the_state() -> None:
    async def test() -> None:
        async with loop_harness(LAST_TURN) as s:
            state = LoopState.begin(task_for(s))
            state = await run_agent(state, context_for(s, RecordingTool(fails=["release"], reward=0.5)))
            assert state.faults == [Fault("recorder", "release", "release is broken")]
            assert state.reward_score == 0.5, "it has nothing to do with what the trajectory is worth"

    run(test)


def test_when_the_interaction_cannot_start_the_tools_are_put_away() -> None:
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
                with pytest.raises(LookupError, match="the socket is closed"):
                    await loop.run()
                assert tool.events == ["create", "release"]
            assert tool.events == ["create", "release"]

    run(test)
