"""A compaction policy that fails ends its own trajectory with a fault, and nothing else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.context.context_loop import ContextOptions
from branchline.loop.model import SessionModel
from branchline.loop.output import build_output
from branchline.loop.persistence import Fault
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import LoopLimits
from branchline.runtime.compaction import Compaction, DropLeastImportant, DropOldest
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.loop.context.harness import context_harness
from tests.loop.context.test_context_loop import ECHOES, FINISH, first_prompt_tokens
from tests.loop.harness import run


class Policy:
    """Returns what a function returns."""

    def __init__(self, plan: Callable[[], Any]) -> None:
        self._plan = plan

    def plan(self, messages: Any, tokens: Any, excess: int) -> Any:
        return self._plan()


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException) -> Policy:
    def plan() -> Any:
        raise error

    return Policy(plan)


async def coroutine() -> None: ...


FAILING: dict[str, tuple[Any, str]] = {
    "raises": (raising(ValueError("no index")), "ValueError: no index"),
    "raises without a text": (raising(UnreadableError()), "UnreadableError"),
    "raises an InputError": (raising(RecursionError("deep")), "RecursionError: deep"),
    "exits": (raising(SystemExit(1)), "SystemExit: 1"),
    "cancels": (raising(asyncio.CancelledError()), "CancelledError"),
    "no plan": (Policy(lambda: [2, 3]), "plan: got [2, 3], expected a Compaction or None"),
    "false": (Policy(lambda: False), "plan: got False, expected a Compaction or None"),
    "empty": (Policy(lambda: Compaction(())), "positions: got (), expected distinct positions in order"),
    "out of range": (Policy(lambda: Compaction((2, 99))), "positions: got (2, 99), expected positions of"),
    "negative": (Policy(lambda: Compaction((-1, 2))), "positions: got (-1, 2), expected positions of"),
    "unsorted": (Policy(lambda: Compaction((3, 2))), "positions: got (3, 2), expected distinct"),
    "twice": (Policy(lambda: Compaction((2, 2))), "positions: got (2, 2), expected distinct"),
    "no numbers": (
        Policy(lambda: Compaction(("2",))),  # type: ignore[arg-type]
        "positions: got ('2',), expected a tuple of whole numbers",
    ),
    "halves": (
        Policy(lambda: Compaction((2.0,))),  # type: ignore[arg-type]
        "positions: got (2.0,), expected a tuple of whole numbers",
    ),
    "booleans": (Policy(lambda: Compaction((True,))), "positions: got (True,), expected a tuple of whole"),
    "a list": (
        Policy(lambda: Compaction([2, 3])),  # type: ignore[arg-type]
        "positions: got [2, 3], expected a tuple of whole numbers",
    ),
    "the system message": (Policy(lambda: Compaction((0,))), "positions: 0 is a system message"),
    "half a turn": (Policy(lambda: Compaction((3,), "sum up")), "separates no call from its results"),
    "no instruction": (
        Policy(lambda: Compaction((2, 3), 7)),  # type: ignore[arg-type]
        "summary_instruction: got 7, expected a text",
    ),
    "a score that is NaN": (
        DropLeastImportant(lambda messages, position: float("nan"), keep_last=2),
        "score of message 2: got nan, expected a finite number",
    ),
    "a score that raises": (
        DropLeastImportant(lambda messages, position: 1 / 0, keep_last=2),
        "ZeroDivisionError: division by zero",
    ),
}


async def limits_for(setup: str) -> LoopLimits:
    return LoopLimits(model_length=await first_prompt_tokens(setup=setup) + 1500)


@pytest.mark.parametrize("name", FAILING)
def test_a_policy_that_fails_ends_its_trajectory_with_a_fault(name: str) -> None:
    policy, problem = FAILING[name]

    async def test() -> None:
        limits = await limits_for("toy")
        options = ContextOptions(compaction=policy)
        async with context_harness([*ECHOES, FINISH], limits=limits, options=options) as s:
            state = await s.run()
            (fault,) = state.faults
            assert (fault.name, fault.operation) == (type(policy).__name__, "compact")
            assert problem in fault.error
            assert state.stop_reason is StopReason.COMPACTION_FAILED
            assert problem in state.stop_detail
            assert state.is_finished
            assert state.is_excluded, "what broke is not the model"
            assert (state.reward_score, state.penalty) == (None, None)
            assert LoopState.decode(state.encode()).faults == state.faults
            # What was sampled before is in the session, and is exported on request.
            assert s.managed.state == "aborted"
            sampled = s.managed.sampled_tokens
            assert sampled == sum(len(reply.ids) for reply in s.model.replies) > 0
            output = await s.output(state)
            assert (output.outputs, output.left_out) == ((), {"aborted": sampled})
            kept = await build_output(state, s.model, include_excluded=True)
            assert (kept.left_out, len(kept.turns)) == ({}, len(s.model.replies))

    run(test)


@pytest.mark.parametrize("setup", ["toy", "toy over http"])
def test_a_failing_policy_leaves_the_other_trajectories_of_a_gather_alone(setup: str) -> None:
    async def test() -> None:
        limits = await limits_for(setup)
        async with context_harness([*ECHOES, FINISH], setup, limits=limits) as s:
            failing = raising(ValueError("broken"))

            async def one(policy: Any) -> LoopState:
                managed, _, _ = SessionStore(s.codec).open(SessionOptions())
                context = AgentContext(
                    SessionModel(managed, s.engine),
                    s.context().tools,
                    context_options=ContextOptions(compaction=policy),
                )
                return await run_agent(LoopState.begin(s.task()), context)

            states = await asyncio.gather(*[one(policy) for policy in (failing, DropOldest(2), failing)])
            failed = [state.stop_reason is StopReason.COMPACTION_FAILED for state in states]
            assert failed == [True, False, True]
            assert states[1].context is not None
            assert states[1].context.compactions
            assert states[1].faults == []

    run(test)


def test_a_policy_that_fails_the_second_time_keeps_what_the_first_edit_did() -> None:
    async def test() -> None:
        plans = [Compaction((2, 3))]

        class Once:
            def plan(self, messages: Any, tokens: Any, excess: int) -> Compaction | None:
                return plans.pop() if plans else Compaction((0,))

        limits = LoopLimits(model_length=await first_prompt_tokens() + 3200)
        options = ContextOptions(response_room=600, compaction=Once())
        async with context_harness([*ECHOES, *ECHOES, FINISH], limits=limits, options=options) as s:
            state = await s.run()
            assert state.faults == [
                Fault("Once", "compact", "positions: 0 is a system message, which cannot be replaced")
            ]
            assert state.context is not None
            assert len(state.context.compactions) == 1
            kept = await build_output(state, s.model, include_excluded=True)
            assert kept.left_out == {}

    run(test)
