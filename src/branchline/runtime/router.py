"""Routes calls to engines by rules over model and agent names, and says whether they are trained.

Clients may send any model name. Without rules every call goes to the default engine and is trained. Engines
work with the session's tokens; an upstream works with text, so its calls are never exact.

With a journal, the policy version, a pause and added replicas survive a restart. Versions only grow: each is
in the journal before its first token is sampled. A gateway that was killed during a weight update starts
paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from branchline.core.errors import BranchlineError, InputError, JournalError, MessageError, raise_errors
from branchline.engines.base import Engine
from branchline.engines.replicas import Replicas
from branchline.engines.upstream_chat import UpstreamChat
from branchline.runtime.routing_rule import RoutingRule
from branchline.tree.journal import Journal

log = logging.getLogger("branchline.policy")

POLICY_RECORDS = "$policy"
"""The name under which the journal has the records of this module; no session can have it."""


@dataclass(frozen=True)
class Route:
    """The engine of a call, and whether the call is trained."""

    engine: Engine | UpstreamChat
    train: bool = True


class PolicyState(msgspec.Struct, frozen=True, array_like=True, tag="policy"):
    """The policy version and whether generation is paused; the last record counts."""

    version: int
    paused: bool


class ReplicaAdded(msgspec.Struct, frozen=True, array_like=True, tag="replica_added"):
    """A replica was added, under the name that its engine has."""

    name: str
    url: str
    is_current: bool
    """Whether it has the weights of the policy; if not, the next update gives it these."""


class ReplicaRemoved(msgspec.Struct, frozen=True, array_like=True, tag="replica_removed"):
    """A replica was removed."""

    name: str


PolicyRecord = PolicyState | ReplicaAdded | ReplicaRemoved
_decoder: msgspec.msgpack.Decoder[PolicyRecord] = msgspec.msgpack.Decoder(PolicyRecord)


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
        self._journal: Journal | None = None
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
            await self._append_record(PolicyState(self.version, paused=True))
            self.paused = True
            await self._policy.pause()

    async def resume(self, version: int | None = None) -> None:
        """Resumes the default engine. Raises MessageError for a version older than the current one."""
        if self._policy is None:
            return
        async with self._lock:
            before = self.version
            if version is not None and version < before:
                raise MessageError("version", version, f"{before}, the version of now, or a later one")
            if version is not None and version != before:
                # Before its first token: after a kill in between, the version is not given out again.
                await self._append_record(PolicyState(version, paused=True))
            try:
                await self._policy.resume(version)
            except BaseException:
                with suppress(
                    JournalError
                ):  # then a restart is paused, and asks for this version or a later one
                    await self._append_record(PolicyState(before, self.paused))
                raise
            await self._append_record(PolicyState(self.version, paused=False))
            self.paused = False

    async def restore(self, journal: Journal, min_version: int = 0) -> None:
        """Continues with the policy version, the pause and the added replicas that a journal has, and records
        their changes in it from now on. Call it once, before the first request.

        `min_version` is the highest version of recorded tokens, for a journal without records of versions.
        """
        state, added = PolicyState(0, paused=False), dict[str, ReplicaAdded]()
        try:
            for record in map(_decoder.decode, journal.read(POLICY_RECORDS)):
                if isinstance(record, ReplicaAdded):
                    added[record.name] = record
                elif isinstance(record, ReplicaRemoved):
                    added.pop(record.name, None)
                else:
                    if record.version > state.version:
                        added = {name: structs.replace(one, is_current=True) for name, one in added.items()}
                    state = record
        except (JournalError, msgspec.DecodeError) as error:
            log.error("the records of the policy are damaged, so generation starts paused: %s", error)
            state = PolicyState(state.version, paused=True)
        if self._policy is None:
            return
        version = max(state.version, min_version)
        if version > self.version:
            log.warning("continuing at policy version %d; the engine must have these weights", version)
            await self._policy.resume(version)
        if state.paused:
            self.paused = True
            await self._policy.pause()
            log.warning(
                "generation is paused, as it was when the gateway ended; POST /policy/resume continues"
            )
        for replica in added.values():
            await self._restore_replica(replica, version)
        self._journal = journal
        if version != state.version:
            await self._append_record(PolicyState(version, state.paused))

    async def _restore_replica(self, added: ReplicaAdded, version: int) -> None:
        """Adds a replica again; one whose server does not answer is logged and left out."""
        known = self.default_engine.engines if isinstance(self.default_engine, Replicas) else ()
        if added.name in [engine.name for engine in known]:
            return
        try:
            await self.add_replica(added.url, version if added.is_current else None)
        except BranchlineError as error:
            log.error("replica %s was not added again: %s", added.name, error)

    async def _append_record(self, record: PolicyRecord) -> None:
        if self._journal is not None:
            await asyncio.wrap_future(self._journal.append(POLICY_RECORDS, msgspec.msgpack.encode(record)))

    async def close(self) -> None:
        """Closes every engine, also after one could not be closed."""
        closing = [engine.close() for engine in (self.default_engine, *self._named_engines.values())]
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        raise_errors("engines could not be closed", [one for one in outcomes if one is not None])

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
                "failing": engine.name in replicas.unavailable,
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
        await self._append_record(ReplicaAdded(engine.name, url, engine.name not in replicas.stale))

    async def remove_replica(self, name: str) -> None:
        """Removes a replica; its calls continue on others. Raises InputError for the last one in use."""
        replicas = self._require_replicas()
        names = [engine.name for engine in replicas.engines]
        in_use = [one for one in names if one not in replicas.stale] or names
        if in_use == [name]:
            raise InputError(f"engines: {name} is the last one in use; add another before it is removed")
        await replicas.remove(name)
        await self._append_record(ReplicaRemoved(name))

    def _require_replicas(self) -> Replicas:
        if not isinstance(self.default_engine, Replicas):
            raise InputError(f"engines: {self.name} takes no replicas; engines with an HTTP server do")
        return self.default_engine
