"""The example interaction."""

from __future__ import annotations

from examples.loop.arithmetic import problems
from examples.loop.tutor import ArithmeticTutor, task_row

from branchline.core.message import Message
from branchline.loop.interactions.base import InteractionResponse
from branchline.loop.interactions.registry import InteractionRegistry
from tests.loop.clock_runner import run


def assistant_message(text: str) -> list[Message]:
    return [Message("assistant", text)]


def test_the_tutor_asks_until_the_answer_comes_and_hints_cost() -> None:
    async def test() -> None:
        problem = problems(1)[0]
        row = task_row(problem)
        partner = InteractionRegistry([ArithmeticTutor()]).select(
            row["interaction"], row["interaction_arguments"]
        )
        tutor = partner.interaction
        state, first = await tutor.start("t1", **partner.arguments)
        assert first == problem.question
        wrong = await tutor.respond(state, assistant_message("It is 1."))
        again = f"That is not right. Try again: {problem.question}"
        assert wrong == InteractionResponse(False, again, 0.0, {"heard": 1.0})
        right = await tutor.respond(state, assistant_message(f"Then 3 + 4 or so: {problem.answer}."))
        assert right == InteractionResponse(True, "That is right.", 1.0)
        assert await tutor.score(state) == 0.75
        await tutor.finalize(state)

    run(test)


def test_the_tutor_gives_up_after_a_while() -> None:
    async def test() -> None:
        tutor = ArithmeticTutor(max_attempts=2)
        state, _ = await tutor.start("t1", question="1 + 1?", answer=2)
        first = await tutor.respond(state, assistant_message("I do not know."))
        assert (first.terminate, first.content) == (False, "I hear no number. Try again: 1 + 1?")
        last = await tutor.respond(state, assistant_message("-2"))
        assert last == InteractionResponse(True, "No, it is 2.", 0.0, {"heard": -2.0})
        assert await tutor.score(state) == 0.0

    run(test)
