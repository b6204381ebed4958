"""The task of the demo: name the owner of an item in an archive. It needs a tool, a sub-agent and a deletion.

The catalog, a long page, has the key of each item. Only the record of that key names the owner, and only a
sub-agent, the clerk, can look up records. With the page in its context, the main agent has no room left for
the clerk's report: it has to note the key and delete the page first. Catalog and records are drawn anew for
each task, so no policy can know an owner that it did not look up.

The agent is an ordinary program with the OpenAI SDK. Only its last message is scored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI, BadRequestError

ITEMS = ("lamp", "rope", "drum", "vase", "coin", "ring", "bell", "boot", "cape", "comb", "flag", "harp",
         "kite", "mask", "oar", "pipe")  # fmt: skip
COLORS = ("red", "blue", "green", "black", "white", "gold", "pink", "gray")
ANIMALS = ("fox", "owl", "bear", "crow", "deer", "frog", "goat", "swan")
NAMES = ("Rosa", "Omar", "Lena", "Hugo", "Ines", "Karl", "Mina", "Nils", "Tara", "Yuri")
CHANCE = 1 / len(NAMES)
"""The score of an answer that names someone at random."""
WINDOW_TOKENS = 184
"""The model's context window: too small for the catalog and the clerk's report together."""
MAX_TOKENS = 48
"""Limit of one answer."""
MAX_TURNS = 6
DELETED = "(deleted)"
_CATALOG_ITEMS = 14
SYSTEM = "Name the owner of an item."
CLERK_SYSTEM = "Find a record."
REPORT_PREFIX = "The clerk has looked into it and reports as follows. "


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


MAIN_TOOLS = [_tool("catalog"), _tool("forget", "note"), _tool("delegate", "task")]
CLERK_TOOLS = [_tool("lookup", "key")]


@dataclass(frozen=True)
class ArchiveRecord:
    """Who owns an item, and who keeps it."""

    owner: str
    keeper: str

    def __str__(self) -> str:
        return f"keeper: {self.keeper}\nowner: {self.owner}"


@dataclass(frozen=True)
class ArchiveTask:
    """An archive, and the item whose owner is asked for."""

    item: str
    keys: Mapping[str, str]
    """The key of each item of the catalog."""
    records: Mapping[str, ArchiveRecord]
    """The record of each key."""

    @classmethod
    def draw(cls, rng: Random) -> ArchiveTask:
        """Returns a task with a new catalog and new records."""
        items = rng.sample(ITEMS, _CATALOG_ITEMS)
        every_key = [f"{color}-{animal}" for color in COLORS for animal in ANIMALS]
        keys = dict(zip(items, rng.sample(every_key, len(items)), strict=True))
        records = {key: ArchiveRecord(*rng.sample(NAMES, 2)) for key in keys.values()}
        return cls(rng.choice(items), keys, records)

    @property
    def question(self) -> str:
        return f"Who is the owner of the {self.item}?"

    @property
    def answer(self) -> str:
        return f"owner: {self.records[self.keys[self.item]].owner}"

    @property
    def catalog(self) -> str:
        return "catalog\n" + "\n".join(f"{item} {key}" for item, key in self.keys.items())

    def score(self, answer: str) -> float:
        return float(answer.strip() == self.answer)


async def run_archive_agent(client: AsyncOpenAI, task: ArchiveTask, *, has_lookup: bool = True) -> str:
    """Works on a task until the model answers without a tool call; returns that answer, or an empty one.

    Without `has_lookup` the clerk's tool finds nothing: a control for the reward.
    """
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.question},
    ]
    clerk = client.with_options(base_url=str(client.base_url).replace("/v1", "/agents/clerk/v1"))
    for _ in range(MAX_TURNS):
        reply = await _ask(client, messages, MAIN_TOOLS)
        if reply is None or not reply.tool_calls:
            return "" if reply is None else reply.content or ""
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            name, arguments = call.function.name, _read_arguments(call.function.arguments)
            if name == "catalog":
                result = task.catalog
            elif name == "forget":
                result = "ok"
                messages = [_without_page(message) for message in messages]
            elif name == "delegate":
                result = REPORT_PREFIX + await _run_clerk(clerk, arguments.get("task", ""), task, has_lookup)
            else:
                result = f"unknown tool {name}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def _run_clerk(client: AsyncOpenAI, job: str, task: ArchiveTask, has_lookup: bool) -> str:
    """The sub-agent: a conversation of its own in the same session."""
    messages: list[Any] = [{"role": "system", "content": CLERK_SYSTEM}, {"role": "user", "content": job}]
    for _ in range(MAX_TURNS):
        reply = await _ask(client, messages, CLERK_TOOLS)
        if reply is None or not reply.tool_calls:
            return "" if reply is None else reply.content or ""
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            key = _read_arguments(call.function.arguments).get("key", "")
            record = task.records.get(key) if has_lookup and call.function.name == "lookup" else None
            content = "no record" if record is None else str(record)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


async def _ask(client: AsyncOpenAI, messages: list[Any], tools: list[Any]) -> Any:
    """Returns the next message of the model, or None if the conversation no longer fits its window."""
    try:
        completion = await client.chat.completions.create(
            model="demo", messages=messages, tools=tools, max_tokens=MAX_TOKENS
        )
    except BadRequestError as error:
        if error.code == "context_length_exceeded":
            return None
        raise
    return completion.choices[0].message


def _without_page(message: Any) -> Any:
    is_page = message["role"] == "tool" and message["content"].startswith("catalog\n")
    return {**message, "content": DELETED} if is_page else message


def _read_arguments(text: str) -> dict[str, str]:
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return {name: str(value) for name, value in values.items()} if isinstance(values, dict) else {}
