from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import EngineError, InputError
from branchline.core.message import Message
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.interaction import BaseInteraction, InteractionConfig, InteractionResponse
from branchline.loop.persistence import check_finite, copy_containers, to_plain_data
from branchline.loop.state import LoopPhase, LoopState
from branchline.loop.timeouts import CancelToken
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection
from branchline.loop.tools.functions import tool
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    run,
)

TOOL_TURN = ScriptedTurn(tool_calls=(ScriptedToolCall(),))
SCRIPT = LoopScript(
    (
        TOOL_TURN,
        ScriptedTurn("a long answer", tool_calls=(ScriptedToolCall(),), cancel_points=(4,)),
        ScriptedTurn("end"),
    )
)


class CoinTool(BaseTool):
    """Adds a coin with each call; its reward is the number of items."""

    name = "act"
    schema = ScriptedTool.schema

    def __init__(self) -> None:
        self.created = 0

    async def create(self, trajectory: str, **arguments: Any) -> list[str]:
        self.created += 1
        return list(arguments.values())

    async def execute(self, instance: list[str], arguments: Mapping[str, Any]) -> ToolResult:
        instance.append("coin")
        return ToolResult(f"{len(instance)} coins")

    async def calc_reward(self, instance: list[str]) -> float | None:
        return float(len(instance))


