from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.cancel import CancelToken
from branchline.loop.state import LoopLimits, LoopState, StopReason, Task
from branchline.loop.token_budget import is_slow_to_truncate, reached_limit
from branchline.loop.tools.registry import ToolSelection
from tests.loop.clock_runner import run
from tests.loop.harness import LoopScript, ScriptedToolCall, ScriptedTurn, loop_harness

LONG = "x" * 50_001


def state_with(**fields: int) -> LoopState:
    state = LoopState.begin(Task(()))
    for name, value in fields.items():
        setattr(state, name, value)
    return state


@pytest.mark.parametrize(
    ("limits", "ending"),
    [
        (LoopLimits(), None),
        (LoopLimits(max_assistant_turns=3, max_user_turns=3, model_length=101, response_length=81), None),
        (LoopLimits(max_assistant_turns=2), (StopReason.ASSISTANT_TURNS, "2 of 2")),
        (LoopLimits(max_user_turns=1), (StopReason.USER_TURNS, "1 of 1")),
        (LoopLimits(model_length=100), (StopReason.MODEL_LENGTH, "100 tokens of 100")),
        (LoopLimits(response_length=80), (StopReason.RESPONSE_LENGTH, "80 tokens of 80")),
        (
            LoopLimits(max_assistant_turns=2, max_user_turns=1, model_length=100),
            (StopReason.MODEL_LENGTH, "100 tokens of 100"),
        ),
    ],
)
def test_a_limit_that_is_reached_makes_an_answer_the_last(
    limits: LoopLimits, ending: tuple[StopReason, str] | None
) -> None:
    assert (
        reached_limit(limits, state_with(assistant_turns=2, user_turns=1, tokens=100, first_tokens=20))
        == ending
    )


@pytest.mark.parametrize(
    ("text", "limits", "expected"),
    [
        (LONG, LoopLimits(tool_response_length=9), True),
        (LONG[1:], LoopLimits(tool_response_length=9), False),
        (LONG, LoopLimits(tool_response_length=9, tool_response_unit="characters"), False),
        (LONG, LoopLimits(), False),
    ],
)
def test_only_what_takes_long_to_cut_goes_to_a_thread(text: str, limits: LoopLimits, expected: bool) -> None:
    assert is_slow_to_truncate(Message("tool", text), limits) is expected


class SlowCodec:
    """Encodes when it is let; whoever waits for it on the event loop waits in vain."""

    def __init__(self) -> None:
        self._toy = ToyCodec()
        self._loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.gate = threading.Event()

    def encode(self, text: str) -> Ids:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.gate.wait(10), "nobody could open the gate"
        return self._toy.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._toy.decode(ids)


class SlowModel:
    """A model with such a codec."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.codec = SlowCodec()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_while_a_long_result_is_cut_others_go_on_and_a_cancel_loses_nothing(is_cancelled: bool) -> None:
    async def test() -> None:
        async with loop_harness(
            LoopScript((ScriptedTurn(tool_calls=(ScriptedToolCall(result=LONG),)), ScriptedTurn("end")))
        ) as s:
            model, cancel = SlowModel(s.model), CancelToken()
            state, limits = LoopState.begin(s.task()), LoopLimits(tool_response_length=4)
            tools = ToolSelection((s.tool,))
            async with AgentLoop(model, state, tools=tools, limits=limits) as loop:  # type: ignore[arg-type]
                task = asyncio.create_task(loop.run(cancel))
                await model.codec.begun.wait()
                if is_cancelled:
                    cancel.cancel()
                model.codec.gate.set()
                assert (await task).is_cancelled == is_cancelled
                if is_cancelled:
                    assert state.pending_results[0].message.content == "xx...(truncated)...xx"
                    state = await loop.run()
            assert state.messages[3].content == "xx...(truncated)...xx"
            assert s.tool.executed == [(0, 0)], "a call that is over does not run again"
            assert state.stop_reason is StopReason.STOP

    run(test)
