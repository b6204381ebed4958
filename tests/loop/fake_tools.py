"""A tool for tests that records every call of its methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from branchline.core.message import ToolCall
from branchline.loop.task import LoopLimits
from branchline.loop.tools.base import BaseTool, ToolResult, ToolSelection, function_schema
from branchline.loop.tools.tool_session import ToolSession

TEXT_ARGUMENT = {"type": "object", "properties": {"text": {"type": "string"}}}


class RecordingTool(BaseTool):
    """Records its method calls; `fails` names methods that raise, `hangs` methods that never return."""

    def __init__(
        self,
        name: str = "recorder",
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

    async def wait_for(self, method: str) -> None:
        """Returns when the method has been called."""
        await self.reached.setdefault(method, asyncio.Event()).wait()

    async def _record(self, method: str) -> None:
        self.events.append(method)
        self.reached.setdefault(method, asyncio.Event()).set()
        if method in self._fails:
            raise RuntimeError(f"{method} is broken")
        if method in self._hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.events.append(f"{method} cancelled")
                raise


def tool_session(*tools: Any, arguments: Any = None, **limits: Any) -> ToolSession:
    return ToolSession(ToolSelection(tools, arguments or {}), "t1", LoopLimits(**limits))


def call(name: str = "recorder", arguments: str = "", call_id: str = "") -> ToolCall:
    return ToolCall(name, arguments, call_id)


async def run_calls(session: ToolSession, *calls: ToolCall) -> list[ToolResult]:
    """The results of calls that run at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(session.run_one(one)) for one in calls]
    return [task.result() for task in tasks]


async def result_contents(session: ToolSession, *calls: ToolCall) -> list[str]:
    return [result.content for result in await run_calls(session, *calls)]
