"""A task with tools for a small model: what the items of a question cost together.

The prices of a shop are drawn anew for each task, so only the tool `price` knows them; the answer takes one
lookup for each kind of item and one call of `calculate`: two to four calls. The agent is an ordinary program
with the OpenAI SDK. Only its last message is scored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI

ITEMS = ("lamp", "rope", "drum", "coin", "ring", "bell", "boot", "mask", "book", "cup", "hat", "key",
         "map", "pen", "bag", "box", "clock", "chair", "table", "plate", "shirt", "brush")  # fmt: skip
SYSTEM = "Answer with a number."
MAX_TOKENS = 48
"""Limit of one answer."""
MAX_TURNS = 6
MAX_PRICE = 60
MAX_COUNT = 9
_EXPRESSION = re.compile(r"\d{1,4}(\s*[+*]\s*\d{1,4}){0,5}")


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [_tool("price", "Price of an item.", "item"), _tool("calculate", "Computes + and *.", "expression")]


@dataclass(frozen=True)
class ShopTask:
    """A shop and a question: the price of `count` pieces of one item, or of one piece of several."""

    items: tuple[str, ...]
    count: int
    """More than 1 only for a single item."""
    prices: Mapping[str, int]

    @classmethod
    def draw(cls, rng: Random) -> ShopTask:
        """Returns a task with new prices; one to three items are asked for."""
        prices = {item: rng.randint(2, MAX_PRICE) for item in ITEMS}
        items = tuple(rng.sample(ITEMS, rng.randint(1, 3)))
        return cls(items, rng.randint(2, MAX_COUNT) if len(items) == 1 else 1, prices)

    @property
    def question(self) -> str:
        if len(self.items) == 1:
            return f"How much for {self.count} pieces of: {self.items[0]}?"
        return f"How much for one each of: {', '.join(self.items)}?"

    @property
    def answer(self) -> str:
        return str(self.count * sum(self.prices[item] for item in self.items))

    def score(self, answer: str) -> float:
        return float(answer.strip() == self.answer)


@dataclass(frozen=True)
class AgentResult:
    """What the agent answered, and how many tokens its responses say were sampled."""

    answer: str
    completion_tokens: int


async def run_shop_agent(client: AsyncOpenAI, task: ShopTask, *, has_prices: bool = True) -> AgentResult:
    """Works on a task until the model answers without a tool call; the answer is empty if it never does.

    Without `has_prices` no price is found: a control for the reward.
    """
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.question},
    ]
    tools: Any = TOOLS
    completion_tokens = 0
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools, max_tokens=MAX_TOKENS
        )
        completion_tokens += completion.usage.completion_tokens if completion.usage else 0
        reply: Any = completion.choices[0].message
        if not reply.tool_calls:
            return AgentResult(reply.content or "", completion_tokens)
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = run_tool(task, call.function.name, call.function.arguments, has_prices=has_prices)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return AgentResult("", completion_tokens)


def run_tool(task: ShopTask, name: str, arguments: str, *, has_prices: bool = True) -> str:
    """Returns the result of a tool call, or an error that the model can read."""
    try:
        values = json.loads(arguments)
    except ValueError:
        values = None
    values = values if isinstance(values, dict) else {}
    if name == "price":
        price = task.prices.get(str(values.get("item"))) if has_prices else None
        return "error: no such item" if price is None else str(price)
    if name == "calculate":
        return calculate(str(values.get("expression", "")))
    return "error: no such tool"


def calculate(expression: str) -> str:
    """Returns the value of a sum of products.

    >>> calculate("3 + 4 * 5")
    '23'
    >>> calculate("3 - x")
    'error: expected numbers, + and *'
    """
    if not _EXPRESSION.fullmatch(expression):
        return "error: expected numbers, + and *"
    return str(sum(math.prod(int(factor) for factor in term.split("*")) for term in expression.split("+")))
