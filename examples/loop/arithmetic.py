"""Arithmetic with a calculator: generated problems, and a tool that rewards the right answer.

The same seed gives the same problems. A sample passes the answer to the tool's instance and not to the model:
`calc_reward` is 1 if the last result is the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from branchline.loop.tools.base import BaseTool, ToolResult, function_schema

_PEOPLE = ("Ada", "Emil", "Ines", "Jon", "Mira", "Otto", "Runa", "Sami")
_GOODS = ("apples", "bolts", "candles", "maps", "pens", "stamps")
_STORIES = (
    ("{who} has {a} boxes of {b} {goods} and gives {c} away. How many {goods} are left?", "{a} * {b} - {c}"),
    ("{who} finds {a} {goods} a day for {b} days and buys {c} more. How many are there?", "{a} * {b} + {c}"),
    (
        "{who} packs {a} {goods} in each of {b} bags, in each of {c} cars. How many {goods}?",
        "{a} * {b} * {c}",
    ),
    (
        "Each week {who} finds {a} {goods} and buys {b}. How many {goods} are that in {c} weeks?",
        "({a} + {b}) * {c}",
    ),
)


@dataclass(frozen=True)
class Problem:
    """A question, the expression that answers it, and its value."""

    question: str
    expression: str
    answer: int

    @property
    def task_row(self) -> dict[str, Any]:
        """A row of a dataset: a prompt, its tools, and the arguments of their instances."""
        return {
            "agent_name": "tool",
            "prompt": [{"role": "user", "content": self.question}],
            "tools": [Calculator.name],
            "tool_arguments": {Calculator.name: {"answer": self.answer}},
        }


def problems(count: int, seed: int = 0) -> list[Problem]:
    """Problems generated from a seed.

    >>> problems(1)[0].expression
    '(35 + 38) * 8'
    """
    draw = random.Random(seed)
    drawn: list[Problem] = []
    for _ in range(count):
        story, formula = draw.choice(_STORIES)
        numbers = {"a": draw.randint(11, 40), "b": draw.randint(12, 60), "c": draw.randint(3, 99)}
        expression = formula.format(**numbers)
        question = story.format(who=draw.choice(_PEOPLE), goods=draw.choice(_GOODS), **numbers)
        drawn.append(Problem(question, expression, int(evaluate(expression))))
    return drawn


@dataclass
class CalculatorState:
    """The results of one trajectory."""

    answer: int | None
    results: list[Fraction] = field(default_factory=list)


class Calculator(BaseTool):
    """Evaluates expressions; an invalid one is an error for the model."""

    name = "calculator"
    schema = function_schema(
        name,
        "Calculates an expression with + - * / and parentheses.",
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 12."}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    )

    async def create(
        self, trajectory: str, *, answer: int | None = None, **arguments: Any
    ) -> CalculatorState:
        if arguments:
            raise TypeError(f"got {sorted(arguments)}, expected only answer")
        return CalculatorState(answer)

    async def execute(self, instance: CalculatorState, arguments: Mapping[str, Any]) -> ToolResult:
        value = evaluate(arguments["expression"])
        instance.results.append(value)
        return ToolResult(format_number(value), extras={"value": float(value)})

    def save(self, instance: CalculatorState) -> list[str]:
        return [str(result) for result in instance.results]

    async def restore(
        self, trajectory: str, saved: list[str], *, answer: int | None = None, **arguments: Any
    ) -> CalculatorState:
        return CalculatorState(answer, [Fraction(result) for result in saved])

    async def calc_reward(self, instance: CalculatorState) -> float | None:
        if instance.answer is None:
            return None
        return float(bool(instance.results) and instance.results[-1] == instance.answer)


# -- expressions -------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")
_MAX_EXPRESSION_CHARS = 200


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression. Raises ValueError if it is invalid.

    >>> evaluate("2 * (3 + 4) / 4")
    Fraction(7, 2)
    """
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise ValueError(f"got {len(expression)} characters, expected at most {_MAX_EXPRESSION_CHARS}")
    parser = _ExpressionParser(expression)
    value = parser.parse_sum()
    if parser.next:
        raise ValueError(f"got {parser.next!r} after {value}, expected + - * / or the end")
    return value


def format_number(value: Fraction) -> str:
    """An integer, or a decimal with 6 digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


class _ExpressionParser:
    def __init__(self, expression: str) -> None:
        self._rest = expression.rstrip()
        self.next = ""
        self._advance()

    def parse_sum(self) -> Fraction:
        value = self._parse_product()
        while self.next in ("+", "-"):
            value = value + self._parse_product() if self._advance() == "+" else value - self._parse_product()
        return value

    def _parse_product(self) -> Fraction:
        value = self._parse_number()
        while self.next in ("*", "/"):
            if self._advance() == "*":
                value *= self._parse_number()
            else:
                divisor = self._parse_number()
                if not divisor:
                    raise ValueError("division by zero")
                value /= divisor
        return value

    def _parse_number(self) -> Fraction:
        token = self._advance()
        if token == "-":
            return -self._parse_number()
        if token == "(":
            value = self.parse_sum()
            if self._advance() != ")":
                raise ValueError("expected a closing parenthesis")
            return value
        if not token[:1].isdigit():
            raise ValueError(f"got {token or 'the end'!r}, expected a number")
        return Fraction(token)

    def _advance(self) -> str:
        """Returns the next token and reads the one after it."""
        token, self.next = self.next, ""
        if self._rest:
            found = _TOKEN.match(self._rest)
            if found is None:
                raise ValueError(f"got {self._rest[:10]!r}, expected a number, + - * / or a parenthesis")
            self.next, self._rest = found[1], self._rest[found.end() :]
        return token
