"""Tools for tests that keep a diary of their lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from branchline.core.message import ToolCall
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.tool_session import ToolLimits, ToolSession

TEXT_ARGUMENT = {"type": "object", "properties": {"text": {"type": "string"}}}


class RecordingTool(BaseTool):
    """Notes everything that is done to it; `fails` names what raises, `hangs` what never ends."""

    def __init__(
        self,
        name: str = "diary",
        *,
        fails: Sequence[str] = (),
        hangs: Sequence[str] = (),
        reward: Any = None,
        parameters: Mapping[str, Any] = TEXT_ARGUMENT,
    ) -> None:
        self.name = name
        self.schema = function_schema(name, "", parameters)
        self.events: list[str] = []
        self.reached: dict[str, asyncio.Event] = {}
        self._fails, self._hangs, self._reward = fails, hangs, reward

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        await self._record("create")
        return {"trajectory": trajectory, **arguments}

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        await self._record("execute")
        return ToolResult(f"{arguments.get('text', '')}{instance.get('suffix', '')}", reward=self._reward)

    async def calc_reward(self, instance: Any) -> float | None:
        await self._record("calc_reward")
        return self._reward  # type: ignore[no-any-return]

    async def release(self, instance: Any) -> None:
        await self._record("release")

    async def wait_for(self, doing: str) -> None:
        """Returns once this has begun."""
        await self.reached.setdefault(doing, asyncio.Event()).wait()

    async def _record(self, doing: str) -> None:
        self.events.append(doing)
        self.reached.setdefault(doing, asyncio.Event()).set()
        if doing in self._fails:
            raise RuntimeError(f"{doing} is broken")
        if doing in self._hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.events.append(f"{doing} cancelled")
                raise


def tool_session(*tools: Any, arguments: Any = None, **limits: Any) -> ToolSession:
    return ToolSession(tools, "t1", arguments, ToolLimits(**limits))


def call(name: str = "diary", arguments: str = "", call_id: str = "") -> ToolCall:
    return ToolCall(name, arguments, call_id)


async def result_contents(workshop: ToolSession, *calls: ToolCall) -> list[str]:
    """What the model is shown."""
    return [outcome.message.content for outcome in await workshop.run(calls)]
