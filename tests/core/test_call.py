"""Tool lists and their digests."""

from __future__ import annotations

from typing import Any

import pytest

from branchline.core.call import json_digest, read_tools
from branchline.core.errors import InputError, MessageError


def test_null_and_an_empty_list_are_no_tools() -> None:
    assert read_tools(None) == read_tools([]) == ()


def test_tools_of_any_type_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}, {"type": "custom"}]
    assert read_tools(tools) == tuple(tools)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({}, "tools"),
        ("", "tools"),
        (0, "tools"),
        ("f", "tools"),
        ([{}, "f"], "tools[1]"),
        ([None], "tools[0]"),
    ],
)
def test_tools_must_be_a_list_of_objects(raw: Any, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        read_tools(raw)
    assert caught.value.field == field


def test_a_digest_depends_on_values_and_not_on_key_order() -> None:
    one = json_digest([{"name": "f", "strict": True}], {})
    assert len(one) == 16
    assert one == json_digest([{"strict": True, "name": "f"}], {})
    assert one != json_digest([{"name": "f", "strict": 1}], {})
    assert one != json_digest({}, [{"name": "f", "strict": True}])
    assert one != json_digest([{"name": "f", "strict": True}])


def test_empty_values_have_an_empty_digest() -> None:
    assert json_digest([], {}) == json_digest(None) == json_digest() == b""
    assert json_digest([], {"a": 0}) != b""


def test_a_digest_separates_its_values() -> None:
    assert json_digest("a", "b") != json_digest("ab", "") != json_digest("a\0b")
    assert json_digest('a","b') != json_digest("a", "b")


def test_a_digest_of_invalid_json_raises_an_input_error() -> None:
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    for value in ([{"a": float("nan")}], [{"a": object()}], deep):
        with pytest.raises(InputError, match="expected JSON values"):
            json_digest(value)
