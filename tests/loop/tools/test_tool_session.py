"""Scenario D2: calls and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.tool_session import ToolLimits, ToolOutcome
from tests.loop.clock_runner import move_clock, run
from tests.loop.tools.fake_tools import RecordingTool, call, result_contents, tool_session


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
        assert outcome.message.content == f"Invalid JSON in arguments for 'diary': {why}"
        assert outcome.error == outcome.message.content
        assert tool.events == ["create", "release"]

    run(test)


def test_arguments_that_do_not_fit_the_schema_are_told_to_the_model_and_not_to_the_tool() -> None:
    async def test() -> None:
        tool = RecordingTool()
        async with tool_session(tool) as workshop:
            assert await result_contents(workshop, call(arguments='{"text": 3}')) == [
                "Error executing tool 'diary': arguments.text: 3 is not of type 'string'"
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
        assert outcome.message.content == "Error executing tool 'diary': timed out after 5 s"
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
