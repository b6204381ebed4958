"""The example tools and their generated data."""

from __future__ import annotations

import doctest
import json
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from examples.loop import arithmetic, search, tutor

from branchline.core.errors import ToolError
from branchline.core.reader import read_messages
from branchline.loop.tools.registry import ToolRegistry
from branchline.loop.tools.tool_session import ToolSession
from tests.loop.clock_runner import run
from tests.loop.tools.fake_tools import call, tool_session


@pytest.mark.parametrize("module", [arithmetic, tutor])
def test_what_the_docstrings_show_is_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


# -- arithmetic --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert arithmetic.problems(20, 1) == arithmetic.problems(20, 1)
    assert arithmetic.problems(20, 1) != arithmetic.problems(20, 2)
    assert len({problem.question for problem in arithmetic.problems(50)}) == 50


def test_answers_are_what_the_expressions_say() -> None:
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
        ("2 3", "got '3' behind 2"),
        ("1 / 0", "division by zero"),
        ("__import__('os')", "expected a number, "),
        ("1" * 300, "at most 200"),
    ],
)
def test_expressions_are_read_exactly_or_refused(expression: str, value: Any) -> None:
    if isinstance(value, str):
        with pytest.raises(ValueError, match=value):
            arithmetic.evaluate(expression)
    else:
        assert arithmetic.evaluate(expression) == value


def tool_session_for(sample: dict[str, Any], registry: ToolRegistry) -> ToolSession:
    selection = registry.select(sample["tools"], sample.get("tool_arguments"))
    return ToolSession(selection.tools, "t1", selection.arguments)


@pytest.mark.parametrize("solved", [True, False])
def test_the_calculator_is_worth_one_when_the_answer_came_out_last(solved: bool) -> None:
    async def test() -> None:
        problem = arithmetic.problems(1)[0]
        async with tool_session_for(problem.task_row, ToolRegistry([arithmetic.Calculator()])) as workshop:
            tries = ["1 +", problem.expression] if solved else [problem.expression, "1 / 4"]
            outcomes = await workshop.run([call("calculator", json.dumps({"expression": t})) for t in tries])
            assert await workshop.calc_rewards() == {"calculator": float(solved)}
        if solved:
            assert outcomes[0].error == "Error executing tool 'calculator': got 'the end', expected a number"
            assert outcomes[1].message.content == str(problem.answer)
        else:
            assert outcomes[1].message.content == "0.25"

    run(test)


def test_a_calculator_without_an_answer_has_no_reward() -> None:
    async def test() -> None:
        async with tool_session(arithmetic.Calculator()) as workshop:
            assert await workshop.calc_rewards() == {"calculator": None}
        with pytest.raises(ToolError, match=r"got \['answr'\], expected only answer"):
            await tool_session(arithmetic.Calculator(), arguments={"calculator": {"answr": 1}}).__aenter__()

    run(test)


# -- search ------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_towns_and_the_same_questions() -> None:
    assert search.towns(24, 3) == search.towns(24, 3) != search.towns(24, 4)
    corpus = search.towns()
    assert search.questions(corpus, 20, 3) == search.questions(corpus, 20, 3)
    assert len({town.name for town in corpus}) == len(corpus)


def test_searching_for_a_question_finds_the_page_that_answers_it() -> None:
    async def test() -> None:
        corpus = search.towns()
        registry = ToolRegistry([search.search_tool(corpus)])
        for question in search.questions(corpus, 30):
            assert read_messages(question.task_row["prompt"])[0].content == question.text
            async with tool_session_for(question.task_row, registry) as workshop:
                arguments = json.dumps({"query": question.text, "limit": 1})
                (outcome,) = await workshop.run([call("search", arguments)])
            assert question.answer in outcome.message.content

    run(test)


def test_search_shows_as_many_pages_as_asked_for_and_says_when_there_are_none() -> None:
    async def test() -> None:
        async with tool_session(search.search_tool(search.towns())) as workshop:
            many, none = await workshop.run(
                [
                    call("search", '{"query": "river", "limit": 2}'),
                    call("search", '{"query": "spaceship"}'),
                ]
            )
        assert many.message.content.count("is a town") == 2
        assert none.message.content == "Nothing found."

    run(test)
