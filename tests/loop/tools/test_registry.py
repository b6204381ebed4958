from __future__ import annotations

from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.loop.tools.functions import tool
from branchline.loop.tools.registry import ToolRegistry
from tests.loop.tools.doubles import Diary

A, B = Diary("a"), Diary("b")
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
        ToolRegistry([Diary("odd", parameters={"type": "wizard"})])


def test_functions_are_registered_where_they_are_defined() -> None:
    registry = ToolRegistry()

    @registry.add
    @tool
    def look(where: str) -> str:
        """Looks."""
        return where

    assert registry.get("look") is look
