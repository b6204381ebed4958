from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import InputError, MessageError
from branchline.core.message import Message
from branchline.loop.state import LoopLimits, LoopState
from branchline.loop.task import Task

PROMPT = [{"role": "user", "content": "2+2?"}]


def test_a_task_is_read_from_a_line_of_a_data_set() -> None:
    line = {
        "prompt": PROMPT,
        "agent_name": "tool",
        "tools": ["calculator"],
        "tool_arguments": {"calculator": {"answer": 4}},
        "limits": {"max_user_turns": 2},
        "answer": 4,
        "extra": {"level": "easy"},
    }
    task = Task.read(line)
    assert task.messages == (Message("user", "2+2?"),)
    assert (task.agent_name, task.tools, task.limits) == (
        "tool",
        ("calculator",),
        LoopLimits(max_user_turns=2),
    )
    assert task.extra == {"answer": 4, "level": "easy"}
    assert Task.read({"messages": line["prompt"]}).agent_name == ""


def test_a_null_is_what_was_not_said() -> None:
    """Tables have every column in every row."""
    names = [name for name in Task.__struct_fields__ if name != "messages"]
    line = {"prompt": PROMPT, "messages": None, **dict.fromkeys(names)}
    assert Task.read(line) == Task.read({"prompt": PROMPT})


def test_a_null_among_what_was_said_is_not_said_either() -> None:
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
    assert task.tool_arguments == {"search": {"limit": None}}, "what a tool is given is its own business"
    assert task.sampling == {"temperature": 0.5}
    # Where null has a meaning it keeps it.
    assert task.limits == LoopLimits(tool_timeout_s=None, max_user_turns=1)


def test_arrays_and_their_numbers_are_lists_and_numbers() -> None:
    line = {
        "prompt": np.array([{"role": "user", "content": np.array([{"type": "text", "text": "hi"}], object)}]),
        "id": np.int64(7),
        "tools": np.array(["add", "search"], object),
        "tool_arguments": {"add": {"answer": np.float32(0.5)}},
        "scores": np.arange(2),
        "answer": np.int64(3),
    }
    task = Task.read(line)
    assert (task.id, task.tools) == ("7", ("add", "search"))
    assert task.messages[0].content == "hi"
    assert task.tool_arguments == {"add": {"answer": 0.5}}
    assert task.extra == {"scores": [0, 1], "answer": 3}
    assert type(task.extra["answer"]) is int
    state = LoopState.begin(task)
    assert LoopState.decode(state.encode()) == state


def test_a_prompt_that_is_a_text_is_a_users() -> None:
    assert Task.read({"prompt": "2+2?"}) == Task.read({"prompt": PROMPT})
    assert Task.read({"id": 7, "prompt": "x"}).id == "7"


@pytest.mark.parametrize(
    ("line", "words"),
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
def test_a_task_that_cannot_be_read_is_refused_by_the_field(line: Any, words: str) -> None:
    with pytest.raises((InputError, MessageError), match=words):
        Task.read(line)


def test_a_task_that_is_nested_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="not nested so deep"):
        Task.read({"prompt": "x", "deep": deep})


def test_texts_of_a_task_are_ones_that_utf8_can_carry() -> None:
    task = Task.read({"messages": [{"role": "user", "content": "a\ud800"}], "extra": {"b\udc00": ["\ud800"]}})
    assert msgspec.json.encode(task)
