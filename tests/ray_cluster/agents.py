"""An engine and agents that processes of a Ray cluster load by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from branchline.chat.toy import ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from tests.rollout.harness import ask


def make_engine() -> tuple[ToyCodec, ScriptedEngine]:
    def answer(request: ScriptedRequest) -> str:
        return f"answer to {request.last_line}"

    codec = ToyCodec.chatml()
    return codec, ScriptedEngine(codec, answer)


def make_no_engine() -> tuple[ToyCodec, ScriptedEngine]:
    raise EngineError(f"no engine: {os.environ.get('BRANCHLINE_TEST_NAME', '')}")


async def ask_patiently(session: Any, *messages: Any) -> dict[str, Any]:
    """Asks again while the gateway is being started again, as SDKs do."""
    for _ in range(300):
        try:
            return await ask(session, *messages)
        except (httpx.TransportError, httpx.HTTPStatusError):
            await asyncio.sleep(0.1)
    raise ConnectionError("no answer")


async def converse(task: Mapping[str, Any], session: Any) -> float:
    """Has `turns` turns and notes each answer in the file of the task, with the session and its URL."""
    messages: list[Any] = [f"{task['prompt']} of {session.id}"]
    for turn in range(task["turns"]):
        answer = await ask_patiently(session, *messages)
        note(task, [session.id, session.base_url, answer["content"], os.getpid()])
        messages += [answer, f"turn {turn}"]
        await asyncio.sleep(task.get("sleep_s", 0.0))
    return float(task["score"])


async def die_once(task: Mapping[str, Any], session: Any) -> float:
    """Kills its process in the first session of the task."""
    await ask_patiently(session, str(task["prompt"]))
    if "-r" not in session.id:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


async def hang(task: Mapping[str, Any], session: Any) -> None:
    note(task, ["began", session.id])
    try:
        await asyncio.sleep(60)
    finally:
        note(task, ["ended", session.id])


async def fail(task: Mapping[str, Any], session: Any) -> None:
    await ask_patiently(session, str(task["prompt"]))
    raise LookupError(f"nothing for {task['id']}")


def note(task: Mapping[str, Any], line: list[Any]) -> None:
    with Path(task["file"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_notes(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
