from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop.faults import Fault
from branchline.loop.interaction_session import InteractionSession
from branchline.loop.interactions.base import BaseInteraction, InteractionResponse
from branchline.loop.interactions.registry import InteractionConfig
from branchline.loop.state import LoopLimits, LoopPhase, LoopState, Task, TurnRecord
from branchline.loop.timeouts import CANCEL_GRACE_S
from tests.loop.clock_runner import move_clock, run


class FakeInteraction(BaseInteraction):
    """Says what it was told to say; `hangs` names what never ends."""

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
        self.reached, self.refused, self.leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self.given: list[Any] = []
        self.finalized = 0

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, Any]:
        self.given.append(arguments)
        await self._do("start")
        return arguments, self._first_message

    async def respond(self, state: Any, messages: Sequence[Message]) -> Any:
        await self._do("respond")
        return self._response

    async def score(self, state: Any) -> Any:
        await self._do("score")
        return self._score

    async def finalize(self, state: Any) -> None:
        self.finalized += 1
        await self._do("finalize")

    async def _do(self, doing: str) -> None:
        if doing != self._hangs:
            return
        self.task = asyncio.current_task()
        self.reached.set()
        while not self.leave.is_set():
            try:
                await self.leave.wait()
            except asyncio.CancelledError:
                if not self._ignores_cancel:
                    raise
                self.refused.set()


def interaction_session(odd: FakeInteraction, arguments: Any = None, **limits: Any) -> InteractionSession:
    return InteractionSession(
        InteractionConfig(odd, arguments or {}), LoopState.begin(Task(()), "t"), LoopLimits(**limits)
    )


# -- what is handed over -----------------------------------------------------------------------------


def test_scores_become_numbers_and_extras_plain_data() -> None:
    async def test() -> None:
        answer = InteractionResponse(np.bool_(False), "a\ud800", score=True, extras={"n": np.int64(2)})  # type: ignore[arg-type]
        async with interaction_session(FakeInteraction(answer, np.float32(0.5))) as one:
            response = await one.respond(())
            assert response == InteractionResponse(False, "a\ufffd", 1.0, {"n": 2})
            assert [type(value) for value in (response.terminate, response.score)] == [bool, float]
            score = await one.score()
            assert (score, type(score)) == (0.5, float)
        async with interaction_session(FakeInteraction(InteractionResponse(True, extras=None))) as one:  # type: ignore[arg-type]
            assert await one.respond(()) == InteractionResponse(True)
            assert await one.score() is None

    run(test)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (InteractionResponse(True, score=float("nan")), "score: got nan, expected a finite number"),
        (InteractionResponse(True, score="good"), "could not convert string to float"),  # type: ignore[arg-type]
        (InteractionResponse(True, None), "content: got None, expected a text"),  # type: ignore[arg-type]
        (InteractionResponse(True, extras=[1]), "extras: got list, expected an object"),  # type: ignore[arg-type]
        (
            InteractionResponse(True, extras={"a": object()}),
            "extras: got a object, expected values that JSON can hold",
        ),
        ((True, "bye"), "got tuple, expected a Response"),
    ],
)
def test_an_answer_that_nobody_could_use_is_refused_by_name(response: Any, words: str) -> None:
    async def test() -> None:
        async with interaction_session(FakeInteraction(response)) as one:
            with pytest.raises(InputError, match=f"^interaction 'odd': respond: {words}"):
                await one.respond(())

    run(test)


@pytest.mark.parametrize("score", [float("inf"), "good", [1]])
def test_a_score_that_cannot_be_trained_on_is_refused_by_name(score: Any) -> None:
    async def test() -> None:
        async with interaction_session(FakeInteraction(score=score)) as one:
            with pytest.raises(InputError, match=r"^interaction 'odd': "):
                await one.score()

    run(test)


