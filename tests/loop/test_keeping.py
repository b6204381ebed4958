from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from branchline.core.errors import EngineError
from branchline.core.message import Message
from branchline.loop.cancel import CancelToken
from branchline.loop.interactions.base import BaseInteraction, Response
from branchline.loop.interactions.registry import Partner
from branchline.loop.machine import AgentLoop
from branchline.loop.state import LoopState, State
from branchline.loop.tools.base import BaseTool, ToolResult
from branchline.loop.tools.functions import tool
from branchline.loop.tools.registry import Selection
from tests.loop.playing import Deed, Deeds, Script, Stage, Turn, stage
from tests.loop.running import run

DEED = Turn(deeds=(Deed(),))
SCRIPT = Script((DEED, Turn("a long answer", deeds=(Deed(),), holds=(4,)), Turn("end")))


class Purse(BaseTool):
    """Fills by one coin with each call; says what is in it at the end."""

    name = "deed"
    schema = Deeds.schema

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


class KeptPurse(Purse):
    """The same, and it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.restored = 0

    def save(self, instance: list[str]) -> Any:
        return list(instance)

    async def restore(self, trajectory: str, saved: list[str], **arguments: Any) -> list[str]:
        self.restored += 1
        return saved


class BrokenPurse(KeptPurse):
    def save(self, instance: list[str]) -> Any:
        raise ValueError("it is stuck")


class SecretPurse(KeptPurse):
    def save(self, instance: list[str]) -> Any:
        return object()


def _loop(s: Stage, state: LoopState, purse: Purse) -> AgentLoop:
    return AgentLoop(s.model, state, tools=Selection((purse,), {"deed": {"gift": "button"}}))


async def _cancelled(s: Stage, loop: AgentLoop) -> None:
    cancel = CancelToken()
    task = asyncio.create_task(loop.run(cancel))
    await s.engine.held.wait()
    cancel.cancel()
    assert (await task).is_cancel


FAULTS: dict[Any, list[str]] = {
    KeptPurse: [],
    Purse: ["made again"],
    BrokenPurse: ["save", "made again"],
    SecretPurse: ["save", "made again"],
}


@pytest.mark.parametrize(
    ("purse", "coins"), [(KeptPurse(), 3.0), (Purse(), 2.0), (BrokenPurse(), 2.0), (SecretPurse(), 2.0)]
)
def test_what_a_tool_saved_is_there_when_the_trajectory_goes_on(
    purse: Purse, coins: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
            state = LoopState.decode(state.encode())
            assert state.tool_states == ({"deed": ["button", "coin"]} if coins == 3 else {})
            async with _loop(s, state, purse) as loop:
                state = await loop.run()
            assert state.final_rewards == {"deed": coins}
            assert state.reward_score == coins, "what it says of itself still counts"
            assert [fault.doing for fault in state.faults] == FAULTS[type(purse)]
            assert ("deed: made again: it was used before" in caplog.text) == (coins < 3)
            assert purse.created == (1 if coins == 3 else 2)
            assert state.tool_states == {}, "nobody will ask for it"

    run(test)


def test_inside_one_block_a_cancelled_loop_finds_its_tools_as_they_were() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            state, purse = LoopState.begin(s.task()), Purse()
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
                state = await loop.run()
            assert (state.final_rewards, purse.created) == ({"deed": 3.0}, 1)

    run(test)


def test_what_could_not_be_saved_is_told_and_the_state_can_be_written() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            state = LoopState.begin(s.task())
            async with _loop(s, state, SecretPurse()) as loop:
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
        unused = Script((Turn("a long answer", deeds=(Deed(),), holds=(4,)), Turn("end")))
        for script, keeper in ((unused, Purse()), (SCRIPT, deed)):
            async with stage(script) as s:
                state = LoopState.begin(s.task())
                async with AgentLoop(s.model, state, tools=Selection((keeper,))) as loop:
                    await _cancelled(s, loop)
                async with AgentLoop(s.model, state, tools=Selection((keeper,))) as loop:
                    state = await loop.run()
                assert (state.is_over, state.faults) == (True, [])

    run(test)


def test_what_is_saved_is_not_what_lives() -> None:
    async def test() -> None:
        async with stage(SCRIPT) as s:
            state, purse = LoopState.begin(s.task()), KeptPurse()
            async with _loop(s, state, purse) as loop:
                await _cancelled(s, loop)
            saved = state.tool_states["deed"]
            s.engine.failure = EngineError("gone")
            with pytest.raises(EngineError):
                async with _loop(s, state, purse) as loop:
                    await loop.run()
            assert saved == ["button", "coin"]

    run(test)


class Guest(BaseInteraction):
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

    async def respond(self, state: dict[str, Any], messages: Sequence[Message]) -> Response:
        state["heard"] += 1
        return Response(state["heard"] == 2, f"{state['who']} heard {state['heard']}")

    async def score(self, state: dict[str, Any]) -> float | None:
        return float(state["heard"])


@pytest.mark.parametrize("holds", [(0,), (2,), ()])
def test_an_interaction_goes_on_where_it_was_left_and_greets_once(holds: tuple[int, ...]) -> None:
    async def test() -> None:
        later = () if holds else (3,)
        async with stage(Script((Turn("one", holds=holds), Turn("and two", holds=later)))) as s:
            guest, state = Guest(), LoopState.begin(s.task())
            partner = Partner(guest, {"who": "she"})
            async with AgentLoop(s.model, state, partner=partner) as loop:
                await _cancelled(s, loop)
            state = LoopState.decode(state.encode("json"))
            assert state.state is State.GENERATING
            assert state.partner_states == {"guest": {"heard": 0 if holds else 1, "who": "she"}}
            async with AgentLoop(s.model, state, partner=partner) as loop:
                state = await loop.run()
            assert [m.text for m in state.messages[2:]] == [
                *["Hello.", "one", "she heard 1", "and two", "she heard 2"]
            ]
            assert (state.score, guest.starts, state.partner_states) == (2.0, 1, {})

    run(test)
