"""What tools and interactions remember: written down when a trajectory is left, given back when it goes on.

One that remembers something says how. `save` gives it as values that JSON can hold, at once and without
waiting; `restore` makes an instance of them, in this process or in another:

    class Calculator(BaseTool):
        def save(self, instance): return instance.results
        async def restore(self, trajectory, saved, **arguments): return Slate(results=saved, **arguments)

One that does not begins anew, with the arguments of its sample. If it was used before, that is a fault: what
it says and what it is worth may be other than it would have been.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from branchline.loop.faults import Fault
from branchline.loop.registry import Registrable
from branchline.loop.serialization import copy_containers, to_plain_data
from branchline.loop.timeouts import describe_error
from branchline.loop.tools.base import Tool, ToolResult

log = logging.getLogger("branchline.loop")

_BUILTIN_MODULES = ("branchline.loop.tools.", "branchline.loop.interactions.")
"""Whoever is made and judged as it says there has nothing in it but the arguments of its sample."""


@runtime_checkable
class Restorable(Protocol):
    """A tool or an interaction whose instances outlive a process."""

    def save(self, instance: Any, /) -> Any: ...
    async def restore(self, trajectory: str, saved: Any, /, **arguments: Any) -> Any: ...


class PersistentTool:
    """A tool, and the one instance of it that a trajectory has."""

    def __init__(self, tool: Tool, saved: Mapping[str, Any]) -> None:
        self._tool = tool
        self._saved = saved
        self._instance: Any = None
        self._is_created = False

    @property
    def name(self) -> str:
        return self._tool.name

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._tool.schema

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        if self.name in self._saved:
            assert isinstance(self._tool, Restorable)
            saved = copy_containers(self._saved[self.name])
            self._instance = await self._tool.restore(trajectory, saved, **arguments)
        else:
            self._instance = await self._tool.create(trajectory, **arguments)
        self._is_created = True
        return self._instance

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._tool.execute(instance, arguments)

    async def calc_reward(self, instance: Any) -> float | None:
        return await self._tool.calc_reward(instance)

    async def release(self, instance: Any) -> None:
        self._is_created = False
        await self._tool.release(instance)

    def save_state(self, saved: dict[str, Any]) -> Fault | None:
        """Puts down what its instance remembers."""
        return save_state(self._tool, self._instance, saved) if self._is_created else None


def save_state(keeper: Registrable, instance: Any, saved: dict[str, Any]) -> Fault | None:
    """Puts down what an instance remembers, if its keeper says how; a fault if that cannot be had."""
    if not isinstance(keeper, Restorable):
        return None
    name = keeper.name
    try:
        saved[name] = to_plain_data(keeper.save(instance), "saved")
    except Exception as error:
        # A trajectory that is left is left; going on, this one begins anew.
        saved.pop(name, None)
        log.exception("%s: what it remembers could not be saved", name)
        return Fault(name, "save", describe_error(error))
    return None


def lost_state(
    keeper: Registrable, ways: Sequence[str], saved: Mapping[str, Any], trajectory: str
) -> Fault | None:
    """The fault of one that was used before and is recreated without what it remembered.

    `ways` are the methods by which instances have something of their own, where a keeper has its own.
    """
    name = keeper.name
    modules = [getattr(getattr(keeper, way, None), "__module__", None) or _BUILTIN_MODULES[0] for way in ways]
    is_ours = all(module.startswith(_BUILTIN_MODULES) for module in modules)
    if name in saved or (is_ours and not isinstance(keeper, Restorable)):
        return None
    fault = Fault(name, "recreated", "it was used before, and nothing is saved of what it remembered")
    log.warning("%s: %s", trajectory, fault)
    return fault
