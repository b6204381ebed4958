from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import InteractionError
from branchline.core.message import Message
from branchline.loop.interaction import (
    BaseInteraction,
    InteractionConfig,
    InteractionResponse,
    InteractionSession,
)
from branchline.loop.persistence import Fault
from branchline.loop.state import LoopPhase, LoopState, TurnRecord
from branchline.loop.task import LoopLimits, Task
from tests.loop.harness import move_clock, run


class FakeInteraction(BaseInteraction):
    """Returns what it is given; `hangs` names the method that never returns."""

    name = "odd"

    def __init__(
        self,
        response: Any = None,
        score: Any = None,
        *,
        first_message: Any = None,
        hangs: str = "",
        ignores_cancel: bool = False,
    ) -> None:
        self._response, self._score, self._first_message = response, score, first_message
        self._hangs, self._ignores_cancel = hangs, ignores_cancel
        self.reached, self.refused, self.stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self.arguments: list[Any] = []
        self.finalized = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, Any]:
        self.arguments.append(arguments)
        await self._reach("start")
        return arguments, self._first_message

    async def respond(self, state: Any, messages: Sequence[Message]) -> Any:
        await self._reach("respond")
        return self._response

    async def score(self, state: Any) -> Any:
        await self._reach("score")
        return self._score

    async def finalize(self, state: Any) -> None:
        self.finalized += 1
        await self._reach("finalize")

    async def _reach(self, method: str) -> None:
        if method != self._hangs:
            return
        self.task = asyncio.current_task()
        self.reached.set()
        while not self.stop.is_set():
            try:
                await self.stop.wait()
            except asyncio.CancelledError:
                if not self._ignores_cancel:
                    raise
                self.refused.set()


def interaction_session(odd: FakeInteraction, arguments: Any = None, **limits: Any) -> InteractionSession:
    return InteractionSession(
        InteractionConfig(odd, arguments or {}), LoopState.begin(Task(()), "t"), LoopLimits(**limits)
    )


# -- validation --------------------------------------------------------------------------------------


def test_scores_become_numbers_and_extras_plain_data() -> None:
    async def test() -> None:
        raw = InteractionResponse(np.bool_(False), "a\ud800", score=True, extras={"n": np.int64(2)})  # type: ignore[arg-type]
        async with interaction_session(FakeInteraction(raw, np.float32(0.5))) as session:
            response = await session.respond(())
            assert response == InteractionResponse(False, "a\ufffd", 1.0, {"n": 2})
            assert [type(value) for value in (response.terminate, response.score)] == [bool, float]
            score = await session.score()
            assert (score, type(score)) == (0.5, float)
        async with interaction_session(FakeInteraction(InteractionResponse(True, extras=None))) as session:  # type: ignore[arg-type]
            assert await session.respond(()) == InteractionResponse(True)
            assert await session.score() is None

    run(test)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (InteractionResponse(True, score=float("nan")), "score: got nan, expected a finite number"),
        (InteractionResponse(True, score="good"), "score: got .good., expected a number"),  # type: ignore[arg-type]
        (InteractionResponse(True, None), "content: got None, expected a text"),  # type: ignore[arg-type]
        (InteractionResponse(True, extras=[1]), "extras: got list, expected an object"),  # type: ignore[arg-type]
        (
            InteractionResponse(True, extras={"a": object()}),
            "extras: got a object, expected values that JSON can hold",
        ),
        ((True, "bye"), "got tuple, expected an InteractionResponse"),
    ],
)
def test_an_invalid_response_is_refused_with_the_name(response: Any, message: str) -> None:
    async def test() -> None:
        async with interaction_session(FakeInteraction(response)) as session:
            with pytest.raises(InteractionError, match=f"^interaction 'odd': respond: {message}"):
                await session.respond(())

    run(test)


@pytest.mark.parametrize("score", [float("inf"), "good", [1]])
def test_an_invalid_score_is_refused_with_the_name(score: Any) -> None:
    async def test() -> None:
        async with interaction_session(FakeInteraction(score=score)) as session:
            with pytest.raises(InteractionError, match=r"^interaction 'odd': "):
                await session.score()

    run(test)


def test_an_invalid_first_message_is_refused_and_the_interaction_finalized() -> None:
    async def test() -> None:
        odd = FakeInteraction(first_message=["Hello."])
        with pytest.raises(
            InteractionError, match=r"interaction 'odd': start: got \['Hello\.'\], expected a text"
        ):
            await interaction_session(odd).__aenter__()
        assert odd.finalized == 1
        async with interaction_session(FakeInteraction(first_message="Hello.")) as session:
            assert session.first_message == "Hello."

    run(test)


