from __future__ import annotations

import functools
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.loop.tools.base import BaseTool, ToolResult
from branchline.loop.tools.functions import tool
from branchline.loop.tools.registry import ToolRegistry
from tests.loop.tools.fake_tools import RecordingTool

A, B = RecordingTool("a"), RecordingTool("b")
REGISTRY = ToolRegistry([A, B])


def test_a_sample_chooses_its_tools_and_their_arguments() -> None:
    selection = REGISTRY.select(["b"], {"b": {"x": 1}})
    assert selection.tools == (B,)
    assert selection.arguments == {"b": {"x": 1}}
    assert selection.schemas == (B.schema,)


def test_a_sample_that_says_nothing_has_all_tools_and_one_that_lists_none_has_none() -> None:
    assert REGISTRY.select().tools == (A, B)
    assert REGISTRY.select([]).tools == ()


@pytest.mark.parametrize(
    ("names", "arguments", "why"),
    [
        (["a", "x"], None, r"tools\[1\]: got 'x', expected one of \['a', 'b'\]"),
        (["a", "a"], None, "tools: got 'a' twice"),
        ("a", None, "tools: got 'a', expected a list of names"),
        (None, {"x": {}}, r"tool_arguments: got 'x', expected one of the sample's tools, \['a', 'b'\]"),
        (["a"], {"b": {}}, r"tool_arguments: got 'b', expected one of the sample's tools, \['a'\]"),
        (["a"], {"a": 3}, r"tool_arguments\['a'\]: got 3, expected an object"),
    ],
)
def test_a_sample_that_asks_for_what_is_not_there_is_refused(names: Any, arguments: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        REGISTRY.select(names, arguments)


def test_a_tool_whose_schema_is_none_is_refused_when_it_is_registered() -> None:
    with pytest.raises(InputError, match="parameters of tool 'odd'"):
        ToolRegistry([RecordingTool("odd", parameters={"type": "wizard"})])


def test_functions_are_registered_where_they_are_defined() -> None:
    registry = ToolRegistry()

    @registry.add
    @tool
    def look(where: str) -> str:
        """Looks."""
        return where

    assert registry.get("look") is look


class UnnamedTool(BaseTool): ...


class SyncExecuteTool(RecordingTool):
    def execute(self, instance: Any, arguments: Any) -> ToolResult:  # type: ignore[override]
        return ToolResult("x")


class NoSchemaTool(BaseTool):
    name = "odd"


class SyncRestoreTool(RecordingTool):
    def save(self, instance: Any) -> Any:
        return instance

    def restore(self, trajectory: str, saved: Any) -> Any:
        return saved


class AsyncSaveTool(RecordingTool):
    async def save(self, instance: Any) -> Any:
        return instance

    async def restore(self, trajectory: str, saved: Any) -> Any:
        return saved


def plain(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (RecordingTool, r"tool: got the class RecordingTool, expected an instance of it: RecordingTool\(\)"),
        (plain, "tool: got the function plain, expected a tool: put @tool above its definition"),
        (A.wait_for, "tool: got the function wait_for, expected a tool"),
        (UnnamedTool(), "tool: got .*UnnamedTool.*, whose name is None, expected one that has a name"),
        (RecordingTool(""), "tool: got .*RecordingTool.*, whose name is '', expected one that has a name"),
        (NoSchemaTool(), "schema of tool 'odd': got None, expected"),
        (SyncExecuteTool("a"), "tool 'a': cannot wait for execute, expected an `async def`"),
        (SyncRestoreTool("a"), "tool 'a': cannot wait for restore, expected an `async def`"),
        (AsyncSaveTool("a"), "tool 'a': has to wait for save, expected a plain `def`"),
    ],
)
def test_what_could_not_be_used_is_refused_when_it_is_registered(thing: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        ToolRegistry([thing])


def test_what_can_be_waited_for_is_taken_however_it_is_wrapped() -> None:
    wrapped = RecordingTool("wrapped")
    inside = wrapped.execute

    @functools.wraps(inside)
    def execute(*given: Any) -> Any:
        return inside(*given)

    wrapped.execute = execute  # type: ignore[method-assign]
    assert ToolRegistry([wrapped]).names == ("wrapped",)
