"""What tools and interactions remember: written down when a trajectory is left, given back when it goes on.

One that remembers something says how. `save` gives it as values that JSON can hold, at once and without
waiting; `restore` makes an instance of them, in this process or in another:

    class Calculator(BaseTool):
        def save(self, instance): return instance.results
        async def restore(self, trajectory, saved, **arguments): return Slate(results=saved, **arguments)

One that does not begins anew, with the arguments of its sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from branchline.loop.tools.base import Tool, ToolResult

log = logging.getLogger("branchline.loop")


@runtime_checkable
class Restorable(Protocol):
    """A tool or an interaction whose instances outlive a process."""

    def save(self, instance: Any, /) -> Any: ...
    async def restore(self, trajectory: str, saved: Any, /, **arguments: Any) -> Any: ...


class KeptTool:
    """A tool, and the one instance of it that a trajectory has."""

    def __init__(self, tool: Tool, saved: Mapping[str, Any]) -> None:
        self._tool = tool
        self._saved = saved
        self._instance: Any = None
        self._is_there = False

    @property
    def name(self) -> str:
        return self._tool.name

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._tool.schema

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        if self.name in self._saved:
            assert isinstance(self._tool, Restorable)
            self._instance = await self._tool.restore(trajectory, self._saved[self.name], **arguments)
        else:
            self._instance = await self._tool.create(trajectory, **arguments)
        self._is_there = True
        return self._instance

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._tool.execute(instance, arguments)

    async def calc_reward(self, instance: Any) -> float | None:
        return await self._tool.calc_reward(instance)

    async def release(self, instance: Any) -> None:
        self._is_there = False
        await self._tool.release(instance)

    def write(self, saved: dict[str, Any]) -> None:
        """Puts down what its instance remembers."""
        if self._is_there:
            write(self._tool, self._instance, saved)


def write(keeper: object, instance: Any, saved: dict[str, Any]) -> None:
    """Puts down what an instance remembers, if its keeper says how."""
    if not isinstance(keeper, Restorable):
        return
    name: str = keeper.name  # type: ignore[attr-defined]
    try:
        saved[name] = keeper.save(instance)
    except Exception:
        # A trajectory that is left is left; going on, this one begins anew.
        saved.pop(name, None)
        log.exception("%s: what it remembers could not be saved", name)