def test_a_trajectory_may_change_its_arguments() -> None:
    async def test() -> None:
        odd, arguments = FakeInteraction(), {"stock": ["apple"]}
        for _ in range(2):
            async with interaction_session(odd, arguments):
                assert odd.arguments[-1] == {"stock": ["apple"]}
                odd.arguments[-1]["stock"].clear()
        assert arguments == {"stock": ["apple"]}

    run(test)


# -- time limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["start", "respond", "score"])
def test_a_timeout_is_an_error_with_the_name_and_the_method(method: str) -> None:
    async def test() -> None:
        odd = FakeInteraction(InteractionResponse(True), hangs=method)

        async def use() -> None:
            async with interaction_session(odd, interaction_timeout_s=5) as session:
                await session.respond(())
                await session.score()

        task = asyncio.create_task(use())
        await odd.reached.wait()
        move_clock(5)
        with pytest.raises(InteractionError, match=f"^interaction 'odd': {method}: timed out after 5 s"):
            await task
        assert odd.finalized == (method != "start")

    run(test)


def test_a_timeout_error_of_the_interaction_keeps_its_text() -> None:
    class Slow(FakeInteraction):
        async def respond(self, state: Any, messages: Sequence[Message]) -> Any:
            raise TimeoutError("the other model is down")

    async def test() -> None:
        async with interaction_session(Slow()) as session:
            with pytest.raises(
                InteractionError, match=r"^interaction 'odd': respond: the other model is down"
            ):
                await session.respond(())

    run(test)


def test_a_state_that_arrives_after_the_grace_period_is_finalized() -> None:
    async def test() -> None:
        odd = FakeInteraction(hangs="start", ignores_cancel=True)
        entering = asyncio.create_task(interaction_session(odd, interaction_timeout_s=5).__aenter__())
        await odd.reached.wait()
        move_clock(5)
        await odd.refused.wait()
        move_clock(LoopLimits().cancel_grace_s)
        with pytest.raises(InteractionError):
            await entering
        assert odd.finalized == 0
        odd.stop.set()
        assert odd.task is not None
        await asyncio.wait({odd.task})
        assert odd.finalized == 1

    run(test)


def test_a_failed_finalize_is_a_fault() -> None:
    async def test() -> None:
        odd = FakeInteraction(hangs="finalize")
        session = await interaction_session(odd, tool_release_timeout_s=3).__aenter__()
        exiting = asyncio.create_task(session.__aexit__())
        await odd.reached.wait()
        move_clock(3)
        await exiting
        assert session._state.faults == [Fault("odd", "finalize", "timed out after 3 s")]

    run(test)


# -- resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_used", [False, True])
def test_a_used_interaction_without_saved_state_is_a_fault(is_used: bool) -> None:
    async def test() -> None:
        state = LoopState.begin(Task(()), "t")
        state.phase = LoopPhase.GENERATING
        if is_used:
            state.turn_records = [TurnRecord(1, "no", False)]
        async with InteractionSession(InteractionConfig(FakeInteraction()), state, LoopLimits()):
            assert [(fault.name, fault.operation) for fault in state.faults] == [
                ("odd", "recreated")
            ] * is_used

    run(test)


def test_a_stateless_interaction_is_no_fault() -> None:
    class Plain(BaseInteraction):
        name = "plain"

    async def test() -> None:
        state = LoopState.begin(Task(()), "t")
        state.turn_records = [TurnRecord(1, "no", False)]
        async with InteractionSession(InteractionConfig(Plain()), state, LoopLimits()):
            assert state.faults == []

    run(test)


def test_only_respond_has_to_be_written() -> None:
    class Echo(BaseInteraction):
        name = "echo"

        async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
            return InteractionResponse(False, messages[-1].content * state["times"])

    async def test() -> None:
        echo = Echo()
        state, first = await echo.start("t1", times=2)
        assert first is None
        assert await echo.respond(state, [Message("assistant", "ha")]) == InteractionResponse(False, "haha")
        assert await echo.score(state) is None
        await echo.finalize(state)
        assert (echo.is_stateful, echo.save(state)) == (False, None)
        with pytest.raises(NotImplementedError, match=r"BaseInteraction\.respond"):
            await BaseInteraction().respond(state, [])
        with pytest.raises(NotImplementedError, match=r"Echo\.restore"):
            await echo.restore("t1", {})

    run(test)
