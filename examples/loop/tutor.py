"""An arithmetic interaction: a tutor asks a question and repeats it until the answer is right.

A turn scores 1 when its last number is the answer and 0 otherwise; the score of the conversation is 1
minus `HINT_COST` for each wrong attempt, or 0 without the right answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from branchline.core.message import Message
from branchline.loop.interaction import BaseInteraction, InteractionResponse
from examples.loop.arithmetic import Problem

HINT_COST = 0.25
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass
class TutorState:
    """One conversation."""

    question: str
    answer: int
    wrong: int = 0
    solved: bool = False


class ArithmeticTutor(BaseInteraction):
    """Ends the conversation after `max_attempts` wrong answers."""

    name = "tutor"

    def __init__(self, max_attempts: int = 3) -> None:
        self._max_attempts = max_attempts

    async def start(self, trajectory: str, **arguments: Any) -> tuple[TutorState, str]:
        state = TutorState(**arguments)
        return state, state.question

    async def respond(self, state: TutorState, messages: Sequence[Message]) -> InteractionResponse:
        number = last_number(messages[-1].content)
        if number == state.answer:
            state.solved = True
            return InteractionResponse(True, "That is right.", score=1.0)
        state.wrong += 1
        extras = {"number": number}
        if state.wrong >= self._max_attempts:
            return InteractionResponse(True, f"No, it is {state.answer}.", score=0.0, extras=extras)
        problem = "I found no number" if number is None else "That is not right"
        return InteractionResponse(False, f"{problem}. Try again: {state.question}", score=0.0, extras=extras)

    def save(self, state: TutorState) -> dict[str, Any]:
        return asdict(state)

    async def restore(self, trajectory: str, saved: dict[str, Any], **arguments: Any) -> TutorState:
        return TutorState(**saved)

    async def score(self, state: TutorState) -> float | None:
        return max(0.0, 1.0 - HINT_COST * state.wrong) if state.solved else 0.0


def last_number(text: str) -> float | None:
    """The last number of a text, usually the answer.

    >>> last_number("12 * 7 = 84, so 1,084 in all.")
    1084.0
    """
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def task_row(problem: Problem) -> dict[str, Any]:
    """A row of a dataset; the tutor asks the question, so the prompt does not contain it."""
    return {
        "agent_name": "tool",
        "prompt": [{"role": "system", "content": "Answer with a number."}],
        "interaction": ArithmeticTutor.name,
        "interaction_arguments": {"question": problem.question, "answer": problem.answer},
    }
