"""Rollouts on a scripted engine: a gateway on loopback, agents that ask it over HTTP, and their results."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from branchline.chat.toy import ToyCodec
from branchline.engines.scripted import ReplyRule, ScriptedEngine, replies
from branchline.gateway.server import Gateway
from tests.hang import fail_if_hung

AsyncTest = Callable[[], Coroutine[Any, Any, None]]


def run(test: AsyncTest) -> None:
    """Runs an async test with a timeout; no task may be left over."""

    async def main() -> None:
        await fail_if_hung(test())
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    asyncio.run(main())


@asynccontextmanager
async def scripted_gateway(
    rule: ReplyRule | None = None, journal: Path | None = None
) -> AsyncIterator[Gateway]:
    codec = ToyCodec.chatml()
    engine = ScriptedEngine(codec, rule or replies("ok"))
    async with Gateway(engine=engine, codec=codec, journal=journal) as gateway:
        yield gateway


def judge_ids(question: str) -> list[str]:
    """Returns the ids of the trajectories that a judge is shown, in their order."""
    return re.findall(r'^<trajectory id="(\w+)">$', question, re.MULTILINE)


def judge_answer(messages: Sequence[Mapping[str, str]], *scores: Any) -> str:
    """Returns the answer of a judge, with the scores of the trajectories in the order that they are shown."""
    return json.dumps(dict(zip(judge_ids(messages[1]["content"]), scores, strict=True)))


async def ask(session: Any, *messages: str | Mapping[str, Any], agent: str = "") -> dict[str, Any]:
    """Asks the session's model; strings are user and assistant messages in turn. Returns the answer."""
    wire = [
        {"role": ("user", "assistant")[index % 2], "content": message}
        if isinstance(message, str)
        else message
        for index, message in enumerate(messages)
    ]
    async with httpx.AsyncClient() as http:
        response = await http.post(
            f"{session.base_url}/chat/completions",
            json={"model": "any", "messages": wire},
            headers={
                "authorization": f"Bearer {session.api_key}",
                **({"x-branchline-agent": agent} if agent else {}),
            },
        )
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


async def ask_once(task: Mapping[str, Any], session: Any) -> float:
    """An agent with one turn; its reward is that of the task, or 1."""
    await ask(session, str(task["prompt"]))
    return float(task.get("score", 1.0))
