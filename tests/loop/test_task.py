from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import InputError, MessageError
from branchline.core.message import Message
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task, is_optional

PROMPT = [{"role": "user", "content": "2+2?"}]


def test_a_task_is_read_from_a_row() -> None:
    row = {
        "prompt": PROMPT,
        "agent_name": "tool",
        "tools": ["calculator"],
        "tool_arguments": {"calculator": {"answer": 4}},
        "limits": {"max_user_turns": 2},
        "answer": 4,
        "extra": {"level": "easy"},
    }
    task = Task.read(row)
    assert task.messages == (Message("user", "2+2?"),)
    assert (task.agent_name, task.tools, task.limits) == (
        "tool",
        ("calculator",),
        LoopLimits(max_user_turns=2),
    )
    assert task.extra == {"answer": 4, "level": "easy"}
    assert Task.read({"messages": row["prompt"]}).agent_name == ""


def test_a_null_field_is_absent() -> None:
    """Tables have every column in every row."""
    names = [name for name in Task.__struct_fields__ if name != "messages"]
    row = {"prompt": PROMPT, "messages": None, **dict.fromkeys(names)}
    assert Task.read(row) == Task.read({"prompt": PROMPT})


def test_nulls_inside_fields_are_absent() -> None:
    task = Task.read(
        {
            "prompt": PROMPT,
            "tool_arguments": {"search": {"limit": None}, "add": None},
            "sampling": {"temperature": 0.5, "top_p": None},
            "limits": {
                "max_parallel_calls": None,
                "tool_response_unit": None,
                "tool_timeout_s": None,
                "max_user_turns": 1,
            },
        }
    )
    assert task.tool_arguments == {"search": {"limit": None}}, "arguments of a tool are not changed"
    assert task.sampling == {"temperature": 0.5}
    # Null means no limit for tool_timeout_s.
    assert task.limits == LoopLimits(tool_timeout_s=None, max_user_turns=1)


def test_arrays_become_lists() -> None:
    row = {
        "prompt": np.array([{"role": "user", "content": np.array([{"type": "text", "text": "hi"}], object)}]),
        "id": np.int64(7),
        "tools": np.array(["add", "search"], object),
        "tool_arguments": {"add": {"answer": np.float32(0.5)}},
        "scores": np.arange(2),
        "answer": np.int64(3),
    }
    task = Task.read(row)
    assert (task.id, task.tools) == ("7", ("add", "search"))
    assert task.messages[0].content == "hi"
    assert task.tool_arguments == {"add": {"answer": 0.5}}
    assert task.extra == {"scores": [0, 1], "answer": 3}
    assert type(task.extra["answer"]) is int
    state = LoopState.begin(task)
    assert LoopState.decode(state.encode()) == state


def test_a_text_prompt_is_a_user_message() -> None:
    assert Task.read({"prompt": "2+2?"}) == Task.read({"prompt": PROMPT})
    assert Task.read({"id": 7, "prompt": "x"}).id == "7"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "task: got \\[\\], expected an object"),
        ({}, "messages: got None, expected a non-empty list"),
        ({"prompt": []}, "prompt: got \\[\\]"),
        ({"prompt": ""}, "prompt: got ''"),
        ({"prompt": [{"role": "wizard"}]}, "prompt\\[0\\].role: got 'wizard'"),
        ({"messages": [{"role": "user"}], "id": True}, "task: .*id"),
        ({"messages": [{"role": "user"}], "tools": "add"}, "task: .*tools"),
        ({"messages": [{"role": "user"}], "limits": {"turns": 1}}, "unknown field `turns`.*limits"),
        ({"messages": [{"role": "user"}], "limits": {"model_length": 0}}, "limits.model_length: got 0"),
        ({"messages": [{"role": "user"}], "sampling": {"max_tokens": 1}}, "sampling: got 'max_tokens'"),
        ({"messages": [{"role": "user"}], "extra": 1}, "task: .*extra"),
    ],
)
def test_an_invalid_row_is_refused_with_its_field(row: Any, message: str) -> None:
    with pytest.raises((InputError, MessageError), match=message):
        Task.read(row)


def test_a_row_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="nested too deeply"):
        Task.read({"prompt": "x", "deep": deep})


def test_texts_of_a_task_are_ones_that_utf8_can_carry() -> None:
    task = Task.read({"messages": [{"role": "user", "content": "a\ud800"}], "extra": {"b\udc00": ["\ud800"]}})
    assert msgspec.json.encode(task)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_assistant_turns", 0),
        ("max_user_turns", -1),
        ("max_parallel_calls", 0),
        ("tool_response_length", -1),
        ("response_length", 0),
        ("model_length", -5),
        ("max_new_tokens", 0),
        ("wall_clock_s", 0.0),
        ("tool_timeout_s", -1.0),
        ("tool_create_timeout_s", 0),
        ("tool_release_timeout_s", -1),
        ("interaction_timeout_s", 0.0),
    ],
)
def test_a_limit_below_its_minimum_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"limits\.{name}: got {value}, expected"):
        LoopLimits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tool_response_keep": "center"}, "got 'center', expected one of head, tail, both"),
        ({"tool_response_unit": "words"}, "got 'words', expected one of tokens, characters"),
        ({"tool_response_unit": None}, "got None, expected one of tokens, characters"),
        (
            {"max_assistant_turns": "2"},
            "got '2', expected a whole number of 1 or more, or null for no limit",
        ),
        ({"max_user_turns": 1.5}, "got 1.5, expected a whole number of 0 or more, or null for no limit"),
        ({"max_new_tokens": True}, "got True, expected a whole number"),
        ({"wall_clock_s": "60"}, "got '60', expected a number of more than 0, or null for no limit"),
        ({"wall_clock_s": float("nan")}, "got nan, expected a number of more than 0"),
        ({"max_parallel_calls": None}, "got None, expected a whole number of 1 or more"),
    ],
)
def test_an_invalid_limit_is_refused_with_its_name(limits: Any, message: str) -> None:
    (name,) = limits
    with pytest.raises(InputError) as refused:
        LoopLimits(**limits)
    text = str(refused.value)
    assert text.startswith(f"limits.{name}: {message}")
    assert text.endswith("null for no limit") == is_optional(name)


def test_valid_limits_survive_encoding() -> None:
    limits = LoopLimits(max_user_turns=0, tool_response_length=0, wall_clock_s=60, tool_timeout_s=None)
    assert msgspec.json.decode(msgspec.json.encode(limits), type=LoopLimits) == limits
    assert not limits.needs_token_counts
    assert LoopLimits(response_length=1).needs_token_counts
    assert LoopLimits(model_length=1).needs_token_counts