def test_first_words_that_are_no_text_are_refused_and_the_interaction_is_put_away() -> None:
    async def test() -> None:
        odd = FakeInteraction(first_message=["Hello."])
        with pytest.raises(InputError, match=r"interaction 'odd': start: got \['Hello\.'\], expected a text"):
            await interaction_session(odd).__aenter__()
        assert odd.finalized == 1
        async with interaction_session(FakeInteraction(first_message="Hello.")) as one:
            assert one.first_message == "Hello."

    run(test)


def test_what_one_trajectory_does_to_its_arguments_is_no_others_business() -> None:
    async def test() -> None:
        odd, arguments = FakeInteraction(), {"stock": ["apple"]}
        for _ in range(2):
            async with interaction_session(odd, arguments):
                assert odd.given[-1] == {"stock": ["apple"]}
                odd.given[-1]["stock"].clear()
        assert arguments == {"stock": ["apple"]}

    run(test)


# -- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["start", "respond", "score"])
def test_whoever_takes_too_long_is_an_error_that_names_them(where: str) -> None:
    async def test() -> None:
        odd = FakeInteraction(InteractionResponse(True), hangs=where)

        async def converse() -> None:
            async with interaction_session(odd, interaction_timeout_s=5) as one:
                await one.respond(())
                await one.score()

        task = asyncio.create_task(converse())
        await odd.reached.wait()
        move_clock(5)
        with pytest.raises(TimeoutError, match=f"^interaction 'odd': {where}: timed out after 5 s"):
            await task
        assert odd.finalized == (where != "start")

    run(test)


def test_a_timeout_of_its_own_is_told_as_it_is() -> None:
    class Slow(FakeInteraction):
        async def respond(self, state: Any, messages: Sequence[Message]) -> Any:
            raise TimeoutError("the other model is away")

    async def test() -> None:
        async with interaction_session(Slow()) as one:
            with pytest.raises(TimeoutError, match=r"^interaction 'odd': respond: the other model is away"):
                await one.respond(())

    run(test)


def test_one_that_comes_after_everybody_left_is_put_away_all_the_same() -> None:
    async def test() -> None:
        odd = FakeInteraction(hangs="start", ignores_cancel=True)
        entering = asyncio.create_task(interaction_session(odd, interaction_timeout_s=5).__aenter__())
        await odd.reached.wait()
        move_clock(5)
        await odd.refused.wait()
        move_clock(CANCEL_GRACE_S)
        with pytest.raises(TimeoutError):
            await entering
        assert odd.finalized == 0
        odd.leave.set()
        assert odd.task is not None
        await asyncio.wait({odd.task})
        assert odd.finalized == 1

    run(test)


def test_one_that_cannot_leave_is_a_fault() -> None:
    async def test() -> None:
        odd = FakeInteraction(hangs="finalize")
        one = await interaction_session(odd, tool_release_timeout_s=3).__aenter__()
        leaving = asyncio.create_task(one.__aexit__())
        await odd.reached.wait()
        move_clock(3)
        await leaving
        assert one._state.faults == [Fault("odd", "finalize", "timed out after 3 s")]

    run(test)


# -- going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_used", [False, True])
def test_one_that_forgot_what_was_said_is_a_fault(is_used: bool) -> None:
    async def test() -> None:
        state = LoopState.begin(Task(()), "t")
        state.phase = LoopPhase.GENERATING
        if is_used:
            state.turn_records = [TurnRecord(1, "no", False)]
        async with InteractionSession(InteractionConfig(FakeInteraction()), state, LoopLimits()):
            assert [(fault.name, fault.operation) for fault in state.faults] == [("odd", "recreated")] * is_used

    run(test)


def test_one_that_has_nothing_of_its_own_to_forget_is_none() -> None:
    class Plain(BaseInteraction):
        name = "plain"

    async def test() -> None:
        state = LoopState.begin(Task(()), "t")
        state.turn_records = [TurnRecord(1, "no", False)]
        async with InteractionSession(InteractionConfig(Plain()), state, LoopLimits()):
            assert state.faults == []

    run(test)
