from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from branchline.loop.tools.base import BaseTool, Tool, ToolResult, function_schema
from tests.loop.clock_runner import run
from tests.loop.tools.fake_tools import call, tool_session


class Echo(BaseTool):
    name = "echo"
    schema = function_schema("echo", "Says it again.", {"type": "object"})

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(arguments["text"] * instance["times"])


def test_only_execute_has_to_be_written() -> None:
    async def test() -> None:
        echo: Tool = Echo()
        async with tool_session(echo, arguments={"echo": {"times": 2}}) as workshop:
            (outcome,) = await workshop.run([call("echo", '{"text": "ha"}')])
            assert await workshop.calc_rewards() == {"echo": None}
        assert outcome.message.content == "haha"
        assert workshop.faults == []
        with pytest.raises(NotImplementedError, match=r"BaseTool\.execute"):
            await BaseTool().execute({}, {})

    run(test)


def test_instances_share_nothing_unless_their_tool_makes_them() -> None:
    async def test() -> None:
        echo = Echo()
        arguments = {"times": 1}
        one, other = await echo.create("t1", **arguments), await echo.create("t2", **arguments)
        one["times"] = 9
        assert (other, arguments) == ({"times": 1}, {"times": 1})

    run(test)
