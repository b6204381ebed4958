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
from branchline.engines.replicas import Replicas
from branchline.engines.upstream_chat import UpstreamChat

_YES, _NO = ("yes", "true", "1"), ("no", "false", "0")


@dataclass(frozen=True)
class RoutingRule:
    """Calls whose model and agent fit go to an engine, and are trained or not. Patterns as in a shell.

    >>> RoutingRule.parse("model=*haiku*,train=no")
    RoutingRule(model='*haiku*', agent='*', engine='', train=False)
    """

    model: str = "*"
    agent: str = "*"
    engine: str = ""
    """Its name in the fleet; none is the one everything else goes to."""
    train: bool = True

    @classmethod
    def parse(cls, text: str) -> RoutingRule:
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

    def matches(self, model: str, agent: str) -> bool:
        return fnmatchcase(model, self.model) and fnmatchcase(agent, self.agent)


@dataclass(frozen=True)
class Route:
    """Where a call goes."""

    engine: Engine | UpstreamChat
    train: bool = True


class Router:
    """The engines of a gateway: the one everything goes to, and those that rules name."""

    def __init__(
        self,
        engine: Engine | UpstreamChat,
        *,
        named_engines: Mapping[str, Engine | UpstreamChat] | None = None,
        rules: Iterable[RoutingRule] = (),
        create_replica: Callable[[str], Engine] | None = None,
    ) -> None:
        """`make` builds a further replica from its address."""
        self.default_engine = engine
        self._named_engines = dict(named_engines or {})
        self._create_replica = create_replica
        self._lock = asyncio.Lock()
        self.paused = False
        """From the moment a pause is asked for until a resume has succeeded."""
        default = Route(engine)
        self._default_route = default
        self._routes: list[tuple[RoutingRule, Route]] = []
        for rule in rules:
            if rule.engine and rule.engine not in self._named_engines:
                known = ", ".join(self._named_engines) or "none"
                raise InputError(f"rule: got engine={rule.engine}, expected one of the named ones: {known}")
            target = self._named_engines[rule.engine] if rule.engine else engine
            self._routes.append((rule, Route(target, rule.train)))

    @property
    def name(self) -> str:
        return self.default_engine.name

    @property
    def engine_names(self) -> list[str]:
        return [self.default_engine.name, *self._named_engines]

    @property
    def version(self) -> int:
        return 0 if isinstance(self.default_engine, UpstreamChat) else self.default_engine.version

    def route(self, model: str, agent: str) -> Route:
        """The first rule that fits decides."""
        for rule, route in self._routes:
            if rule.matches(model, agent):
                return route
        return self._default_route

    def forget_session(self, session: str) -> None:
        """Lets go of what is kept for a session that has ended."""
        for engine in (self.default_engine, *self._named_engines.values()):
            engine.release_session(session)

    async def check_ready(self) -> None:
        """Raises EngineError where a server does not answer."""
        await self.default_engine.ready()

    async def pause(self) -> None:
        """Holds the policy for a change of its weights; engines that rules name go on."""
        if isinstance(self.default_engine, UpstreamChat):
            return
        async with self._lock:
            self.paused = True
            await self.default_engine.pause()

    async def resume(self, version: int | None = None) -> None:
        """Versions only grow: two policies under one number could not be told apart in the record."""
        if isinstance(self.default_engine, UpstreamChat):
            return
        async with self._lock:
            if version is not None and version < self.version:
                raise MessageError("version", version, f"{self.version}, the version of now, or a later one")
            await self.default_engine.resume(version)
            self.paused = False

    async def close(self) -> None:
        await asyncio.gather(
            *(engine.close() for engine in (self.default_engine, *self._named_engines.values()))
        )

    # -- replicas ------------------------------------------------------------------------------------

    def describe_replicas(self) -> list[dict[str, Any]]:
        """What is known of each replica."""
        if not isinstance(self.default_engine, Replicas):
            return [{"name": self.default_engine.name, "version": self.version}]
        return [
            {
                "name": engine.name,
                "version": engine.version,
                "in_flight": self.default_engine.in_flight[engine.name],
                "failing": engine.name in self.default_engine.failing,
                "behind": engine.name in self.default_engine.stale,
            }
            for engine in self.default_engine.engines
        ]

    async def add_replica(self, url: str, version: int | None = None) -> None:
        """Takes a further replica into use, once it answers; `version` is the one of its weights.

        One of another version than the policy's is not used before the next pause and resume.
        """
        if self._create_replica is None or not isinstance(self.default_engine, Replicas):
            raise InputError(f"engines: {self.default_engine.name} takes no replicas; those behind HTTP do")
        engine = self._create_replica(url)
        try:
            await engine.ready()
            if version is not None:
                await engine.resume(version)
            await self.default_engine.add(engine)
        except BaseException:
            await engine.close()
            raise

    async def remove_replica(self, name: str) -> None:
        """Takes a replica out; what it was sampling goes on elsewhere."""
        if not isinstance(self.default_engine, Replicas):
            raise InputError(f"engines: {self.default_engine.name} takes no replicas; those behind HTTP do")
        names = [engine.name for engine in self.default_engine.engines]
        in_use = [one for one in names if one not in self.default_engine.stale] or names
        if in_use == [name]:
            raise InputError(f"engines: {name} is the last one in use; add another before it is removed")
        await self.default_engine.remove(name)
