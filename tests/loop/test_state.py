from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from branchline.core.context_edits import ContextEdit
from branchline.core.errors import InputError
from branchline.core.message import Media, Message, ToolCall
from branchline.loop.context.context_state import ContextState, IndexConfig, Note
from branchline.loop.persistence import Fault
from branchline.loop.state import AnswerTokens, LoopMetrics, LoopPhase, LoopState, StopReason, TurnRecord
from branchline.loop.task import LoopLimits, Task
from branchline.loop.tools.base import ToolResult

IMAGE = Media("image", "d1", b"\x00\xff", mime="image/png")


def full_state() -> LoopState:
    """A state whose fields all differ from their defaults, but for those listed below."""
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
        limits=LoopLimits(max_assistant_turns=3, tool_response_keep="tail"),
        extra={"answer": [1, None]},
        documents={"document": "text"},
    )
    result = ToolResult("2", (IMAGE,), 0.5, {"x": [1]}, True, "add", 1, "c1", 0.1)
    return LoopState(
        trajectory="t1",
        task=task,
        phase=LoopPhase.PROCESSING_TOOLS,
        messages=[
            *task.messages,
            Message("assistant", "", reasoning_content="hm", tool_calls=calls, id="r1"),
        ],
        assistant_turns=1,
        user_turns=2,
        pending_calls=list(calls),
        pending_results={1: result},
        started_calls=[0],
        pending_response=TurnRecord(1, "no", False, 0.1, {"y": 2}),
        tool_results=[result, ToolResult("2", tool="add", turn=2)],
        turn_records=[TurnRecord(1, "yes", True, 0.25), TurnRecord(2, "hm", False)],
        final_rewards={"add": 1.5, "search": 0.5},
        tool_states={"add": [1, 2]},
        interaction_states={"tutor": {"wrong": 1}},
        faults=[Fault("add", "release", "stuck")],
        metrics=LoopMetrics(1.0, 2.0, 3.0, 4, 5, True),
        call_name="chatcmpl-1",
        call_ids=["chatcmpl-0"],
        abandoned_calls=["chatcmpl-2"],
        answers=[AnswerTokens("chatcmpl-0", 5, 4)],
        context=ContextState(
            deletions=[ContextEdit((1,))],
            undone=[ContextEdit((2, 3))],
            compactions=[ContextEdit((1, 2), "They agreed.")],
            is_recount_needed=True,
            notes={"a": Note("summary", "content")},
            index=IndexConfig("index_1", "document", 10, 2),
            index_count=1,
            scanned_chunks=[0],
            final_answer="4",
        ),
        penalty=-1.0,
        session_id="s1",
        session_url="http://127.0.0.1:8100/sessions/s1/v1",
        is_reported=True,
        first_prompt_tokens=7,
        tokens=9,
        is_cancelled=True,
        is_agent_running=True,
        stop_reason=StopReason.USER_TURNS,
        stop_detail="2 of 2",
        elapsed_s=0.5,
    )


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_encode_and_decode_return_an_equal_state(encoding: Any) -> None:
    state = full_state()
    again = LoopState.decode(state.encode(encoding))
    assert again == state
    assert again.encode(encoding) == state.encode(encoding)
    assert again.messages[1].key == state.messages[1].key
    fresh = LoopState.begin(state.task)
    assert LoopState.decode(fresh.encode(encoding)) == fresh


def test_the_full_state_sets_every_field() -> None:
    """So that the test above covers all of them."""
    fresh = LoopState.begin(Task(()), "t")
    for name in ("is_scored", "score", "format"):
        assert getattr(full_state(), name) == getattr(fresh, name)
    same = {
        name for name in LoopState.__struct_fields__ if getattr(full_state(), name) == getattr(fresh, name)
    }
    assert same == {"is_scored", "score", "format"}


def test_states_share_no_containers() -> None:
    task = Task((Message("user", "x"),))
    one, other = LoopState.begin(task), LoopState.begin(task)
    one.messages.append(Message("user", "y"))
    one.pending_calls.append(ToolCall("a"))
    one.pending_results[0] = ToolResult("a")
    one.metrics.tool_s += 1
    assert (other.messages, other.pending_calls, other.pending_results, other.metrics.tool_s) == (
        [task.messages[0]],
        [],
        {},
        0,
    )
    one.add_fault(Fault("a", "release", "stuck"))
    assert other.faults == []


def test_trajectory_names_are_unique() -> None:
    """Tools use the name, and a task has many trajectories."""
    for task in (Task(()), Task((), id="row 7")):
        names = {LoopState.begin(task).trajectory for _ in range(3)}
        assert len(names) == 3
        assert all(name.startswith(task.id) for name in names)
    assert LoopState.begin(Task((), id="row 7"), "mine").trajectory == "mine"


def test_numpy_values_are_encoded_and_other_objects_are_refused() -> None:
    state = full_state()
    state.pending_results = {0: ToolResult("a", extras={"n": np.float32(0.5), "v": np.arange(2)})}
    assert LoopState.decode(state.encode()).pending_results[0].extras == {"n": 0.5, "v": [0, 1]}
    state.pending_results = {0: ToolResult("a", extras={"handle": object()})}
    with pytest.raises(InputError, match="state: got a object, expected values that JSON can hold"):
        state.encode()


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
@pytest.mark.parametrize("value", ["\ud800", object(), {(1, 2): object()}])
def test_a_task_that_cannot_be_encoded_is_refused(encoding: Any, value: Any) -> None:
    state = LoopState.begin(Task((), extra={"odd": value}))
    with pytest.raises(InputError, match=r"^state: .*, expected values that JSON can hold"):
        state.encode(encoding)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b'{"trajectory": 1}', b"\x80"])
def test_data_that_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="expected an encoded LoopState"):
        LoopState.decode(data)


def test_a_state_of_another_format_is_refused() -> None:
    raw = json.loads(full_state().encode("json"))
    raw["format"] = 1
    with pytest.raises(InputError, match=r"state\.format: got 1, expected 4"):
        LoopState.decode(json.dumps(raw).encode())


def test_scores_and_rewards() -> None:
    state = full_state()
    assert state.turn_scores == [0.25]
    assert state.tool_rewards == [0.5]
    assert state.reward_score == -1.0, "a penalty replaces every other reward"
    state.penalty = None
    assert state.reward_score == 2.0
    state.score = -1.0
    assert state.reward_score == -1.0
    state.add_fault(Fault("add", "recreated", "it was used before"))
    assert state.reward_score == -1.0
    state.add_fault(Fault("add", "calc_reward", "the grader is down"))
    assert state.reward_score is None
    assert LoopState.begin(state.task).reward_score is None
    assert state.num_turns == 4


def test_an_equal_fault_is_listed_once() -> None:
    state = LoopState.begin(Task(()))
    for _ in range(2):
        state.add_fault(Fault("add", "release", "stuck"))
        state.add_fault(None)
    assert [str(fault) for fault in state.faults] == ["add: release: stuck"]


def test_flush_partial_keeps_finished_results_and_the_response() -> None:
    state = full_state()
    first = ToolResult("1", tool="first")
    state.pending_results = {1: state.pending_results[1], 0: first}
    results, turns = len(state.tool_results), len(state.turn_records)
    state.flush_partial()
    assert [result.tool for result in state.tool_results[results:]] == ["first", "add"]
    assert [record.content for record in state.turn_records[turns:]] == ["no"]
    assert (state.pending_calls, state.pending_results, state.pending_response) == ([], {}, None)
    state.flush_partial()
    assert len(state.tool_results) == results + 2
