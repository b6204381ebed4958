"""Things by name: tools and interactions are registered once and chosen per sample.

A name stands for one thing. A name that nobody registered is an InputError that says what there is, raised
where the sample is read, before anything runs. A thing that could not be used is refused where it is
registered: a class in place of one of its instances, or a method that has to be waited for and cannot be.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from branchline.core.errors import InputError


class Registrable(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Registrable)


class Registry(Generic[N]):
    """A registry."""

    kind: ClassVar[str] = "name"
    """What is registered here, in errors."""
    async_methods: ClassVar[tuple[str, ...]] = ()
    """Methods that everything here has, and that are coroutine functions."""

    def __init__(self, things: Iterable[N] = ()) -> None:
        self._items: dict[str, N] = {}
        for thing in things:
            self.add(thing)

    def add(self, thing: N) -> N:
        """Registers a thing and gives it back, so that it can stand above a definition."""
        self.check(thing)
        if thing.name in self._items:
            raise InputError(f"{self.kind}: got {thing.name!r} twice, expected names that differ")
        self._items[thing.name] = thing
        return thing

    @classmethod
    def check(cls, thing: Any) -> None:
        """Whether a thing can be used."""
        if isinstance(thing, type):
            raise InputError(
                f"{cls.kind}: got the class {thing.__name__}, expected an instance of it: {thing.__name__}()"
            )
        name = getattr(thing, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(
                f"{cls.kind}: got {thing!r}, whose name is {name!r}, expected one that has a name"
            )
        remembers = callable(getattr(thing, "save", None)) and callable(getattr(thing, "restore", None))
        for method in (*cls.async_methods, "restore") if remembers else cls.async_methods:
            if not is_async_callable(getattr(thing, method, None)):
                raise InputError(f"{cls.kind} {name!r}: cannot wait for {method}, expected an `async def`")
        if remembers and is_async_callable(thing.save):
            raise InputError(f"{cls.kind} {name!r}: has to wait for save, expected a plain `def`")

    def get(self, name: str, where: str = "name") -> N:
        """The thing of this name; `where` says in an error which field of the sample named it."""
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise InputError(f"{where}: got {name!r}, expected one of {list(self._items)}") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._items)

    def __iter__(self) -> Iterator[N]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)


def is_async_callable(function: Any) -> bool:
    """Whether it is a coroutine function, or something that wraps one or is called like one."""
    if not callable(function):
        return False
    inside = inspect.unwrap(function)
    while isinstance(inside, functools.partial):
        inside = inside.func
    return any(inspect.iscoroutinefunction(one) for one in (function, inside, type(inside).__call__))
