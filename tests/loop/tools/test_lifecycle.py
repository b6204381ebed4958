"""Scenario D5: the lives of tool instances, and what cancellation does to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline.core.errors import ToolError
from branchline.loop.faults import Fault
from tests.loop.clock_runner import move_clock, run
from tests.loop.tools.fake_tools import RecordingTool, call, result_contents, tool_session

LIFECYCLE = ["create", "execute", "release"]


def test_instances_are_created_once_at_the_start_and_released_once_at_the_end() -> None:
    async def test() -> None:
        used, idle = RecordingTool("used"), RecordingTool("idle")
        async with tool_session(used, idle, arguments={"used": {"suffix": "!"}}) as workshop:
            assert (used.events, idle.events) == (["create"], ["create"])
            assert await result_contents(workshop, call("used", '{"text":"a"}')) == ["a!"]
            assert await result_contents(workshop, call("used", '{"text":"b"}')) == ["b!"]
        assert used.events == ["create", "execute", "execute", "release"]
        assert idle.events == ["create", "release"]
        assert workshop.faults == []

    run(test)


def test_all_instances_are_created_at_the_same_time() -> None:
    async def test() -> None:
        tools = [RecordingTool(name, hangs=["create"]) for name in "abc"]
        entering = asyncio.create_task(tool_session(*tools).__aenter__())
        for tool in tools:
            await tool.wait_for("create")
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert [tool.events for tool in tools] == [["create", "create cancelled"]] * 3

    run(test)


def test_when_one_cannot_be_created_the_others_are_released_and_the_error_names_it() -> None:
    async def test() -> None:
        good, bad, slow = (
            RecordingTool("good"),
            RecordingTool("bad", fails=["create"]),
            RecordingTool("slow", hangs=["create"]),
        )
        with pytest.raises(ToolError) as error:
            async with tool_session(good, bad, slow):
                raise AssertionError("nothing may run")
        assert str(error.value) == "tool 'bad': create: create is broken"
        assert error.value.tool == "bad"
        assert isinstance(error.value.__cause__, RuntimeError)
        assert good.events == ["create", "release"]
        assert bad.events == ["create"]
        assert slow.events == ["create", "create cancelled"], "what never was is not released"

    run(test)


def test_when_several_cannot_be_created_none_is_forgotten() -> None:
    async def test() -> None:
        with pytest.raises(ToolError, match="'a'") as error:
            async with tool_session(
                RecordingTool("a", fails=["create"]), RecordingTool("b", fails=["create"])
            ):
                raise AssertionError("nothing may run")
        assert error.value.__notes__ == ["also: tool 'b': create: create is broken"]

    run(test)


def test_a_tool_that_takes_too_long_to_create_is_an_error() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["create"])
        entering = asyncio.create_task(tool_session(tool, create_timeout_s=7).__aenter__())
        await tool.wait_for("create")
        move_clock(7)
        with pytest.raises(ToolError, match=r"tool 'diary': create: timed out after 7 s"):
            await entering
        assert tool.events == ["create", "create cancelled"]

    run(test)


def test_an_instance_that_comes_after_everybody_left_is_released_all_the_same() -> None:
    class Late(RecordingTool):
        leave: asyncio.Event
        task: asyncio.Task[Any] | None = None

        async def create(self, trajectory: str, **arguments: Any) -> Any:
            self.task = asyncio.current_task()
            self.events.append("create")
            self.reached.setdefault("create", asyncio.Event()).set()
            while not self.leave.is_set():
                try:
                    await self.leave.wait()
                except asyncio.CancelledError:
                    self.reached.setdefault("cancelled", asyncio.Event()).set()
            return {}

    async def test() -> None:
        tool = Late()
        tool.leave = asyncio.Event()
        entering = asyncio.create_task(tool_session(tool, create_timeout_s=5, cancel_grace_s=2).__aenter__())
        await tool.wait_for("create")
        move_clock(5)
        await tool.wait_for("cancelled")
        move_clock(2)
        with pytest.raises(ToolError, match="timed out"):
            await entering
        assert tool.events == ["create"]
        tool.leave.set()
        assert tool.task is not None
        await asyncio.wait({tool.task})
        assert tool.events == ["create", "release"]

    run(test)


def test_leaving_twice_releases_once() -> None:
    async def test() -> None:
        tool = RecordingTool()
        workshop = await tool_session(tool).__aenter__()
        await asyncio.gather(workshop.__aexit__(), workshop.__aexit__())
        assert tool.events == ["create", "release"]

    run(test)


def test_an_error_in_the_block_releases_and_is_not_hidden() -> None:
    async def test() -> None:
        tool = RecordingTool(fails=["release"])
        with pytest.raises(ValueError, match="the loop failed"):
            async with tool_session(tool) as workshop:
                raise ValueError("the loop failed")
        assert tool.events == ["create", "release"]
        assert workshop.faults == [Fault("diary", "release", "release is broken")]

    run(test)


def test_a_release_that_fails_or_hangs_keeps_no_other_from_being_released() -> None:
    async def test() -> None:
        bad, stuck, good = (
            RecordingTool("bad", fails=["release"]),
            RecordingTool("stuck", hangs=["release"]),
            RecordingTool("good"),
        )
        workshop = await tool_session(bad, stuck, good, release_timeout_s=3).__aenter__()
        leaving = asyncio.create_task(workshop.__aexit__())
        await stuck.wait_for("release")
        move_clock(3)
        await leaving
        assert good.events == ["create", "release"]
        assert workshop.faults == [
            Fault("bad", "release", "release is broken"),
            Fault("stuck", "release", "timed out after 3 s"),
        ]

    run(test)


def test_rewards_are_calculated_and_a_tool_that_fails_to_hides_no_other() -> None:
    async def test() -> None:
        tools = (
            RecordingTool("worth", reward=0.5),
            RecordingTool("bad", fails=["calc_reward"]),
            RecordingTool("none"),
            RecordingTool("odd", reward=float("inf")),
            RecordingTool("text", reward="much"),
        )
        async with tool_session(*tools) as workshop:
            rewards = await workshop.calc_rewards()
        assert rewards == {"worth": 0.5, "bad": None, "none": None, "odd": None, "text": None}
        assert [(fault.name, fault.operation) for fault in workshop.faults] == [
            ("bad", "calc_reward"),
            ("odd", "calc_reward"),
            ("text", "calc_reward"),
        ]
        assert workshop.faults[0].error == "calc_reward is broken"
        assert workshop.faults[1].error == "reward: got inf, expected a finite number"
        assert all(tool.events == ["create", "calc_reward", "release"] for tool in tools)

    run(test)


def test_a_judgement_that_takes_too_long_is_a_fault() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["calc_reward"])
        async with tool_session(tool, timeout_s=5) as workshop:
            judging = asyncio.create_task(workshop.calc_rewards())
            await tool.wait_for("calc_reward")
            move_clock(5)
            assert await judging == {"diary": None}
        assert workshop.faults == [Fault("diary", "calc_reward", "timed out after 5 s")]

    run(test)


def test_what_one_trajectory_does_to_its_arguments_is_no_others_business() -> None:
    """Samples of one task, a group say, begin with the same arguments."""

    class Shop(RecordingTool):
        async def create(self, trajectory: str, **arguments: Any) -> Any:
            arguments["stock"].remove("apple")
            arguments["shelves"]["top"] = "empty"
            return arguments

    async def test() -> None:
        arguments = {"diary": {"stock": ["apple"], "shelves": {}}}
        for _ in range(2):
            async with tool_session(Shop(), arguments=arguments):
                assert arguments == {"diary": {"stock": ["apple"], "shelves": {}}}

    run(test)


# -- cancellation ------------------------------------------------------------------------------------


def test_cancelling_a_run_cancels_the_calls_that_run_and_starts_no_other() -> None:
    async def test() -> None:
        running, waiting = RecordingTool("running", hangs=["execute"]), RecordingTool("waiting")
        async with tool_session(running, waiting, max_parallel_calls=1) as workshop:
            work = asyncio.create_task(workshop.run([call("running"), call("waiting")]))
            await running.wait_for("execute")
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert running.events == ["create", "execute", "execute cancelled"]
            assert waiting.events == ["create"]
            assert await result_contents(workshop, call("waiting", '{"text":"still here"}')) == ["still here"]
        assert running.events[-1] == "release"
        assert waiting.events == LIFECYCLE

    run(test)


@pytest.mark.parametrize("again", [False, True], ids=["once", "and again while releasing"])
def test_a_cancelled_trajectory_releases_every_instance_exactly_once(again: bool) -> None:
    async def test() -> None:
        gate = asyncio.Event()

        class Slow(RecordingTool):
            async def release(self, instance: Any) -> None:
                await super().release(instance)
                await gate.wait()
                self.events.append("released")

        working, slow = RecordingTool("working", hangs=["execute"]), Slow("slow")

        async def trajectory() -> None:
            async with tool_session(working, slow) as workshop:
                await workshop.run([call("working")])

        task = asyncio.create_task(trajectory())
        await working.wait_for("execute")
        task.cancel()
        await slow.wait_for("release")
        if again:
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done(), "it waits for the release"
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert working.events == ["create", "execute", "execute cancelled", "release"]
        assert slow.events == ["create", "release", "released"]

    run(test)


def test_cancelled_while_it_is_being_created_releases_what_was_there_already() -> None:
    async def test() -> None:
        there, coming = RecordingTool("there"), RecordingTool("coming", hangs=["create"])
        entering = asyncio.create_task(tool_session(there, coming).__aenter__())
        await coming.wait_for("create")
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert there.events == ["create", "release"]
        assert coming.events == ["create", "create cancelled"]

    run(test)


def test_a_timeout_around_the_trajectory_is_still_a_timeout() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["execute"])

        async def trajectory() -> None:
            async with asyncio.timeout(5), tool_session(tool) as workshop:
                await workshop.run([call()])

        task = asyncio.create_task(trajectory())
        await tool.wait_for("execute")
        move_clock(5)
        with pytest.raises(TimeoutError):
            await task
        assert tool.events[-1] == "release"

    run(test)
