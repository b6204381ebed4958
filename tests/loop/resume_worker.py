"""Another process: reads a state, goes on with it, and writes what became of it. Run by a test."""

from __future__ import annotations

import asyncio
import sys

from branchline.loop.agent_loop import AgentLoop
from branchline.loop.http_model import HttpModel
from branchline.loop.state import LoopState
from branchline.loop.tools.functions import tool
from branchline.loop.tools.registry import ToolRegistry


@tool
def deed(turn: int, place: int) -> str:
    """Does it."""
    return f"done elsewhere: {turn}, {place}"


async def main(url: str, key: str) -> None:
    state = LoopState.decode(sys.stdin.buffer.read())
    async with (
        HttpModel(url, key) as model,
        AgentLoop(model, state, tools=ToolRegistry([deed]).select()) as loop,
    ):
        state = await loop.run()
    sys.stdout.buffer.write(state.encode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
