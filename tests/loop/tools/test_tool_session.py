"""Scenarios D2 and D5: tool calls and their results, instances and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from branchline.core.errors import CodecError, EngineError, InputError, ToolError
from branchline.core.message import Media, Message
from branchline.loop.persistence import Fault
from branchline.loop.task import LoopLimits
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.tool_session import filter_media
from tests.loop.fake_tools import RecordingTool, call, result_contents, run_calls, tool_session
from tests.loop.harness import move_clock, run


class ConcurrencyTool(BaseTool):
    """Counts concurrent calls; each returns when its gate is open."""

    name = "concurrent"
    schema = function_schema(name, "", {"type": "object"})

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running = self.max_running = 0
        self.gates: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Condition()

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        text = arguments["text"]
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        async with self.changed:
            self.started.append(text)
            self.changed.notify_all()
        await self.gates.setdefault(text, asyncio.Event()).wait()
        self.running -= 1
        return ToolResult(text)

    async def wait_for_started(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.started) >= count)


def test_calls_run_concurrently_up_to_the_limit() -> None:
    async def test() -> None:
        tool = ConcurrencyTool()
        async with tool_session(tool, max_parallel_calls=2) as session:
            texts = list("abcde")
            calls = [call("concurrent", f'{{"text":"{text}"}}', text) for text in texts]
            running = asyncio.create_task(run_calls(session, *calls))
            await tool.wait_for_started(2)
            assert tool.started == ["a", "b"]
            for text in reversed(texts):
                tool.gates.setdefault(text, asyncio.Event()).set()
            results = await running
        assert tool.started == texts
        assert tool.max_running == 2
        assert [result.content for result in results] == texts
        assert [result.message.tool_call_id for result in results] == texts

    run(test)


def test_a_result_has_a_message_for_the_model_and_a_reward_for_the_trainer() -> None:
    class Painter(BaseTool):
        name = "paint"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("two", PICTURES, reward=1, extras={"size": 2})

    async def test() -> None:
        async with tool_session(Painter()) as session:
            result = await session.run_one(call("paint", call_id="c1"), turn=3)
        message = result.message
        assert (message.role, message.content, message.name, message.tool_call_id) == (
            "tool",
            "two",
            "paint",
            "c1",
        )
        assert message.parts == ("two", *PICTURES)
        expected = ToolResult("two", PICTURES, 1.0, {"size": 2}, False, "paint", 3, "c1", result.seconds)
        assert result == expected
        assert isinstance(result.reward, float)

    run(test)


PICTURES = (Media("image", "d1", b"1"), Media("video", "d2", b"2"))


def test_a_call_of_an_unknown_tool_lists_the_tools() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool("a"), RecordingTool("b")) as session:
            result = await session.run_one(call("x", "{", "c1"))
        text = "Unknown function 'x'. Available tools: ['a', 'b']"
        assert (result.content, result.error) == (text, text)
        assert (result.message.tool_call_id, result.message.name) == ("c1", "x")

    run(test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"text": ', "Expecting value: line 1 column 10 (char 9)"),
        ("{'text': 'a'}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "expected an object, got list"),
    ],
)
def test_arguments_that_are_no_json_are_an_error_for_the_model(arguments: str, message: str) -> None:
    async def test() -> None:
        tool = RecordingTool()
        async with tool_session(tool) as session:
            result = await session.run_one(call(arguments=arguments))
        assert result.content == f"Invalid JSON in arguments for 'recorder': {message}"
        assert result.error == result.content
        assert tool.events == ["create", "release"]

    run(test)


def test_arguments_that_do_not_fit_the_schema_do_not_reach_the_tool() -> None:
    async def test() -> None:
        tool = RecordingTool()
        async with tool_session(tool) as session:
            assert await result_contents(session, call(arguments='{"text": 3}')) == [
                "Error executing tool 'recorder': arguments.text: 3 is not of type 'string'"
            ]
        assert tool.events == ["create", "release"]

    run(test)


def test_an_exception_is_an_error_for_the_model_and_affects_no_other_call() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool("bad", fails=["execute"]), RecordingTool("good")) as session:
            bad, good = await run_calls(session, call("bad"), call("good", '{"text":"fine"}'))
        assert bad.content == "Error executing tool 'bad': execute is broken"
        assert (good.content, good.error) == ("fine", None)

    run(test)


def test_an_error_text_with_half_a_surrogate_pair_can_be_encoded() -> None:
    class SurrogateTool(RecordingTool):
        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            raise ValueError("bad \udcff")

    async def test() -> None:
        tool = SurrogateTool()
        async with tool_session(tool) as session:
            (result,) = await run_calls(session, call(tool.name, "{}"))
            assert result.is_error
            assert "bad \ufffd" in result.content
            assert msgspec.json.encode(result)

    run(test)


def test_a_timeout_cancels_the_call_and_is_an_error_for_the_model() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["execute"])
        async with tool_session(tool, tool_timeout_s=5) as session:
            running = asyncio.create_task(session.run_one(call()))
            await tool.wait_for("execute")
            move_clock(5)
            result = await running
        assert result.content == "Error executing tool 'recorder': timed out after 5 s"
        assert tool.events == ["create", "execute", "execute cancelled", "release"]

    run(test)


def test_waiting_for_other_calls_does_not_count() -> None:
    async def test() -> None:
        tool = ConcurrencyTool()
        async with tool_session(tool, max_parallel_calls=1, tool_timeout_s=5) as session:
            calls = [call("concurrent", f'{{"text":"{text}"}}') for text in "ab"]
            running = asyncio.create_task(run_calls(session, *calls))
            for count, text in enumerate("ab", 1):
                await tool.wait_for_started(count)
                move_clock(4)
                tool.gates.setdefault(text, asyncio.Event()).set()
            assert [result.content for result in await running] == ["a", "b"]

    run(test)


def test_a_tool_can_return_an_error() -> None:
    class Refusing(BaseTool):
        name = "door"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("It is locked.", is_error=True, reward=-0.5)

    async def test() -> None:
        async with tool_session(Refusing()) as session:
            result = await session.run_one(call("door"))
        assert (result.content, result.error, result.reward) == (
            "It is locked.",
            "It is locked.",
            -0.5,
        )

    run(test)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", "the tool returned str, expected ToolResult"),
        (ToolResult(reward=float("nan")), "reward: got nan, expected a finite number"),
        (ToolResult(None), "content: got None, expected a string"),  # type: ignore[arg-type]
        (ToolResult(5), "content: got 5, expected a string"),  # type: ignore[arg-type]
        (ToolResult(media=b"123"), "media: got bytes, expected a tuple of Media"),  # type: ignore[arg-type]
        (ToolResult(media=("x",)), "media: got tuple, expected a tuple of Media"),  # type: ignore[arg-type]
        (ToolResult(media=None), "media: got NoneType, expected a tuple of Media"),  # type: ignore[arg-type]
        (ToolResult(extras=[1]), "extras: got list, expected an object"),  # type: ignore[arg-type]
        (
            ToolResult(extras={"handle": object()}),
            "extras: got a object, expected values that JSON can hold",
        ),
    ],
)
def test_an_invalid_result_is_an_error(result: Any, message: str) -> None:
    class Odd(BaseTool):
        name = "odd"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return result  # type: ignore[no-any-return]

    async def test() -> None:
        async with tool_session(Odd()) as session:
            assert await result_contents(session, call("odd")) == [f"Error executing tool 'odd': {message}"]

    run(test)


def test_results_become_plain_data() -> None:
    class Odd(BaseTool):
        name = "odd"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return next(results)

    results = iter(
        [
            ToolResult("a", extras={"half": "\ud800", "set": {1}, 2: np.float32(0.5)}),  # type: ignore[dict-item]
            ToolResult("b", extras=None),  # type: ignore[arg-type]
            ToolResult("c", media=[PICTURES[0]], reward=True),  # type: ignore[arg-type]
        ]
    )

    async def test() -> None:
        async with tool_session(Odd()) as session:
            first, second, third = [await session.run_one(call("odd")) for _ in range(3)]
        assert first.extras == {"half": "\ufffd", "set": [1], "2": 0.5}
        assert (second.content, second.extras, second.error) == ("b", {}, None)
        assert third.message.parts == ("c", PICTURES[0])
        assert (third.reward, type(third.reward)) == (1.0, float)

    run(test)


def test_surrogates_in_a_result_are_replaced() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool()) as session:
            assert await result_contents(session, call(arguments='{"text":"a\\ud83d"}')) == ["a\ufffd"]

    run(test)


# -- misuse ------------------------------------------------------------------------------------------


def test_a_tool_session_is_opened_once_and_not_used_outside() -> None:
    async def test() -> None:
        session = tool_session(RecordingTool())
        with pytest.raises(RuntimeError, match="is new, expected open"):
            await session.run_one(call())
        async with session:
            with pytest.raises(RuntimeError, match="is open, expected new"):
                await session.__aenter__()
        with pytest.raises(RuntimeError, match="is closed, expected open"):
            await session.calc_rewards()

    run(test)


LIFECYCLE = ["create", "execute", "release"]


def test_instances_are_created_and_released_once() -> None:
    async def test() -> None:
        used, idle = RecordingTool("used"), RecordingTool("idle")
        async with tool_session(used, idle, arguments={"used": {"suffix": "!"}}) as session:
            assert (used.events, idle.events) == (["create"], ["create"])
            assert await result_contents(session, call("used", '{"text":"a"}')) == ["a!"]
            assert await result_contents(session, call("used", '{"text":"b"}')) == ["b!"]
        assert used.events == ["create", "execute", "execute", "release"]
        assert idle.events == ["create", "release"]
        assert session.release_faults == []

    run(test)


def test_instances_are_created_concurrently() -> None:
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


def test_when_a_create_fails_the_other_instances_are_released() -> None:
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
        assert slow.events == ["create", "create cancelled"], "it was never created"

    run(test)


def test_when_several_creates_fail_all_are_reported() -> None:
    async def test() -> None:
        with pytest.raises(ToolError, match="'a'") as error:
            async with tool_session(
                RecordingTool("a", fails=["create"]), RecordingTool("b", fails=["create"])
            ):
                raise AssertionError("nothing may run")
        assert error.value.__notes__ == ["also: tool 'b': create: create is broken"]

    run(test)


def test_a_create_timeout_is_an_error() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["create"])
        entering = asyncio.create_task(tool_session(tool, tool_create_timeout_s=7).__aenter__())
        await tool.wait_for("create")
        move_clock(7)
        with pytest.raises(ToolError, match=r"tool 'recorder': create: timed out after 7 s"):
            await entering
        assert tool.events == ["create", "create cancelled"]

    run(test)


def test_an_instance_that_arrives_after_the_grace_period_is_released() -> None:
    class Late(RecordingTool):
        stop: asyncio.Event
        task: asyncio.Task[Any] | None = None

        async def create(self, trajectory: str, **arguments: Any) -> Any:
            self.task = asyncio.current_task()
            self.events.append("create")
            self.reached.setdefault("create", asyncio.Event()).set()
            while not self.stop.is_set():
                try:
                    await self.stop.wait()
                except asyncio.CancelledError:
                    self.reached.setdefault("cancelled", asyncio.Event()).set()
            return {}

    async def test() -> None:
        tool = Late()
        tool.stop = asyncio.Event()
        entering = asyncio.create_task(tool_session(tool, tool_create_timeout_s=5).__aenter__())
        await tool.wait_for("create")
        move_clock(5)
        await tool.wait_for("cancelled")
        move_clock(LoopLimits().cancel_grace_s)
        with pytest.raises(ToolError, match="timed out"):
            await entering
        assert tool.events == ["create"]
        tool.stop.set()
        assert tool.task is not None
        await asyncio.wait({tool.task})
        assert tool.events == ["create", "release"]

    run(test)


def test_a_second_exit_releases_nothing() -> None:
    async def test() -> None:
        tool = RecordingTool()
        session = await tool_session(tool).__aenter__()
        await asyncio.gather(session.__aexit__(), session.__aexit__())
        assert tool.events == ["create", "release"]

    run(test)


def test_an_error_in_the_block_is_raised_after_the_release() -> None:
    async def test() -> None:
        tool = RecordingTool(fails=["release"])
        with pytest.raises(ValueError, match="the loop failed"):
            async with tool_session(tool) as session:
                raise ValueError("the loop failed")
        assert tool.events == ["create", "release"]
        assert session.release_faults == [Fault("recorder", "release", "release is broken")]

    run(test)


def test_a_failed_release_does_not_prevent_others() -> None:
    async def test() -> None:
        bad, stuck, good = (
            RecordingTool("bad", fails=["release"]),
            RecordingTool("stuck", hangs=["release"]),
            RecordingTool("good"),
        )
        session = await tool_session(bad, stuck, good, tool_release_timeout_s=3).__aenter__()
        exiting = asyncio.create_task(session.__aexit__())
        await stuck.wait_for("release")
        move_clock(3)
        await exiting
        assert good.events == ["create", "release"]
        assert session.release_faults == [
            Fault("bad", "release", "release is broken"),
            Fault("stuck", "release", "timed out after 3 s"),
        ]

    run(test)


def test_a_failed_reward_is_a_fault_and_the_others_are_returned() -> None:
    async def test() -> None:
        tools = (
            RecordingTool("worth", reward=0.5),
            RecordingTool("bad", fails=["calc_reward"]),
            RecordingTool("none"),
            RecordingTool("odd", reward=float("inf")),
            RecordingTool("text", reward="much"),
        )
        async with tool_session(*tools) as session:
            rewards, faults = await session.calc_rewards()
        assert rewards == {"worth": 0.5}
        assert [(fault.name, fault.operation) for fault in faults] == [
            ("bad", "calc_reward"),
            ("odd", "calc_reward"),
            ("text", "calc_reward"),
        ]
        assert faults[0].error == "calc_reward is broken"
        assert faults[1].error == "reward: got inf, expected a finite number"
        assert all(tool.events == ["create", "calc_reward", "release"] for tool in tools)

    run(test)


def test_a_reward_timeout_is_a_fault() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["calc_reward"])
        async with tool_session(tool, tool_timeout_s=5) as session:
            scoring = asyncio.create_task(session.calc_rewards())
            await tool.wait_for("calc_reward")
            move_clock(5)
            assert await scoring == ({}, [Fault("recorder", "calc_reward", "timed out after 5 s")])

    run(test)


def test_a_trajectory_may_change_its_arguments() -> None:
    """Samples of one task start with the same arguments."""

    class Shop(RecordingTool):
        async def create(self, trajectory: str, **arguments: Any) -> Any:
            arguments["stock"].remove("apple")
            arguments["shelves"]["top"] = "empty"
            return arguments

    async def test() -> None:
        arguments = {"recorder": {"stock": ["apple"], "shelves": {}}}
        for _ in range(2):
            async with tool_session(Shop(), arguments=arguments):
                assert arguments == {"recorder": {"stock": ["apple"], "shelves": {}}}

    run(test)


# -- cancellation ------------------------------------------------------------------------------------


def test_cancelling_calls_cancels_the_running_ones_and_starts_no_other() -> None:
    async def test() -> None:
        running, waiting = RecordingTool("running", hangs=["execute"]), RecordingTool("waiting")
        async with tool_session(running, waiting, max_parallel_calls=1) as session:
            work = asyncio.create_task(run_calls(session, call("running"), call("waiting")))
            await running.wait_for("execute")
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert running.events == ["create", "execute", "execute cancelled"]
            assert waiting.events == ["create"]
            assert await result_contents(session, call("waiting", '{"text":"still here"}')) == ["still here"]
        assert running.events[-1] == "release"
        assert waiting.events == LIFECYCLE

    run(test)


@pytest.mark.parametrize("again", [False, True], ids=["once", "and again while releasing"])
def test_a_cancelled_trajectory_releases_every_instance_once(again: bool) -> None:
    async def test() -> None:
        gate = asyncio.Event()

        class Slow(RecordingTool):
            async def release(self, instance: Any) -> None:
                await super().release(instance)
                await gate.wait()
                self.events.append("released")

        working, slow = RecordingTool("working", hangs=["execute"]), Slow("slow")

        async def trajectory() -> None:
            async with tool_session(working, slow) as session:
                await session.run_one(call("working"))

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


def test_a_cancellation_during_create_releases_the_created_instances() -> None:
    async def test() -> None:
        created, creating = RecordingTool("created"), RecordingTool("creating", hangs=["create"])
        entering = asyncio.create_task(tool_session(created, creating).__aenter__())
        await creating.wait_for("create")
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert created.events == ["create", "release"]
        assert creating.events == ["create", "create cancelled"]

    run(test)


def test_a_timeout_around_the_trajectory_is_still_a_timeout() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["execute"])

        async def trajectory() -> None:
            async with asyncio.timeout(5), tool_session(tool) as session:
                await session.run_one(call())

        task = asyncio.create_task(trajectory())
        await tool.wait_for("execute")
        move_clock(5)
        with pytest.raises(TimeoutError):
            await task
        assert tool.events[-1] == "release"

    run(test)


# -- media -------------------------------------------------------------------------------------------

IMAGE, FILM = Media("image", "d1", b"1"), Media("video", "d2", b"2")


def result_with(content: str, *media: Media) -> ToolResult:
    return ToolResult(content, media, 0.5, {"x": 1}, tool="look", turn=1, tool_call_id="c")


@pytest.mark.parametrize("kind", [CodecError, InputError])
def test_only_results_with_refused_media_become_errors(kind: type[Exception]) -> None:
    counted: list[list[int]] = []

    async def count_tokens(messages: Sequence[Message]) -> int:
        counted.append([len(message.media) for message in messages])
        if any(media.kind == "video" for message in messages for media in message.media):
            raise kind("messages[7]: carries a video, but toy takes no videos")
        return 1

    async def test() -> None:
        results = [result_with("a", IMAGE), result_with("b"), result_with("c", FILM), result_with("d", IMAGE)]
        accepted = await filter_media(results, count_tokens)
        assert [accepted[index] for index in (0, 1, 3)] == [results[index] for index in (0, 1, 3)]
        text = "Error executing tool 'look': its result: carries a video, but toy takes no videos"
        assert accepted[2] == structs.replace(result_with(text), is_error=True), "the reward is kept"
        assert counted == [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]

    run(test)


def test_results_without_media_are_not_counted() -> None:
    async def count_tokens(messages: Sequence[Message]) -> int:
        raise AssertionError("must not be called")

    async def test() -> None:
        results = [result_with("a"), result_with("b")]
        assert await filter_media(results, count_tokens) == results

    run(test)


def test_another_error_while_counting_is_raised() -> None:
    async def count_tokens(messages: Sequence[Message]) -> int:
        raise EngineError("gone")

    async def test() -> None:
        with pytest.raises(EngineError, match="gone"):
            await filter_media([result_with("a", IMAGE)], count_tokens)

    run(test)
