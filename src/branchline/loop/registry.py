"""Tools and interactions by name: registered once, selected per task.

A name belongs to one item. An unknown name raises an InputError that lists the registered names, when the
task is read and before anything runs. An item that cannot work is refused when it is registered: a class
instead of an instance, or a synchronous method where a coroutine is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, ClassVar, Generic, TypeVar

from branchline.core.errors import InputError
from branchline.loop.interaction import Interaction, InteractionConfig
from branchline.loop.persistence import Restorable
from branchline.loop.task import ToolMethod
from branchline.loop.tools.arguments import argument_validator
from branchline.loop.tools.base import Tool, ToolSelection

N = TypeVar("N", bound=Restorable)


class Registry(Generic[N]):
    """Items by name, in the order they were added."""

    kind: ClassVar[str]
    """What is registered, for error messages."""
    async_methods: ClassVar[tuple[str, ...]]

    def __init__(self, items: Iterable[N] = ()) -> None:
        self._items: dict[str, N] = {}
        for item in items:
            self.add(item)

    def add(self, item: N) -> N:
        """Registers an item and returns it, so that it can be used as a decorator."""
        self.check(item)
        if item.name in self._items:
            raise InputError(f"{self.kind}: got {item.name!r} twice, expected distinct names")
        self._items[item.name] = item
        return item

    @classmethod
    def check(cls, item: Any) -> None:
        """Raises InputError if the item cannot be used."""
        if isinstance(item, type):
            raise InputError(
                f"{cls.kind}: got the class {item.__name__}, expected an instance of it: {item.__name__}()"
            )
        name = getattr(item, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(f"{cls.kind}: got {item!r}, whose name is {name!r}, expected a non-empty name")
        for method in (*cls.async_methods, "restore"):
            if not is_async_callable(getattr(item, method, None)):
                raise InputError(f"{cls.kind} {name!r}: {method} is no coroutine, expected an `async def`")
        save = getattr(item, "save", None)
        if not callable(save) or is_async_callable(save):
            raise InputError(f"{cls.kind} {name!r}: save is no plain method, expected a `def`")

    def get(self, name: str, field: str = "name") -> N:
        """The item with this name; `field` is the field of the task that an error message names."""
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise InputError(f"{field}: got {name!r}, expected one of {list(self._items)}") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._items)

    def __iter__(self) -> Iterator[N]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class ToolRegistry(Registry[Tool]):
    """All tools.

    registry = ToolRegistry([calculator])
    registry.select(["calculator"], {"calculator": {"answer": 42}})
    """

    kind = "tool"
    async_methods = ("create", "execute", "calc_reward", "release")

    @classmethod
    def check(cls, item: Any) -> None:
        if isinstance(item, FunctionType | MethodType):
            raise InputError(
                f"tool: got the function {item.__name__}, expected a tool: put @tool above its definition"
            )
        super().check(item)
        argument_validator(item)

    def select(
        self,
        names: Sequence[str] | None = None,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        method_arguments: Mapping[str, Mapping[ToolMethod, Mapping[str, Any]]] | None = None,
    ) -> ToolSelection:
        """The tools of a task; None selects all of them."""
        if isinstance(names, str):
            raise InputError(f"tools: got {names!r}, expected a list of names")
        selected = self.names if names is None else names
        tools = tuple(self.get(name, f"tools[{index}]") for index, name in enumerate(selected))
        return ToolSelection(tools, arguments or {}, method_arguments or {})


class InteractionRegistry(Registry[Interaction]):
    """All interactions."""

    kind = "interaction"
    async_methods = ("start", "respond", "score", "finalize")

    def select(self, name: str, arguments: Mapping[str, Any] | None = None) -> InteractionConfig:
        """The interaction of a task."""
        if arguments is not None and not isinstance(arguments, Mapping):
            raise InputError(f"interaction_arguments: got {arguments!r}, expected an object")
        return InteractionConfig(self.get(name, "interaction"), arguments or {})


def is_async_callable(function: Any) -> bool:
    """Whether it is a coroutine function, wraps one, or has an async `__call__`."""
    if not callable(function):
        return False
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    return any(inspect.iscoroutinefunction(one) for one in (function, inner, type(inner).__call__))