class PersistentCoinTool(CoinTool):
    """A CoinTool that can be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.restored = 0

    def save(self, instance: list[str]) -> Any:
        return list(instance)

    async def restore(self, trajectory: str, saved: list[str], **arguments: Any) -> list[str]:
        self.restored += 1
        return saved


class FailingSaveTool(PersistentCoinTool):
    def save(self, instance: list[str]) -> Any:
        raise ValueError("cannot be saved")


class UnserializableTool(PersistentCoinTool):
    def save(self, instance: list[str]) -> Any:
        return object()


def _loop(s: LoopHarness, state: LoopState, tool: CoinTool) -> AgentLoop:
    return AgentLoop(s.model, state, tools=ToolSelection((tool,), {"act": {"gift": "button"}}))


async def _run_until_cancelled(s: LoopHarness, loop: AgentLoop) -> None:
    cancel = CancelToken()
    task = asyncio.create_task(loop.run(cancel))
    await s.engine.at_cancel_point.wait()
    cancel.cancel()
    assert (await task).is_cancelled


FAULTS: dict[Any, list[str]] = {
    PersistentCoinTool: [],
    CoinTool: ["recreated"],
    FailingSaveTool: ["save", "recreated"],
    UnserializableTool: ["save", "recreated"],
}


@pytest.mark.parametrize(
    ("tool", "coins"),
    [(PersistentCoinTool(), 3.0), (CoinTool(), 2.0), (FailingSaveTool(), 2.0), (UnserializableTool(), 2.0)],
)
def test_a_saved_tool_is_restored_and_any_other_is_a_fault(
    tool: CoinTool, coins: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, tool) as loop:
                await _run_until_cancelled(s, loop)
            state = LoopState.decode(state.encode())
            assert state.tool_states == ({"act": ["button", "coin"]} if coins == 3 else {})
            async with _loop(s, state, tool) as loop:
                state = await loop.run()
            assert state.final_rewards == {"act": coins}
            assert state.reward_score == coins
            assert [fault.operation for fault in state.faults] == FAULTS[type(tool)]
            assert ("act: recreated: it was used before" in caplog.text) == (coins < 3)
            assert tool.created == (1 if coins == 3 else 2)
            assert state.tool_states == {}

    run(test)


def test_a_cancelled_loop_keeps_its_instances_inside_its_block() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state, tool = LoopState.begin(s.task()), CoinTool()
            async with _loop(s, state, tool) as loop:
                await _run_until_cancelled(s, loop)
                state = await loop.run()
            assert (state.final_rewards, tool.created) == ({"act": 3.0}, 1)

    run(test)


def test_a_failed_save_is_a_fault_and_the_state_can_be_encoded() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, UnserializableTool()) as loop:
                await _run_until_cancelled(s, loop)
            (fault,) = LoopState.decode(state.encode()).faults
            assert str(fault) == "act: save: saved: got a object, expected values that JSON can hold"

    run(test)


@tool
def act(turn: int, index: int) -> str:
    """Acts."""
    return "done"


def test_recreating_an_unused_or_stateless_tool_is_no_fault() -> None:
    async def test() -> None:
        unused = LoopScript(
            (
                ScriptedTurn("a long answer", tool_calls=(ScriptedToolCall(),), cancel_points=(4,)),
                ScriptedTurn("end"),
            )
        )
        for script, used_tool in ((unused, CoinTool()), (SCRIPT, act)):
            async with loop_harness(script) as s:
                state = LoopState.begin(s.task())
                async with AgentLoop(s.model, state, tools=ToolSelection((used_tool,))) as loop:
                    await _run_until_cancelled(s, loop)
                async with AgentLoop(s.model, state, tools=ToolSelection((used_tool,))) as loop:
                    state = await loop.run()
                assert (state.is_finished, state.faults) == (True, [])

    run(test)


def test_a_restored_instance_does_not_share_the_saved_value() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state, tool = LoopState.begin(s.task()), PersistentCoinTool()
            async with _loop(s, state, tool) as loop:
                await _run_until_cancelled(s, loop)
            saved = state.tool_states["act"]
            s.engine.failure = EngineError("gone")
            with pytest.raises(EngineError):
                async with _loop(s, state, tool) as loop:
                    await loop.run()
            assert saved == ["button", "coin"]

    run(test)


class CountingInteraction(BaseInteraction):
    """Sends a first message and counts its turns."""

    name = "counter"

    def __init__(self) -> None:
        self.starts = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[dict[str, Any], str | None]:
        self.starts += 1
        return {"turns": 0, **arguments}, "Hello."

    def save(self, state: dict[str, Any]) -> Any:
        return state

    async def restore(self, trajectory: str, saved: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        return saved

    async def respond(self, state: dict[str, Any], messages: Sequence[Message]) -> InteractionResponse:
        state["turns"] += 1
        return InteractionResponse(state["turns"] == 2, f"{state['who']} got {state['turns']}")

    async def score(self, state: dict[str, Any]) -> float | None:
        return float(state["turns"])


@pytest.mark.parametrize("points", [(0,), (2,), ()])
def test_a_restored_interaction_continues_without_a_second_first_message(points: tuple[int, ...]) -> None:
    async def test() -> None:
        later = () if points else (3,)
        async with loop_harness(
            LoopScript(
                (ScriptedTurn("one", cancel_points=points), ScriptedTurn("and two", cancel_points=later))
            )
        ) as s:
            interaction, state = CountingInteraction(), LoopState.begin(s.task())
            config = InteractionConfig(interaction, {"who": "she"})
            async with AgentLoop(s.model, state, interaction=config) as loop:
                await _run_until_cancelled(s, loop)
            state = LoopState.decode(state.encode("json"))
            assert state.phase is LoopPhase.GENERATING
            assert state.interaction_states == {"counter": {"turns": 0 if points else 1, "who": "she"}}
            async with AgentLoop(s.model, state, interaction=config) as loop:
                state = await loop.run()
            assert [m.content for m in state.messages[2:]] == [
                *["Hello.", "one", "she got 1", "and two", "she got 2"]
            ]
            assert (state.score, interaction.starts, state.interaction_states) == (2.0, 1, {})

    run(test)


@dataclass
class Point:
    row: int


def test_values_of_other_types_become_plain_data() -> None:
    value = {
        "n": np.float32(0.5),
        "v": np.arange(2),
        "set": {3},
        "point": Point(1),
        "day": datetime.date(2020, 1, 2),
        "half": "a\ud800",
        1: MappingProxyType({"x": (1, 2)}),
    }
    assert to_plain_data(value, "extras") == {
        "n": 0.5,
        "v": [0, 1],
        "set": [3],
        "point": {"row": 1},
        "day": "2020-01-02",
        "half": "a\ufffd",
        "1": {"x": [1, 2]},
    }


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, 2**70, [[object()]]])
def test_a_value_that_is_no_data_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(InputError, match=r"^extras: .*, expected values that JSON can hold"):
        to_plain_data({"a": value} if not isinstance(value, dict) else value, "extras")


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match=r"^saved: .*expected values that JSON can hold"):
        to_plain_data(deep, "saved")


def test_plain_data_is_a_copy_that_can_be_encoded() -> None:
    value = {"a": [1]}
    copy = to_plain_data(value, "saved")
    copy["a"].append(2)
    assert value == {"a": [1]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(copy)) == copy


def test_copy_containers_copies_containers_and_shares_other_values() -> None:
    connection = object()
    value = {"stock": ["apple", {"ripe": True}], "seen": {1}, "pair": ([1], 2), "at": connection}
    copy = copy_containers(value)
    assert copy == value
    assert copy["at"] is connection
    copy["stock"][1]["ripe"] = False
    copy["stock"].append("pear")
    copy["seen"].add(2)
    copy["pair"][0].append(2)
    assert value == {"stock": ["apple", {"ripe": True}], "seen": {1}, "pair": ([1], 2), "at": connection}


@pytest.mark.parametrize(("value", "expected"), [(None, None), (True, 1.0), (np.float32(0.5), 0.5), (2, 2.0)])
def test_check_finite_returns_a_float_or_none(value: Any, expected: Any) -> None:
    assert check_finite(value, "score") == expected
    assert type(check_finite(value, "score")) is type(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", [1]])
def test_check_finite_refuses_infinite_and_other_values(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_finite(value, "score")
