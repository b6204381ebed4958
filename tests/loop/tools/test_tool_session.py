"""Scenario D2: calls and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import CodecError, EngineError, InputError, ToolError
from branchline.core.message import Media, Message
from branchline.loop.persistence import Fault
from branchline.loop.state import ToolRecord
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.tool_session import ToolLimits, ToolOutcome, filter_media
from tests.loop.fake_tools import RecordingTool, call, result_contents, tool_session
from tests.loop.harness import move_clock, run


class ConcurrencyTool(BaseTool):
    """Knows how many of its calls run at once; each runs until it is let go."""

    name = "counting"
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


def test_calls_run_side_by_side_up_to_the_limit_and_the_rest_after_in_order() -> None:
    async def test() -> None:
        tool = ConcurrencyTool()
        async with tool_session(tool, max_parallel_calls=2) as workshop:
            texts = list("abcde")
            running = asyncio.create_task(
                workshop.run([call("counting", f'{{"text":"{text}"}}', text) for text in texts])
            )
            await tool.wait_for_started(2)
            assert tool.started == ["a", "b"]
            for text in reversed(texts):
                tool.gates.setdefault(text, asyncio.Event()).set()
            outcomes = await running
        assert tool.started == texts, "none was dropped"
        assert tool.max_running == 2
        assert [outcome.message.content for outcome in outcomes] == texts
        assert [outcome.message.tool_call_id for outcome in outcomes] == texts
        assert [outcome.call.id for outcome in outcomes] == texts

    run(test)


def test_an_outcome_says_what_the_model_sees_and_what_the_trainer_gets() -> None:
    class Painter(BaseTool):
        name = "paint"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("two", PICTURES, reward=1, extras={"size": 2})

    async def test() -> None:
        async with tool_session(Painter()) as workshop:
            (outcome,) = await workshop.run([call("paint", call_id="c1")])
        message = outcome.message
        assert (message.role, message.content, message.name, message.tool_call_id) == (
            "tool",
            "two",
            "paint",
            "c1",
        )
        assert message.parts == ("two", *PICTURES)
        assert outcome == ToolOutcome(
            outcome.call, message, reward=1.0, extras={"size": 2}, seconds=outcome.seconds
        )
        assert isinstance(outcome.reward, float)

    run(test)


PICTURES = (Media("image", "d1", b"1"), Media("video", "d2", b"2"))


def test_a_call_of_nothing_names_the_tools_there_are() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool("a"), RecordingTool("b")) as workshop:
            (outcome,) = await workshop.run([call("x", "{", "c1")])
        text = "Unknown function 'x'. Available tools: ['a', 'b']"
        assert (outcome.message.content, outcome.error) == (text, text)
        assert (outcome.message.tool_call_id, outcome.message.name) == ("c1", "x")

    run(test)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"text": ', "Expecting value: line 1 column 10 (char 9)"),
        ("{'text': 'a'}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "expected an object, got list"),
    ],
)
def test_arguments_that_are_no_json_are_told_to_the_model(arguments: str, why: str) -> None:
    async def test() -> None:
        tool = RecordingTool()
        async with tool_session(tool) as workshop:
            (outcome,) = await workshop.run([call(arguments=arguments)])
        assert outcome.message.content == f"Invalid JSON in arguments for 'recorder': {why}"
        assert outcome.error == outcome.message.content
        assert tool.events == ["create", "release"]

    run(test)


def test_arguments_that_do_not_fit_the_schema_are_told_to_the_model_and_not_to_the_tool() -> None:
    async def test() -> None:
        tool = RecordingTool()
        async with tool_session(tool) as workshop:
            assert await result_contents(workshop, call(arguments='{"text": 3}')) == [
                "Error executing tool 'recorder': arguments.text: 3 is not of type 'string'"
            ]
        assert tool.events == ["create", "release"]

    run(test)


def test_a_tool_that_raises_is_told_to_the_model_and_disturbs_no_other_call() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool("bad", fails=["execute"]), RecordingTool("good")) as workshop:
            bad, good = await workshop.run([call("bad"), call("good", '{"text":"fine"}')])
        assert bad.message.content == "Error executing tool 'bad': execute is broken"
        assert (good.message.content, good.error) == ("fine", None)

    run(test)


def test_a_tool_that_takes_too_long_is_cancelled_and_told_to_the_model() -> None:
    async def test() -> None:
        tool = RecordingTool(hangs=["execute"])
        async with tool_session(tool, timeout_s=5) as workshop:
            running = asyncio.create_task(workshop.run([call()]))
            await tool.wait_for("execute")
            move_clock(5)
            (outcome,) = await running
        assert outcome.message.content == "Error executing tool 'recorder': timed out after 5 s"
        assert tool.events == ["create", "execute", "execute cancelled", "release"]

    run(test)


def test_waiting_for_a_turn_is_not_working_too_long() -> None:
    async def test() -> None:
        tool = ConcurrencyTool()
        async with tool_session(tool, max_parallel_calls=1, timeout_s=5) as workshop:
            calls = [call("counting", f'{{"text":"{text}"}}') for text in "ab"]
            running = asyncio.create_task(workshop.run(calls))
            for count, text in enumerate("ab", 1):
                await tool.wait_for_started(count)
                move_clock(4)
                tool.gates.setdefault(text, asyncio.Event()).set()
            assert [outcome.message.content for outcome in await running] == ["a", "b"]

    run(test)


def test_a_tool_can_say_itself_that_it_failed() -> None:
    class Refusing(BaseTool):
        name = "door"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("It is locked.", is_error=True, reward=-0.5)

    async def test() -> None:
        async with tool_session(Refusing()) as workshop:
            (outcome,) = await workshop.run([call("door")])
        assert (outcome.message.content, outcome.error, outcome.reward) == (
            "It is locked.",
            "It is locked.",
            -0.5,
        )

    run(test)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ("text", "the tool returned str, expected ToolResult"),
        (ToolResult(reward=float("nan")), "reward: got nan, expected a finite number"),
        (ToolResult(None), "text: got None, expected a string"),
        (ToolResult(5), "text: got 5, expected a string"),
        (ToolResult(media=b"123"), "media: got bytes, expected a tuple of Media"),
        (ToolResult(media=("x",)), "media: got tuple, expected a tuple of Media"),
        (ToolResult(media=None), "media: got NoneType, expected a tuple of Media"),
        (ToolResult(extras=[1]), "extras: got list, expected an object"),
        (
            ToolResult(extras={"handle": object()}),
            "extras: got a object, expected values that JSON can hold",
        ),
    ],
)
def test_a_result_that_nobody_could_use_is_an_error(result: Any, why: str) -> None:
    class Odd(BaseTool):
        name = "odd"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return result  # type: ignore[no-any-return]

    async def test() -> None:
        async with tool_session(Odd()) as workshop:
            assert await result_contents(workshop, call("odd")) == [f"Error executing tool 'odd': {why}"]

    run(test)


def test_extras_are_plain_data_from_the_moment_they_are_handed_over() -> None:
    class Odd(BaseTool):
        name = "odd"
        schema = function_schema(name, "", {"type": "object"})

        async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
            return next(results)

    results = iter(
        [
            ToolResult("a", extras={"half": "\ud800", "set": {1}, 2: np.float32(0.5)}),
            ToolResult("b", extras=None),  # type: ignore[arg-type]
            ToolResult("c", media=[PICTURES[0]], reward=True),  # type: ignore[arg-type]
        ]
    )

    async def test() -> None:
        async with tool_session(Odd()) as workshop:
            first, second, third = [(await workshop.run([call("odd")]))[0] for _ in range(3)]
        assert first.extras == {"half": "\ufffd", "set": [1], "2": 0.5}
        assert (second.message.content, second.extras, second.error) == ("b", {}, None)
        assert third.message.parts == ("c", PICTURES[0])
        assert (third.reward, type(third.reward)) == (1.0, float)

    run(test)


def test_text_that_utf8_cannot_carry_is_mended_before_the_model_sees_it() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool()) as workshop:
            assert await result_contents(workshop, call(arguments='{"text":"a\\ud83d"}')) == ["a\ufffd"]

    run(test)


def test_no_calls_have_no_outcomes() -> None:
    async def test() -> None:
        async with tool_session(RecordingTool()) as workshop:
            assert await workshop.run([]) == []

    run(test)


# -- misuse ------------------------------------------------------------------------------------------


def test_a_workshop_is_opened_once_and_not_used_outside() -> None:
    async def test() -> None:
        workshop = tool_session(RecordingTool())
        with pytest.raises(RuntimeError, match="is new, expected open"):
            await workshop.run([call()])
        async with workshop:
            with pytest.raises(RuntimeError, match="is open, expected new"):
                await workshop.__aenter__()
        with pytest.raises(RuntimeError, match="is closed, expected open"):
            await workshop.calc_rewards()

    run(test)


def test_what_cannot_work_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="expected names that differ"):
        tool_session(RecordingTool("a"), RecordingTool("a"))
    with pytest.raises(
        InputError, match=r"tool_arguments: got 'b', expected one of the sample's tools, \['a'\]"
    ):
        tool_session(RecordingTool("a"), arguments={"b": {}})
    with pytest.raises(InputError, match="max_parallel_calls: got 0, expected 1 or more"):
        ToolLimits(max_parallel_calls=0)


def test_a_workshop_shows_the_schemas_of_its_tools() -> None:
    one, other = RecordingTool("one"), RecordingTool("other")
    assert tool_session(one, other).schemas == (one.schema, other.schema)


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
        with pytest.raises(ToolError, match=r"tool 'recorder': create: timed out after 7 s"):
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
        assert workshop.faults == [Fault("recorder", "release", "release is broken")]

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
            assert await judging == {"recorder": None}
        assert workshop.faults == [Fault("recorder", "calc_reward", "timed out after 5 s")]

    run(test)


def test_what_one_trajectory_does_to_its_arguments_is_no_others_business() -> None:
    """Samples of one task, a group say, begin with the same arguments."""

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


IMAGE, FILM = Media("image", "d1", b"1"), Media("video", "d2", b"2")


def record(text: str, *media: Media) -> ToolRecord:
    return ToolRecord("look", 1, Message("tool", text, tool_call_id="c", parts=(text, *media)), 0.5, {"x": 1})


@pytest.mark.parametrize("kind", [CodecError, InputError])
def test_of_several_results_only_what_cannot_be_seen_is_told_in_words(kind: type[Exception]) -> None:
    asked: list[list[int]] = []

    async def count(messages: Sequence[Message]) -> int:
        asked.append([len(message.media) for message in messages])
        if any(media.kind == "video" for message in messages for media in message.media):
            raise kind("messages[7]: carries a video, but toy takes no videos")
        return 1

    async def test() -> None:
        given = [record("a", IMAGE), record("b"), record("c", FILM), record("d", IMAGE)]
        shown = await filter_media(given, count)
        assert [shown[place] for place in (0, 1, 3)] == [given[place] for place in (0, 1, 3)]
        words = "Error executing tool 'look': its result: carries a video, but toy takes no videos"
        assert shown[2] == ToolRecord(
            "look", 1, Message("tool", words, tool_call_id="c"), 0.5, {"x": 1}, error=words
        ), "what it was worth stays"
        assert asked == [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]

    run(test)


def test_results_in_words_are_not_asked_about() -> None:
    async def count(messages: Sequence[Message]) -> int:
        raise AssertionError("nobody asks")

    async def test() -> None:
        given = [record("a"), record("b")]
        assert await filter_media(given, count) == given

    run(test)


def test_an_error_that_is_none_of_the_results_is_raised() -> None:
    async def count(messages: Sequence[Message]) -> int:
        raise EngineError("gone")

    async def test() -> None:
        with pytest.raises(EngineError, match="gone"):
            await filter_media([record("a", IMAGE)], count)

    run(test)
