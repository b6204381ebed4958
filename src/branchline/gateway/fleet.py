"""Which engine a call goes to, and whether it trains: rules over models' and agents' names.

Clients ask for whatever model names they like. Without rules everything goes to the one engine and is
trained. Engines of a fleet speak the session's tokens; an upstream speaks text and is never exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from branchline.core.errors import InputError, MessageError
from branchline.engines.base import Engine
from branchline.engines.openai import UpstreamChat
from branchline.engines.replicas import Replicas

_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")


@dataclass(frozen=True)
class Rule:
    """Calls whose model and agent fit go to an engine, and are trained or not. Patterns as in a shell.

    >>> Rule.read("model=*haiku*,train=no")
    Rule(model='*haiku*', agent='*', engine='', train=False)
    """

    model: str = "*"
    agent: str = "*"
    engine: str = ""
    """Its name in the fleet; none is the one everything else goes to."""
    train: bool = True

    @classmethod
    def read(cls, text: str) -> Rule:
        """From a command line: `key=value` pairs with commas."""
        fields: dict[str, Any] = {}
        for pair in text.split(","):
            key, separator, value = (part.strip() for part in pair.partition("="))
            if not separator or key not in ("model", "agent", "engine", "train"):
                raise InputError(f"rule: got {pair!r}, expected model=…, agent=…, engine=… or train=yes|no")
            if key == "train":
                if value.lower() not in (*_YES, *_NO):
                    raise InputError(f"rule: got train={value}, expected yes or no")
                fields[key] = value.lower() in _YES
            else:
                fields[key] = value
        return cls(**fields)

    def fits(self, model: str, agent: str) -> bool:
        return fnmatchcase(model, self.model) and fnmatchcase(agent, self.agent)


@dataclass(frozen=True)
class Route:
    """Where a call goes."""

    engine: Engine | UpstreamChat
    train: bool = True


class Fleet:
    """The engines of a gateway: the one everything goes to, and those that rules name."""

    def __init__(
        self,
        engine: Engine | UpstreamChat,
        *,
        others: Mapping[str, Engine | UpstreamChat] | None = None,
        rules: Iterable[Rule] = (),
        make: Callable[[str], Engine] | None = None,
    ) -> None:
        """`make` builds a further replica from its address."""
        self.main = engine
        self._others = dict(others or {})
        self._make = make
        self._turn = asyncio.Lock()
        self.paused = False
        """From the moment a pause is asked for until a resume has succeeded."""
        default = Route(engine)
        self._default = default
        self._routes: list[tuple[Rule, Route]] = []
        for rule in rules:
            if rule.engine and rule.engine not in self._others:
                known = ", ".join(self._others) or "none"
                raise InputError(f"rule: got engine={rule.engine}, expected one of the named ones: {known}")
            target = self._others[rule.engine] if rule.engine else engine
            self._routes.append((rule, Route(target, rule.train)))

    @property
    def name(self) -> str:
        return self.main.name

    @property
    def names(self) -> list[str]:
        return [self.main.name, *self._others]

    @property
    def version(self) -> int:
        return 0 if isinstance(self.main, UpstreamChat) else self.main.version

    def route(self, model: str, agent: str) -> Route:
        """The first rule that fits decides."""
        for rule, route in self._routes:
            if rule.fits(model, agent):
                return route
        return self._default

    def forget(self, session: str) -> None:
        """Lets go of what is kept for a session that has ended."""
        for engine in (self.main, *self._others.values()):
            if isinstance(engine, Replicas):
                engine.forget(session)

    async def ready(self) -> None:
        """Raises EngineError where a server does not answer."""
        engines = self.main.engines if isinstance(self.main, Replicas) else (self.main,)
        for engine in engines:
            ready = getattr(engine, "ready", None)
            if ready is not None:
                await ready()

    async def pause(self) -> None:
        """Holds the policy for a change of its weights; engines that rules name go on."""
        if isinstance(self.main, UpstreamChat):
            return
        async with self._turn:
            self.paused = True
            await self.main.pause()

    async def resume(self, version: int | None = None) -> None:
        """Versions only grow: two policies under one number could not be told apart in the record."""
        if isinstance(self.main, UpstreamChat):
            return
        async with self._turn:
            if version is not None and version < self.version:
                raise MessageError("version", version, f"{self.version}, the version of now, or a later one")
            await self.main.resume(version)
            self.paused = False

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in (self.main, *self._others.values())))

    # -- replicas ------------------------------------------------------------------------------------

    def replicas(self) -> list[dict[str, Any]]:
        """What is known of each replica."""
        if not isinstance(self.main, Replicas):
            return [{"name": self.main.name, "version": self.version}]
        return [
            {
                "name": engine.name,
                "version": engine.version,
                "in_flight": self.main.in_flight[engine.name],
                "failing": engine.name in self.main.failing,
                "behind": engine.name in self.main.behind,
            }
            for engine in self.main.engines
        ]

    async def add(self, url: str, version: int | None = None) -> None:
        """Takes a further replica into use, once it answers; `version` is the one of its weights.

        One of another version than the policy's is not used before the next pause and resume.
        """
        if self._make is None or not isinstance(self.main, Replicas):
            raise InputError(f"engines: {self.main.name} takes no replicas; those behind HTTP do")
        engine = self._make(url)
        try:
            ready = getattr(engine, "ready", None)
            if ready is not None:
                await ready()
            if version is not None:
                await engine.resume(version)
            await self.main.add(engine)
        except BaseException:
            await engine.close()
            raise

    async def remove(self, name: str) -> None:
        """Takes a replica out; what it was sampling goes on elsewhere."""
        if not isinstance(self.main, Replicas):
            raise InputError(f"engines: {self.main.name} takes no replicas; those behind HTTP do")
        names = [engine.name for engine in self.main.engines]
        in_use = [one for one in names if one not in self.main.behind] or names
        if in_use == [name]:
            raise InputError(f"engines: {name} is the last one in use; add another before it is removed")
        await self.main.remove(name)
