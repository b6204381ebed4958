"""Tools by name, and what a sample chooses of them.

A sample says `tools: [names]` (all of them if it says nothing) and `tool_arguments: {name: {…}}`. Both are
read here, before anything runs: a name that is not there never costs a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from branchline.core.errors import InputError
from branchline.loop.registry import Registry
from branchline.loop.tools.arguments import argument_validator
from branchline.loop.tools.base import Tool


@dataclass(frozen=True)
class ToolSelection:
    """The tools of one sample, and the arguments each instance is created with."""

    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told of them."""
        return tuple(tool.schema for tool in self.tools)


class ToolRegistry(Registry[Tool]):
    """All tools there are.

    registry = ToolRegistry([calculator])
    registry.select(["calculator"], {"calculator": {"answer": 42}})
    """

    kind = "tool"
    async_methods = ("create", "execute", "calc_reward", "release")

    @classmethod
    def check(cls, thing: Any) -> None:
        if isinstance(thing, FunctionType | MethodType):
            raise InputError(
                f"tool: got the function {thing.__name__}, expected a tool: put @tool above its definition"
            )
        super().check(thing)
        argument_validator(thing)

    def select(
        self, names: Sequence[str] | None = None, arguments: Mapping[str, Mapping[str, Any]] | None = None
    ) -> ToolSelection:
        """What a sample asks for; None stands for all tools."""
        if isinstance(names, str):
            raise InputError(f"tools: got {names!r}, expected a list of names")
        chosen = self.names if names is None else tuple(names)
        tools = tuple(self.get(name, f"tools[{place}]") for place, name in enumerate(chosen))
        twice = sorted({name for name in chosen if chosen.count(name) > 1})
        if twice:
            raise InputError(f"tools: got {twice[0]!r} twice, expected names that differ")
        return ToolSelection(tools, check_tool_arguments(arguments or {}, chosen))


def check_tool_arguments(
    arguments: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Mapping[str, Any]]:
    """A sample's `tool_arguments`, if each belongs to a tool the sample has."""
    for name, given in arguments.items():
        if name not in names:
            raise InputError(
                f"tool_arguments: got {name!r}, expected one of the sample's tools, {list(names)}"
            )
        if not isinstance(given, Mapping):
            raise InputError(f"tool_arguments[{name!r}]: got {given!r}, expected an object")
    return arguments
