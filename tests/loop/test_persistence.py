from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from branchline.core.errors import EngineError
from branchline.core.message import Message
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.cancel import CancelToken
from branchline.loop.interactions.base import BaseInteraction, InteractionResponse
from branchline.loop.interactions.registry import InteractionConfig
from branchline.loop.state import LoopPhase, LoopState
from branchline.loop.tools.base import BaseTool, ToolResult
from branchline.loop.tools.functions import tool
from branchline.loop.tools.registry import ToolSelection
from tests.loop.clock_runner import run
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
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
    """Fills by one coin with each call; says what is in it at the end."""

    name = "deed"
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
    """The same, and it lasts."""

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
        raise ValueError("it is stuck")


class UnserializableTool(PersistentCoinTool):
    def save(self, instance: list[str]) -> Any:
        return object()


def _loop(s: LoopHarness, state: LoopState, purse: CoinTool) -> AgentLoop:
    return AgentLoop(s.model, state, tools=ToolSelection((purse,), {"deed": {"gift": "button"}}))


async def _cancelled(s: LoopHarness, loop: AgentLoop) -> None:
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
    ("purse", "coins"),
    [(PersistentCoinTool(), 3.0), (CoinTool(), 2.0), (FailingSaveTool(), 2.0), (UnserializableTool(), 2.0)],
)
def test_what_a_tool_saved_is_there_when_the_trajectory_goes_on(
    purse: CoinTool, coins: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
            state = LoopState.decode(state.encode())
            assert state.tool_states == ({"deed": ["button", "coin"]} if coins == 3 else {})
            async with _loop(s, state, purse) as loop:
                state = await loop.run()
            assert state.final_rewards == {"deed": coins}
            assert state.reward_score == coins, "what it says of itself still counts"
            assert [fault.operation for fault in state.faults] == FAULTS[type(purse)]
            assert ("deed: recreated: it was used before" in caplog.text) == (coins < 3)
            assert purse.created == (1 if coins == 3 else 2)
            assert state.tool_states == {}, "nobody will ask for it"

    run(test)


def test_inside_one_block_a_cancelled_loop_finds_its_tools_as_they_were() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state, purse = LoopState.begin(s.task()), CoinTool()
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
                state = await loop.run()
            assert (state.final_rewards, purse.created) == ({"deed": 3.0}, 1)

    run(test)


def test_what_could_not_be_saved_is_told_and_the_state_can_be_written() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, UnserializableTool()) as loop:
                await _cancelled(s, loop)
            (fault,) = LoopState.decode(state.encode()).faults
            words = "deed: save: saved: got a object, expected values that JSON can hold"
            assert str(fault) == words

    run(test)


@tool
def deed(turn: int, place: int) -> str:
    """Does it."""
    return "done"


def test_a_tool_that_was_not_used_or_keeps_nothing_is_made_again_without_a_word() -> None:
    async def test() -> None:
        unused = LoopScript(
            (
                ScriptedTurn("a long answer", tool_calls=(ScriptedToolCall(),), cancel_points=(4,)),
                ScriptedTurn("end"),
            )
        )
        for script, keeper in ((unused, CoinTool()), (SCRIPT, deed)):
            async with loop_harness(script) as s:
                state = LoopState.begin(s.task())
                async with AgentLoop(s.model, state, tools=ToolSelection((keeper,))) as loop:
                    await _cancelled(s, loop)
                async with AgentLoop(s.model, state, tools=ToolSelection((keeper,))) as loop:
                    state = await loop.run()
                assert (state.is_finished, state.faults) == (True, [])

    run(test)


def test_what_is_saved_is_not_what_lives() -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state, purse = LoopState.begin(s.task()), PersistentCoinTool()
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
            saved = state.tool_states["deed"]
            s.engine.failure = EngineError("gone")
            with pytest.raises(EngineError):
                async with _loop(s, state, purse) as loop:
                    await loop.run()
            assert saved == ["button", "coin"]

    run(test)


class CountingInteraction(BaseInteraction):
    """Greets once, and counts."""

    name = "guest"

    def __init__(self) -> None:
        self.starts = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[dict[str, Any], str | None]:
        self.starts += 1
        return {"heard": 0, **arguments}, "Hello."

    def save(self, state: dict[str, Any]) -> Any:
        return state

    async def restore(self, trajectory: str, saved: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        return saved

    async def respond(self, state: dict[str, Any], messages: Sequence[Message]) -> InteractionResponse:
        state["heard"] += 1
        return InteractionResponse(state["heard"] == 2, f"{state['who']} heard {state['heard']}")

    async def score(self, state: dict[str, Any]) -> float | None:
        return float(state["heard"])


@pytest.mark.parametrize("holds", [(0,), (2,), ()])
def test_an_interaction_goes_on_where_it_was_left_and_greets_once(holds: tuple[int, ...]) -> None:
    async def test() -> None:
        later = () if holds else (3,)
        async with loop_harness(
            LoopScript(
                (ScriptedTurn("one", cancel_points=holds), ScriptedTurn("and two", cancel_points=later))
            )
        ) as s:
            guest, state = CountingInteraction(), LoopState.begin(s.task())
            partner = InteractionConfig(guest, {"who": "she"})
            async with AgentLoop(s.model, state, interaction=partner) as loop:
                await _cancelled(s, loop)
            state = LoopState.decode(state.encode("json"))
            assert state.phase is LoopPhase.GENERATING
            assert state.interaction_states == {"guest": {"heard": 0 if holds else 1, "who": "she"}}
            async with AgentLoop(s.model, state, interaction=partner) as loop:
                state = await loop.run()
            assert [m.content for m in state.messages[2:]] == [
                *["Hello.", "one", "she heard 1", "and two", "she heard 2"]
            ]
            assert (state.score, guest.starts, state.interaction_states) == (2.0, 1, {})

    run(test)
