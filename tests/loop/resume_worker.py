"""Resumes the state it reads from stdin and writes the result to stdout; run by a test."""

from __future__ import annotations

import asyncio
import sys

from branchline.loop.agent_loop import AgentLoop
from branchline.loop.http_model import HttpModel
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopState
from branchline.loop.tools.functions import tool


@tool
def act(turn: int, index: int) -> str:
    """Acts."""
    return f"done elsewhere: {turn}, {index}"


async def main(url: str, key: str) -> None:
    state = LoopState.decode(sys.stdin.buffer.read())
    async with (
        HttpModel(url, key) as model,
        AgentLoop(model, state, tools=ToolRegistry([act]).select()) as loop,
    ):
        state = await loop.run()
    sys.stdout.buffer.write(state.encode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
