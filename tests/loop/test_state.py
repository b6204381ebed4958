from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import InputError, MessageError
from branchline.core.message import Media, Message, ToolCall
from branchline.loop.state import (
    Ending,
    LoopLimits,
    LoopState,
    Metrics,
    State,
    Task,
    ToolRecord,
    TurnRecord,
)

IMAGE = Media("image", "d1", b"\x00\xff", mime="image/png")


def full_state() -> LoopState:
    """One in which every field says something."""
    calls = (ToolCall("add", '{"a": 1}', "c1"), ToolCall("add", "{", "c2"))
    task = Task(
        (Message("user", "é"),),
        agent_name="tool",
        id="t1",
        tools=("add",),
        tool_arguments={"add": {"answer": 3}},
        interaction="tutor",
        interaction_arguments={"level": 1},
        sampling={"temperature": 0.5},
        template={"enable_thinking": False},
        limits=LoopLimits(max_assistant_turns=3, tool_response_side="left"),
        extra={"answer": [1, None]},
    )
    result = Message("tool", "2", answers="c1", name="add", parts=("2", IMAGE))
    record = ToolRecord("add", 1, result, 0.5, {"x": [1]}, 0.1, "bad")
    return LoopState(
        trajectory="t1",
        task=task,
        state=State.PROCESSING_TOOLS,
        messages=[*task.messages, Message("assistant", "", reasoning="hm", calls=calls, id="r1")],
        assistant_turns=1,
        user_turns=2,
        pending=list(calls),
        outcomes={1: record},
        response=TurnRecord(1, "no", False, 0.1, {"y": 2}),
        tool_records=[record, ToolRecord("add", 2, result)],
        turn_records=[TurnRecord(1, "yes", True, 0.25), TurnRecord(2, "hm", False)],
        final_rewards={"add": 1.5, "search": 0.5},
        tool_states={"add": [1, 2]},
        partner_states={"tutor": {"wrong": 1}},
        metrics=Metrics(1.0, 2.0, 3.0, 4),
        call="chatcmpl-1",
        calls=["chatcmpl-0"],
        first_tokens=7,
        tokens=9,
        is_cancel=True,
        reason=Ending.USER_TURNS,
        detail="2 of 2",
        spent_s=0.5,
    )


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_a_state_comes_back_as_it_was(encoding: Any) -> None:
    state = full_state()
    again = LoopState.decode(state.encode(encoding))
    assert again == state
    assert again.encode(encoding) == state.encode(encoding)
    assert again.messages[1].key == state.messages[1].key
    fresh = LoopState.begin(state.task)
    assert LoopState.decode(fresh.encode(encoding)) == fresh


def test_every_field_of_the_example_says_something() -> None:
    """So that the test above looks at all of them."""
    fresh = LoopState.begin(Task(()), "t")
    for name in ("is_judged", "score", "format"):
        assert getattr(full_state(), name) == getattr(fresh, name)
    same = {
        name for name in LoopState.__struct_fields__ if getattr(full_state(), name) == getattr(fresh, name)
    }
    assert same == {"is_judged", "score", "format"}


def test_states_share_nothing() -> None:
    task = Task((Message("user", "x"),))
    one, other = LoopState.begin(task), LoopState.begin(task)
    one.messages.append(Message("user", "y"))
    one.pending.append(ToolCall("a"))
    one.outcomes[0] = ToolRecord("a", 1, Message("tool"))
    one.metrics.tool_s += 1
    assert (other.messages, other.pending, other.outcomes, other.metrics.tool_s) == (
        [task.messages[0]],
        [],
        {},
        0,
    )
    assert one.trajectory != other.trajectory
    assert LoopState.begin(Task((), id="row 7")).trajectory == "row 7"


def test_numbers_of_numpy_travel_and_what_is_no_data_is_refused_by_name() -> None:
    state = full_state()
    state.outcomes = {
        0: ToolRecord("a", 1, Message("tool"), extras={"n": np.float32(0.5), "v": np.arange(2)})
    }
    assert LoopState.decode(state.encode()).outcomes[0].extras == {"n": 0.5, "v": [0, 1]}
    state.outcomes = {0: ToolRecord("a", 1, Message("tool"), extras={"handle": object()})}
    with pytest.raises(InputError, match="got a object in extras or saved"):
        state.encode()


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b'{"trajectory": 1}', b"\x80"])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="expected an encoded LoopState"):
        LoopState.decode(data)


def test_a_state_of_another_format_is_refused() -> None:
    raw = json.loads(full_state().encode("json"))
    raw["format"] = 2
    with pytest.raises(InputError, match=r"state\.format: got 2, expected 1"):
        LoopState.decode(json.dumps(raw).encode())


def test_scores_and_rewards_are_read_off_the_records() -> None:
    state = full_state()
    assert state.turn_scores == [0.25]
    assert state.tool_rewards == [0.5]
    assert state.reward_score == 2.0
    state.score = -1.0
    assert state.reward_score == -1.0
    assert LoopState.begin(state.task).reward_score is None
    assert state.num_turns == 4


# -- limits and tasks --------------------------------------------------------------------------------


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
    ],
)
def test_a_limit_that_lets_nothing_happen_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"limits\.{name}: got {value}, expected"):
        LoopLimits(**{name: value})  # type: ignore[arg-type]


def test_a_task_is_read_from_a_line_of_a_data_set() -> None:
    line = {
        "prompt": [{"role": "user", "content": "2+2?"}],
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "task: got \\[\\], expected an object"),
        ({}, "messages: got None, expected a non-empty list"),
        ({"prompt": []}, "prompt: got \\[\\]"),
        ({"prompt": [{"role": "wizard"}]}, "prompt\\[0\\].role: got 'wizard'"),
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


def test_texts_of_a_task_are_ones_that_utf8_can_carry() -> None:
    task = Task.read({"messages": [{"role": "user", "content": "a\ud800"}], "extra": {"b\udc00": ["\ud800"]}})
    assert msgspec.json.encode(task)
