"""Things by name: tools and interactions are registered once and chosen per sample.

A name stands for one thing. A name that nobody registered is an InputError that says what there is, raised
where the sample is read, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from branchline.core.errors import InputError


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


class Names(Generic[N]):
    """A registry."""

    def __init__(self, things: Iterable[N] = ()) -> None:
        self._things: dict[str, N] = {}
        for thing in things:
            self.add(thing)

    def add(self, thing: N) -> N:
        """Registers a thing and gives it back, so that it can stand above a definition."""
        if thing.name in self._things:
            raise InputError(f"name: got {thing.name!r} twice, expected names that differ")
        self._things[thing.name] = thing
        return thing

    def get(self, name: str, where: str = "name") -> N:
        """The thing of this name; `where` says in an error which field of the sample named it."""
        try:
            return self._things[name]
        except (KeyError, TypeError):
            raise InputError(f"{where}: got {name!r}, expected one of {list(self._things)}") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._things)

    def __iter__(self) -> Iterator[N]:
        return iter(self._things.values())

    def __len__(self) -> int:
        return len(self._things)
