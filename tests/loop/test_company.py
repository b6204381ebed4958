"""Who works with a model on one trajectory: when they are made, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from branchline.core.errors import ToolError
from branchline.core.message import Message
from branchline.loop.agents import Setting, run_agent
from branchline.loop.cancel import CancelToken
from branchline.loop.faults import Fault
from branchline.loop.interactions.base import BaseInteraction, Response
from branchline.loop.interactions.registry import InteractionRegistry, Partner
from branchline.loop.machine import AgentLoop
from branchline.loop.state import LoopLimits, LoopState, State, Task
from branchline.loop.tools.registry import Selection, ToolRegistry
from tests.loop.playing import Script, Stage, Turn, stage
from tests.loop.running import move_clock, run
from tests.loop.tools.doubles import Diary

END = Script((Turn("end"),))


class Guest(BaseInteraction):
    """Ends the conversation; `hangs` and `fails` name what does not go well."""

    name = "guest"

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        self._hangs, self._fails = hangs, fails
        self.reached = asyncio.Event()
        self.lines: list[str] = []

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        await self._do("start")
        return arguments, None

    async def respond(self, state: Any, messages: Sequence[Message]) -> Response:
        return Response(True, "half a \ud800 pair")

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


def setting_of(s: Stage, tool: Diary, guest: Guest | None = None, **options: Any) -> Setting:
    guests = InteractionRegistry([guest] if guest else [])
    return Setting(s.model, ToolRegistry([tool]), guests, **options)


def task_of(s: Stage, guest: Guest | None = None) -> Task:
    return Task(s.task().messages, agent_name="tool", interaction=guest.name if guest else "")


# -- when they are made ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tool", "guest"])
def test_a_token_reaches_a_loop_that_is_still_gathering_and_it_can_go_on(where: str) -> None:
    async def test() -> None:
        async with stage(END) as s:
            tool = Diary(hangs=["create"] if where == "tool" else [])
            guest, cancel = Guest(hangs="start" if where == "guest" else ""), CancelToken()
            state = LoopState.begin(task_of(s, guest))
            running = asyncio.create_task(run_agent(state, setting_of(s, tool, guest, cancel=cancel)))
            await (tool.until("create") if where == "tool" else guest.reached.wait())
            cancel.cancel()
            state = await running
            assert (state.is_cancel, state.state, s.engine.asked) == (True, State.PENDING, [])
            if where == "tool":
                assert (tool.lines, guest.lines) == (["create", "create cancelled"], [])
            else:
                assert (tool.lines, guest.lines) == (["create", "release"], ["start"])
            state = LoopState.decode(state.encode())
            assert (await run_agent(state, setting_of(s, Diary(), Guest()))).is_over

    run(test)


def test_cancelled_while_it_gathers_a_loop_can_be_run_again_in_the_same_block() -> None:
    async def test() -> None:
        async with stage(END) as s:
            tool, cancel = Diary(hangs=["create"]), CancelToken()
            async with AgentLoop(s.model, LoopState.begin(s.task()), tools=Selection((tool,))) as loop:
                running = asyncio.create_task(loop.run(cancel))
                await tool.until("create")
                cancel.cancel()
                assert (await running).is_cancel
                tool._hangs = ()
                assert (await loop.run()).is_over
            assert tool.lines == ["create", "create cancelled", "create", "calc_reward", "release"]

    run(test)


def test_outside_its_block_a_loop_makes_nobody() -> None:
    async def test() -> None:
        async with stage(END) as s:
            tool = Diary()
            loop = AgentLoop(s.model, LoopState.begin(s.task(), "t"), tools=Selection((tool,)))
            with pytest.raises(RuntimeError, match="loop of t: runs outside its block, expected inside"):
                await loop.run()
            cancel = CancelToken()
            cancel.cancel()
            async with loop:
                await loop.run(cancel)
            with pytest.raises(RuntimeError, match="outside its block"):
                await loop.run()
            assert tool.lines == []

    run(test)


def test_a_token_that_was_used_lets_nobody_be_made() -> None:
    async def test() -> None:
        async with stage(END) as s:
            tool, guest, cancel = Diary(), Guest(), CancelToken()
            cancel.cancel()
            state = LoopState.begin(task_of(s, guest))
            state = await run_agent(state, setting_of(s, tool, guest, cancel=cancel))
            assert (state.is_cancel, tool.lines, guest.lines) == (True, [], [])

    run(test)


def test_for_a_state_that_is_over_nobody_is_made() -> None:
    async def test() -> None:
        async with stage(END) as s:
            state = await run_agent(LoopState.begin(task_of(s)), setting_of(s, Diary()))
            written, broken, guest = state.encode(), Diary(fails=["create"]), Guest(fails="start")
            state = await run_agent(LoopState.decode(written), setting_of(s, broken, guest))
            assert state.encode() == written
            assert (broken.lines, guest.lines, len(s.engine.asked)) == ([], [], 1)

    run(test)


def test_what_was_saved_outlives_a_cancel_while_it_is_given_back() -> None:
    class Kept(Diary):
        def save(self, instance: Any) -> Any:
            return {"saved": True}

        async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
            await self._do("restore")
            return saved

    async def test() -> None:
        async with stage(Script((Turn("a long answer", holds=(2,)),))) as s:
            cancel, state = CancelToken(), LoopState.begin(task_of(s))
            running = asyncio.create_task(run_agent(state, setting_of(s, Kept(), cancel=cancel)))
            await s.engine.held.wait()
            cancel.cancel()
            state = await running
            slow, cancel = Kept(hangs=["restore"]), CancelToken()
            running = asyncio.create_task(run_agent(state, setting_of(s, slow, cancel=cancel)))
            await slow.until("restore")
            cancel.cancel()
            state = await running
            assert (state.is_cancel, state.tool_states) == (True, {"diary": {"saved": True}})

    run(test)


# -- how long they may take --------------------------------------------------------------------------


def test_the_limits_say_how_long_making_and_putting_away_may_take() -> None:
    async def test() -> None:
        limits = LoopLimits(tool_create_timeout_s=7, tool_release_timeout_s=300)
        async with stage(END) as s:
            slow = Diary(hangs=["create"])
            running = asyncio.create_task(
                run_agent(LoopState.begin(task_of(s)), setting_of(s, slow, limits=limits))
            )
            await slow.until("create")
            move_clock(7)
            with pytest.raises(ToolError, match="tool 'diary': create: timed out after 7 s"):
                await running
            stuck, state = Diary(hangs=["release"]), LoopState.begin(task_of(s))
            running = asyncio.create_task(run_agent(state, setting_of(s, stuck, limits=limits)))
            await stuck.until("release")
            move_clock(299)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not running.done(), "a sandbox may take its time"
            move_clock(1)
            state = await running
            assert state.faults == [Fault("diary", "release", "timed out after 300 s")]
            assert state.is_over

    run(test)


# -- those that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_an_interaction_that_cannot_be_put_away_takes_nothing_from_the_trajectory(how: str) -> None:
    async def test() -> None:
        async with stage(END) as s:
            guest = Guest(hangs="finalize") if how == "hangs" else Guest(fails="finalize")
            state = LoopState.begin(task_of(s, guest))
            running = asyncio.create_task(run_agent(state, setting_of(s, Diary(), guest)))
            if how == "hangs":
                await guest.reached.wait()
                move_clock(30)
            state = await running
            assert (state.is_over, state.reward_score) == (True, 1.0)
            words = "timed out after 30 s" if how == "hangs" else "the socket is closed"
            assert state.faults == [Fault("guest", "finalize", words)]
            assert LoopState.decode(state.encode()).messages[-1].text == "half a \ufffd pair"

    run(test)


@pytest.mark.parametrize("by_token", [False, True])
def test_an_interaction_that_cannot_be_put_away_hides_no_cancellation(by_token: bool) -> None:
    async def test() -> None:
        async with stage(Script((Turn("a long answer", holds=(2,)),))) as s:
            guest, cancel = Guest(fails="finalize"), CancelToken()
            state = LoopState.begin(task_of(s, guest))
            running = asyncio.create_task(run_agent(state, setting_of(s, Diary(), guest, cancel=cancel)))
            await s.engine.held.wait()
            if by_token:
                cancel.cancel()
                assert await running is state
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert state.is_cancel
            assert [fault.doing for fault in state.faults] == ["finalize"]

    run(test)


def test_a_release_that_fails_is_in_the_state() -> None:
    async def test() -> None:
        async with stage(END) as s:
            state = LoopState.begin(task_of(s))
            state = await run_agent(state, setting_of(s, Diary(fails=["release"], reward=0.5)))
            assert state.faults == [Fault("diary", "release", "release is broken")]
            assert state.reward_score == 0.5, "it has nothing to do with what the trajectory is worth"

    run(test)


def test_when_the_interaction_cannot_start_the_tools_are_put_away() -> None:
    async def test() -> None:
        async with stage(END) as s:
            tool = Diary()
            loop = AgentLoop(
                s.model,
                LoopState.begin(s.task()),
                tools=Selection((tool,)),
                partner=Partner(Guest(fails="start")),
            )
            async with loop:
                with pytest.raises(LookupError, match="the socket is closed"):
                    await loop.run()
                assert tool.lines == ["create", "release"]
            assert tool.lines == ["create", "release"]

    run(test)
