"""Routes calls to engines by rules over model and agent names, and says whether they are trained.

Clients may send any model name. Without rules every call goes to the default engine and is trained. Engines
work with the session's tokens; an upstream works with text, so its calls are never exact.
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
    """Sends calls with a matching model and agent to an engine. Patterns are those of a shell.

    >>> RoutingRule.parse("model=*haiku*,train=no")
    RoutingRule(model='*haiku*', agent='*', engine='', train=False)
    """

    model: str = "*"
    agent: str = "*"
    engine: str = ""
    """The name of an engine; empty for the default engine."""
    train: bool = True

    @classmethod
    def parse(cls, text: str) -> RoutingRule:
        """Reads a rule from a command line: `key=value` pairs separated by commas."""
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
    """The engine of a call, and whether the call is trained."""

    engine: Engine | UpstreamChat
    train: bool = True


class Router:
    """The engines of a gateway: the default one and those that rules name."""

    def __init__(
        self,
        engine: Engine | UpstreamChat,
        *,
        named_engines: Mapping[str, Engine | UpstreamChat] | None = None,
        rules: Iterable[RoutingRule] = (),
        create_replica: Callable[[str], Engine] | None = None,
    ) -> None:
        """`create_replica` makes an engine from the address of a server."""
        self.default_engine = engine
        self._policy = None if isinstance(engine, UpstreamChat) else engine
        """The engine whose weights a trainer updates; an upstream has no weights to update."""
        self._named_engines = dict(named_engines or {})
        self._create_replica = create_replica
        self._lock = asyncio.Lock()
        self.paused = False
        """True from the request for a pause until a resume has succeeded."""
        self._default_route = Route(engine)
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
        return 0 if self._policy is None else self._policy.version

    def route(self, model: str, agent: str) -> Route:
        """Returns the route of the first rule that matches, else the default route."""
        for rule, route in self._routes:
            if rule.matches(model, agent):
                return route
        return self._default_route

    def release_session(self, session: str) -> None:
        """Drops what engines cache for a session that has ended."""
        for engine in (self.default_engine, *self._named_engines.values()):
            engine.release_session(session)

    async def check_ready(self) -> None:
        """Raises EngineError if the server of the default engine does not answer."""
        await self.default_engine.ready()

    async def pause(self) -> None:
        """Pauses the default engine for a weight update; engines that rules name continue."""
        if self._policy is None:
            return
        async with self._lock:
            self.paused = True
            await self._policy.pause()

    async def resume(self, version: int | None = None) -> None:
        """Resumes the default engine. Raises MessageError for a version older than the current one."""
        if self._policy is None:
            return
        async with self._lock:
            if version is not None and version < self.version:
                raise MessageError("version", version, f"{self.version}, the version of now, or a later one")
            await self._policy.resume(version)
            self.paused = False

    async def close(self) -> None:
        await asyncio.gather(
            *(engine.close() for engine in (self.default_engine, *self._named_engines.values()))
        )

    # -- replicas ------------------------------------------------------------------------------------

    def describe_replicas(self) -> list[dict[str, Any]]:
        """Returns name, version and state of each replica."""
        replicas = self.default_engine
        if not isinstance(replicas, Replicas):
            return [{"name": self.name, "version": self.version}]
        return [
            {
                "name": engine.name,
                "version": engine.version,
                "in_flight": replicas.in_flight[engine.name],
                "failing": engine.name in replicas.failing,
                "behind": engine.name in replicas.stale,
            }
            for engine in replicas.engines
        ]

    async def add_replica(self, url: str, version: int | None = None) -> None:
        """Adds a replica when its server answers; `version` is the version of its weights.

        A replica of another version than the policy's is not used before the next pause and resume.
        """
        replicas = self._require_replicas()
        if self._create_replica is None:
            raise InputError(f"engines: got {url!r}, expected none: this router has no create_replica")
        engine = self._create_replica(url)
        try:
            await engine.ready()
            if version is not None:
                await engine.resume(version)
            await replicas.add(engine)
        except BaseException:
            await engine.close()
            raise

    async def remove_replica(self, name: str) -> None:
        """Removes a replica; its calls continue on others. Raises InputError for the last one in use."""
        replicas = self._require_replicas()
        names = [engine.name for engine in replicas.engines]
        in_use = [one for one in names if one not in replicas.stale] or names
        if in_use == [name]:
            raise InputError(f"engines: {name} is the last one in use; add another before it is removed")
        await replicas.remove(name)

    def _require_replicas(self) -> Replicas:
        if not isinstance(self.default_engine, Replicas):
            raise InputError(f"engines: {self.name} takes no replicas; engines with an HTTP server do")
        return self.default_engine
