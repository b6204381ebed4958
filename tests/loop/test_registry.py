from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop.interaction import BaseInteraction, InteractionResponse
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.tools.base import BaseTool, ToolResult
from branchline.loop.tools.functions import tool
from tests.loop.fake_tools import RecordingTool

A, B = RecordingTool("a"), RecordingTool("b")
REGISTRY = ToolRegistry([A, B])


def test_items_are_found_by_name_and_keep_their_order() -> None:
    registry = ToolRegistry([B, A])
    late = registry.add(RecordingTool("c"))
    assert registry.get("c") is late
    assert registry.names == ("b", "a", "c")
    assert [item.name for item in registry] == ["b", "a", "c"]
    assert len(registry) == 3


@pytest.mark.parametrize("name", ["x", ["a"]])
def test_an_unknown_name_is_refused_with_the_field_and_the_known_names(name: str) -> None:
    with pytest.raises(InputError) as error:
        REGISTRY.get(name, "tool")
    assert str(error.value) == f"tool: got {name!r}, expected one of ['a', 'b']"


def test_a_name_is_registered_once() -> None:
    with pytest.raises(InputError, match="tool: got 'a' twice, expected distinct names"):
        ToolRegistry([A, RecordingTool("a")])


# -- tools -------------------------------------------------------------------------------------------


def test_a_sample_selects_its_tools_and_their_arguments() -> None:
    selection = REGISTRY.select(["b"], {"b": {"x": 1}})
    assert selection.tools == (B,)
    assert selection.arguments == {"b": {"x": 1}}


def test_none_selects_all_tools_and_an_empty_list_none() -> None:
    assert REGISTRY.select().tools == (A, B)
    assert REGISTRY.select([]).tools == ()


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["a", "x"], None, r"tools\[1\]: got 'x', expected one of \['a', 'b'\]"),
        (["a", "a"], None, "tools: got 'a' twice, expected distinct names"),
        ("a", None, "tools: got 'a', expected a list of names"),
        (None, {"x": {}}, r"tool_arguments: got 'x', expected one of the task's tools, \['a', 'b'\]"),
        (["a"], {"b": {}}, r"tool_arguments: got 'b', expected one of the task's tools, \['a'\]"),
        (["a"], {"a": 3}, r"tool_arguments\['a'\]: got 3, expected an object"),
    ],
)
def test_an_invalid_selection_is_refused(names: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        REGISTRY.select(names, arguments)


def test_a_tool_with_an_invalid_schema_is_refused() -> None:
    with pytest.raises(InputError, match="parameters of tool 'odd'"):
        ToolRegistry([RecordingTool("odd", parameters={"type": "wizard"})])


def test_add_can_be_used_as_a_decorator() -> None:
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
    def restore(self, trajectory: str, saved: Any) -> Any:  # type: ignore[override]
        return saved


class AsyncSaveTool(RecordingTool):
    async def save(self, instance: Any) -> Any:
        return instance


def plain(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (RecordingTool, r"tool: got the class RecordingTool, expected an instance of it: RecordingTool\(\)"),
        (plain, "tool: got the function plain, expected a tool: put @tool above its definition"),
        (A.wait_for, "tool: got the function wait_for, expected a tool"),
        (UnnamedTool(), "tool: got .*UnnamedTool.*, whose name is None, expected a non-empty name"),
        (RecordingTool(""), "tool: got .*RecordingTool.*, whose name is '', expected a non-empty name"),
        (NoSchemaTool(), "schema of tool 'odd': got None, expected"),
        (SyncExecuteTool("a"), "tool 'a': execute is no coroutine, expected an `async def`"),
        (SyncRestoreTool("a"), "tool 'a': restore is no coroutine, expected an `async def`"),
        (AsyncSaveTool("a"), "tool 'a': save is no plain method, expected a `def`"),
    ],
)
def test_an_unusable_tool_is_refused_when_it_is_registered(item: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ToolRegistry([item])


def test_a_wrapped_coroutine_function_is_accepted() -> None:
    wrapped = RecordingTool("wrapped")
    inner = wrapped.execute

    @functools.wraps(inner)
    def execute(*args: Any) -> Any:
        return inner(*args)

    wrapped.execute = execute  # type: ignore[assignment, method-assign]
    assert ToolRegistry([wrapped]).names == ("wrapped",)


# -- interactions ------------------------------------------------------------------------------------


class EchoInteraction(BaseInteraction):
    name = "echo"

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        return InteractionResponse(False, messages[-1].content)


class SyncScoreInteraction(EchoInteraction):
    def score(self, state: Any) -> float | None:  # type: ignore[override]
        return 1.0


def test_a_sample_selects_its_interaction_and_its_arguments() -> None:
    echo = EchoInteraction()
    registry = InteractionRegistry([echo])
    config = registry.select("echo", {"times": 3})
    assert (config.interaction, config.arguments) == (echo, {"times": 3})
    assert registry.select("echo").arguments == {}
    with pytest.raises(InputError, match=r"interaction: got 'x', expected one of \['echo'\]"):
        registry.select("x")
    arguments: Any = [1]
    with pytest.raises(InputError, match=r"interaction_arguments: got \[1\], expected an object"):
        registry.select("echo", arguments)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (EchoInteraction, r"interaction: got the class EchoInteraction, expected an instance of it"),
        (BaseInteraction(), "interaction: got .*BaseInteraction.*, whose name is None"),
        (SyncScoreInteraction(), "interaction 'echo': score is no coroutine, expected an `async def`"),
    ],
)
def test_an_unusable_interaction_is_refused_when_it_is_registered(item: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        InteractionRegistry([item])
