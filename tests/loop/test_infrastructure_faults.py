"""Failures outside the model end one trajectory with a named fault, and it is not training data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from branchline.core.errors import ToolUnavailableError
from branchline.core.message import Message
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.interaction import BaseInteraction, InteractionConfig, InteractionResponse
from branchline.loop.output import build_output
from branchline.loop.state import LoopState, StopReason
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection
from tests.loop.harness import (
    LoopHarness,
    LoopScript,
    ScriptedTool,
    ScriptedToolCall,
    ScriptedTurn,
    loop_harness,
    run,
)

SCRIPT = LoopScript(
    (
        ScriptedTurn("one", tool_calls=(ScriptedToolCall(), ScriptedToolCall())),
        ScriptedTurn("two"),
        ScriptedTurn("three"),
    )
)


class OddError(Exception):
    """An error without a readable text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Interrupt(BaseException):
    """As some frameworks define."""


class FailingTool(BaseTool):
    """Raises in the methods that `errors` names."""

    name = "act"
    schema = ScriptedTool.schema

    def __init__(self, **errors: BaseException) -> None:
        self._errors = errors

    async def create(self, trajectory: str, **arguments: Any) -> None:
        self._raise("create")

    async def execute(self, instance: None, arguments: Mapping[str, Any]) -> ToolResult:
        if arguments["index"] == 0:
            self._raise("execute")
        return ToolResult("done", reward=1.0)

    async def calc_reward(self, instance: None) -> float | None:
        return 1.0

    def save(self, instance: None) -> Any:
        self._raise("save")

    def _raise(self, method: str) -> None:
        if method in self._errors:
            raise self._errors[method]


class FailingUser(BaseInteraction):
    """Raises in the methods that `errors` names."""

    name = "user"

    def __init__(self, **errors: BaseException) -> None:
        self._errors = errors

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        self._raise("start")
        return None, "Hello."

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        self._raise("respond")
        return InteractionResponse(True, score=1.0)

    async def score(self, state: Any) -> float | None:
        self._raise("score")
        return 1.0

    def _raise(self, method: str) -> None:
        if method in self._errors:
            raise self._errors[method]


async def run_loop(
    s: LoopHarness, tool: BaseTool | None = None, user: BaseInteraction | None = None, model: Any = None
) -> LoopState:
    async with AgentLoop(
        model or s.model,
        LoopState.begin(s.task(), "t"),
        tools=ToolSelection((tool or FailingTool(),)),
        interaction=None if user is None else InteractionConfig(user),
    ) as loop:
        return await loop.run()


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("method", ["create", "execute"])
def test_a_tool_that_is_unavailable_ends_the_trajectory_and_its_samples_are_excluded(
    method: str, over_http: bool
) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT, over_http=over_http) as s:
            error = ToolUnavailableError("act", method, "its server is gone")
            state = await run_loop(s, FailingTool(**{method: error}))
            assert (state.stop_reason, state.reward_score) == (StopReason.TOOL_UNAVAILABLE, None)
            assert [str(fault) for fault in state.faults] == ["act: unavailable: its server is gone"]
            assert [message.role for message in state.messages[2:]] == ["assistant"] * (method == "execute")
            output = await build_output(state, s.model)
            assert (output.outputs, output.reward_score, len(output.response_ids)) == ((), None, 0)
            assert s.managed.state == "aborted"
            assert s.managed.reason == f"tool_unavailable: tool 'act': {method}: its server is gone"
            assert await s.model.samples() == []
            asked = await build_output(state, s.model, include_excluded=True)
            assert len(asked.outputs) == (method == "execute")

    run(test)


@pytest.mark.parametrize("method", ["start", "respond"])
def test_a_failing_interaction_ends_one_trajectory_and_not_the_others(method: str) -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            users = [FailingUser(), FailingUser(**{method: ValueError("no connection")}), FailingUser()]
            models = [await s.open_another() for _ in users]
            states = await asyncio.gather(
                *[run_loop(s, user=user, model=model) for user, model in zip(users, models, strict=True)]
            )
            assert [state.stop_reason for state in states] == [
                StopReason.INTERACTION,
                StopReason.INTERACTION_FAILED,
                StopReason.INTERACTION,
            ]
            assert [state.reward_score for state in states] == [1.0, None, 1.0]
            assert [str(fault) for fault in states[1].faults] == [f"user: {method}: no connection"]
            assert (await build_output(states[1], models[1])).outputs == ()

    run(test)


def test_a_failing_score_leaves_the_trajectory_without_a_reward() -> None:
    async def test() -> None:
        async with loop_harness(LoopScript((ScriptedTurn("end"),))) as s:
            state = await run_loop(s, user=FailingUser(score=ValueError("no judge")))
            assert (state.stop_reason, state.reward_score) == (StopReason.INTERACTION, None)
            assert [str(fault) for fault in state.faults] == ["user: score: no judge"]
            assert len((await build_output(state, s.model)).outputs) == 1
            assert s.managed.state == "completed"

    run(test)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OddError(), "OddError, whose text cannot be read"),
        (Interrupt("stop"), "Interrupt: stop"),
        (SystemExit(2), "SystemExit: 2"),
    ],
)
def test_odd_exceptions_are_tool_errors(error: BaseException, text: str) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            state = await run_loop(s, FailingTool(execute=error))
            assert state.stop_reason is StopReason.STOP
            assert [result.content for result in state.tool_results] == [
                f"Error executing tool 'act': {text}",
                "done",
            ]

    run(test)


@pytest.mark.parametrize("error", [OddError(), Interrupt("stop")])
def test_an_odd_exception_of_save_is_a_fault(error: BaseException) -> None:
    async def test() -> None:
        async with loop_harness(SCRIPT) as s:
            s.engine.failure = RuntimeError("no engine")
            state = LoopState.begin(s.task(), "t")
            async with AgentLoop(s.model, state, tools=ToolSelection((FailingTool(save=error),))) as loop:
                with pytest.raises(RuntimeError, match="no engine"):
                    await loop.run()
            assert [fault.operation for fault in state.faults] == ["save"]

    run(test)
