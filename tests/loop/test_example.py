from __future__ import annotations

import doctest
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from examples.loop import arithmetic, search, tutor
from examples.loop.arithmetic import problems
from examples.loop.run import run_tasks
from examples.loop.tutor import ArithmeticTutor, task_row

from branchline.core.errors import ToolError
from branchline.core.message import Message
from branchline.core.reader import read_messages
from branchline.loop.interaction import InteractionResponse
from branchline.loop.output import LoopOutput
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits
from branchline.loop.tools.tool_session import ToolSession
from tests.loop.fake_tools import call, run_calls, tool_session
from tests.loop.harness import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_gives_the_same_tokens_in_process_and_over_http() -> None:
    async def test() -> None:
        local, remote = [await run_tasks(over_http=over_http) for over_http in (False, True)]
        assert [_comparable(output) for output in local] == [_comparable(output) for output in remote]
        assert [output.reward_score for output in local] == [1.0] * 3 + [None] * 3 + [0.75] * 3
        answers = [_state(output).messages[-1].content for output in local[3:6]]
        assert all(
            _state(output).task.extra["answer"] in answer
            for output, answer in zip(local[3:6], answers, strict=True)
        )
        versions = {version for output in local for version in output.outputs[-1].response_versions.tolist()}
        assert versions == {-1, 0, 1}
        assert sum(output.metrics.num_cancelled for output in local) > 0

    run(test)


def _state(output: LoopOutput) -> LoopState:
    state: LoopState = output.extra_fields["state"]
    return state


def _comparable(output: LoopOutput) -> Any:
    ids = [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in output.outputs]
    return ids, output.response_mask.tolist(), output.response_logprobs.tolist(), output.num_turns


def test_the_example_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / "examples" / "loop" / "run.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "interaction" in done.stdout
    assert "Trained tokens are bold" in done.stdout


@pytest.mark.parametrize("module", [arithmetic, tutor])
def test_doctests(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


# -- arithmetic --------------------------------------------------------------------------------------


def test_problems_depend_on_the_seed_only() -> None:
    assert arithmetic.problems(20, 1) == arithmetic.problems(20, 1)
    assert arithmetic.problems(20, 1) != arithmetic.problems(20, 2)
    assert len({problem.question for problem in arithmetic.problems(50)}) == 50


def test_answers_are_the_values_of_the_expressions() -> None:
    for problem in arithmetic.problems(50):
        assert problem.answer == eval(problem.expression)
        for number in (part for part in problem.expression.split() if part.strip("()").isdigit()):
            assert number.strip("()") in problem.question


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 2 - 3", 5),
        ("-3 * -(2 + 1)", 9),
        ("7 / 2", Fraction(7, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("2*(3", "expected a closing parenthesis"),
        ("2 +", "got 'the end', expected a number"),
        ("2 3", "got '3' after 2"),
        ("1 / 0", "division by zero"),
        ("__import__('os')", "expected a number, "),
        ("1" * 300, "at most 200"),
    ],
)
def test_expressions_are_evaluated_exactly_or_refused(expression: str, value: Any) -> None:
    if isinstance(value, str):
        with pytest.raises(ValueError, match=value):
            arithmetic.evaluate(expression)
    else:
        assert arithmetic.evaluate(expression) == value


def tool_session_for(sample: dict[str, Any], registry: ToolRegistry) -> ToolSession:
    selection = registry.select(sample["tools"], sample.get("tool_arguments"))
    return ToolSession(selection, "t1", LoopLimits())


@pytest.mark.parametrize("solved", [True, False])
def test_the_calculators_reward_is_1_if_the_last_result_is_the_answer(solved: bool) -> None:
    async def test() -> None:
        problem = arithmetic.problems(1)[0]
        async with tool_session_for(problem.task_row, ToolRegistry([arithmetic.Calculator()])) as session:
            tries = ["1 +", problem.expression] if solved else [problem.expression, "1 / 4"]
            calls = [call("calculator", json.dumps({"expression": expression})) for expression in tries]
            results = await run_calls(session, *calls)
            assert await session.calc_rewards() == ({"calculator": float(solved)}, [])
        if solved:
            assert results[0].error == "Error executing tool 'calculator': got 'the end', expected a number"
            assert results[1].content == str(problem.answer)
        else:
            assert results[1].content == "0.25"

    run(test)


def test_a_calculator_without_an_answer_has_no_reward() -> None:
    async def test() -> None:
        async with tool_session(arithmetic.Calculator()) as session:
            assert await session.calc_rewards() == ({}, [])
        with pytest.raises(ToolError, match=r"got \['answr'\], expected only answer"):
            await tool_session(arithmetic.Calculator(), arguments={"calculator": {"answr": 1}}).__aenter__()

    run(test)


# -- search ------------------------------------------------------------------------------------------


def test_towns_and_questions_depend_on_the_seed_only() -> None:
    assert search.towns(24, 3) == search.towns(24, 3) != search.towns(24, 4)
    corpus = search.towns()
    assert search.questions(corpus, 20, 3) == search.questions(corpus, 20, 3)
    assert len({town.name for town in corpus}) == len(corpus)


def test_a_question_finds_the_page_with_its_answer() -> None:
    async def test() -> None:
        corpus = search.towns()
        registry = ToolRegistry([search.search_tool(corpus)])
        for question in search.questions(corpus, 30):
            assert read_messages(question.task_row["prompt"])[0].content == question.text
            async with tool_session_for(question.task_row, registry) as session:
                arguments = json.dumps({"query": question.text, "limit": 1})
                result = await session.run_one(call("search", arguments))
            assert question.answer in result.content

    run(test)


def test_search_returns_at_most_limit_pages() -> None:
    async def test() -> None:
        async with tool_session(search.search_tool(search.towns())) as session:
            many, none = await run_calls(
                session,
                call("search", '{"query": "river", "limit": 2}'),
                call("search", '{"query": "spaceship"}'),
            )
        assert many.content.count("is a town") == 2
        assert none.content == "Nothing found."

    run(test)


def assistant_message(text: str) -> list[Message]:
    return [Message("assistant", text)]


def test_the_tutor_repeats_the_question_until_the_answer_is_right() -> None:
    async def test() -> None:
        problem = problems(1)[0]
        row = task_row(problem)
        config = InteractionRegistry([ArithmeticTutor()]).select(
            row["interaction"], row["interaction_arguments"]
        )
        tutor = config.interaction
        state, first = await tutor.start("t1", **config.arguments)
        assert first == problem.question
        wrong = await tutor.respond(state, assistant_message("It is 1."))
        again = f"That is not right. Try again: {problem.question}"
        assert wrong == InteractionResponse(False, again, 0.0, {"number": 1.0})
        right = await tutor.respond(state, assistant_message(f"Then 3 + 4 or so: {problem.answer}."))
        assert right == InteractionResponse(True, "That is right.", 1.0)
        assert await tutor.score(state) == 0.75
        await tutor.finalize(state)

    run(test)


def test_the_tutor_stops_after_max_attempts() -> None:
    async def test() -> None:
        tutor = ArithmeticTutor(max_attempts=2)
        state, _ = await tutor.start("t1", question="1 + 1?", answer=2)
        first = await tutor.respond(state, assistant_message("I do not know."))
        assert (first.terminate, first.content) == (False, "I found no number. Try again: 1 + 1?")
        last = await tutor.respond(state, assistant_message("-2"))
        assert last == InteractionResponse(True, "No, it is 2.", 0.0, {"number": -2.0})
        assert await tutor.score(state) == 0.0

    run(test)
