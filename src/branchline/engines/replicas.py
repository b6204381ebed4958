"""Several engines as one: sticky by session, else fewest in flight.

An id that was handed out stands: when a replica dies or is removed, its calls go on elsewhere behind the
ids they have emitted, with what is left to ask for. Chunks are neither repeated nor lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.core.runs import Ids
from branchline.engines.base import Chunk, Engine, LogprobKind, SamplingParams
from branchline.engines.relay import Cuttable, Progress

# Sessions whose replica is remembered; one that is forgotten is placed anew, which costs a prefill.
REMEMBERED = 100_000


@dataclass(eq=False)
class Replica:
    """One engine and what is known of it."""

    engine: Engine
    running: set[Cuttable] = field(default_factory=set)
    sessions: int = 0
    avoid_until: float = 0.0
    """A replica that failed is tried again after this, or before where no other is left."""
    behind: bool = False
    """It missed a pause or a resume, so its weights are not known: not used before it took part in both."""


class Replicas:
    """An engine over engines that serve the same weights."""

    def __init__(
        self,
        engines: Iterable[Engine] = (),
        *,
        name: str = "replicas",
        retry_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.retry_after_s = retry_after_s
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._places: OrderedDict[str, Replica] = OrderedDict()
        self._paused = False
        for engine in engines:
            self._admit(engine)

    @property
    def version(self) -> int:
        return max((replica.engine.version for replica in self._replicas.values()), default=0)

    @property
    def logprob_kind(self) -> LogprobKind:
        return next((replica.engine.logprob_kind for replica in self._replicas.values()), "raw")

    @property
    def max_context(self) -> int | None:
        """The smallest one: a call must fit wherever it may be moved."""
        lengths = [replica.engine.max_context for replica in self._replicas.values()]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(replica.engine for replica in self._replicas.values())

    @property
    def in_flight(self) -> dict[str, int]:
        """Running calls of each replica, by name."""
        return {name: len(replica.running) for name, replica in self._replicas.items()}

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the replicas that are avoided now."""
        now = self._clock()
        return tuple(name for name, one in self._replicas.items() if one.behind or one.avoid_until > now)

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        progress = Progress(prompt_ids, params)
        failed: dict[Replica, Exception] = {}
        while (finish := progress.finish) is None:
            rest = progress.params
            replica = self._place(session, failed)
            stream = Cuttable(replica.engine.generate(progress.prompt_ids, rest, session=session))
            replica.running.add(stream)
            try:
                async for chunk in stream:
                    progress.add(chunk)
                    if len(chunk.ids):
                        failed.clear()
                    yield chunk
                    if chunk.finish is not None:
                        replica.avoid_until = 0.0
                        return
            except EngineInputError:
                raise
            except (EngineError, OSError) as error:
                failed[replica] = error
                replica.avoid_until = self._clock() + self.retry_after_s
            finally:
                replica.running.discard(stream)
                await stream.close()
        yield progress.end(finish, self.version)

    async def add(self, engine: Engine) -> None:
        """Takes a further replica into use; while paused, it is paused too."""
        self._admit(engine)
        if self._paused:
            try:
                await engine.pause()
            except EngineError:
                del self._replicas[engine.name]
                raise

    async def remove(self, name: str) -> None:
        """Takes a replica out and closes it; its sessions move, and its calls go on elsewhere at once."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            raise InputError(f"replica: got {name!r}, expected one of {', '.join(self._replicas) or 'none'}")
        try:
            # Before the cut: an engine that is closed may hand out what it has.
            await replica.engine.close()
        finally:
            for stream in replica.running:
                stream.cut()

    def forget(self, session: str) -> None:
        """Lets go of a session that has ended."""
        replica = self._places.pop(session, None)
        if replica is not None:
            replica.sessions -= 1

    async def pause(self) -> None:
        self._paused = True
        failed = await self._all("pause", lambda engine: engine.pause())
        for replica in self._replicas.values():
            replica.behind = replica in failed

    async def resume(self, version: int | None = None) -> None:
        self._paused = False
        for replica in await self._all("resume", lambda engine: engine.resume(version)):
            replica.behind = True

    async def close(self) -> None:
        await asyncio.gather(*[replica.engine.close() for replica in self._replicas.values()])

    def _admit(self, engine: Engine) -> None:
        if engine.name in self._replicas:
            raise InputError(f"replica: {engine.name!r} is in use already")
        if self._replicas and engine.logprob_kind != self.logprob_kind:
            raise InputError(
                f"replica {engine.name!r}: {engine.logprob_kind} logprobs, expected {self.logprob_kind}"
            )
        self._replicas[engine.name] = Replica(engine)

    def _place(self, session: str, failed: dict[Replica, Exception]) -> Replica:
        """Where a call goes: to its session's replica, or to the one with the fewest calls, then sessions."""
        now = self._clock()
        usable = [one for one in self._replicas.values() if not one.behind and one not in failed]
        if not usable:
            cause = next(reversed(failed.values()), None)
            raise EngineError(
                f"{self.name}: no replica is left to ask" + (f": {cause}" if cause else "")
            ) from cause
        fresh = [one for one in usable if one.avoid_until <= now]
        known = self._places.get(session)
        if known is not None and known in fresh:
            self._places.move_to_end(session)
            return known
        chosen = min(fresh or usable, key=lambda one: (len(one.running), one.sessions))
        if session:
            self.forget(session)
            self._places[session] = chosen
            chosen.sessions += 1
            if len(self._places) > REMEMBERED:
                self.forget(next(iter(self._places)))
        return chosen

    async def _all(self, what: str, act: Callable[[Engine], Coroutine[Any, Any, None]]) -> list[Replica]:
        """Acts on every replica and gives back those that failed; it is an error if all did."""
        replicas = list(self._replicas.values())
        outcomes = await asyncio.gather(*[act(one.engine) for one in replicas], return_exceptions=True)
        errors = [outcome for outcome in outcomes if outcome is not None]
        if errors and len(errors) == len(replicas):
            raise EngineError(f"{self.name}: {what} failed everywhere: {errors[0]}") from errors[0]
        return [one for one, outcome in zip(replicas, outcomes, strict=True) if outcome is not None]
