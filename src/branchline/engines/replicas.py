"""Several engines as one: sticky by session, else fewest in flight.

An id that was handed out stands: when a replica dies or is removed, its calls go on elsewhere behind the
ids they have emitted, with what is left to ask for. Chunks are neither repeated nor lost.

All replicas in use sample under one version. One whose weights are another's, or not known because it missed
a pause or a resume, is behind: its calls move, and it gets none until it was paused and resumed with them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, Engine, LogprobKind, SamplingParams
from branchline.engines.continuation import CancellableStream, GenerationState

# Sessions whose replica is remembered; one that is forgotten is placed anew, which costs a prefill.
MAX_STICKY_SESSIONS = 100_000


@dataclass(eq=False)
class Replica:
    """One engine and what is known of it."""

    engine: Engine
    running: set[CancellableStream] = field(default_factory=set)
    session_count: int = 0
    avoid_until: float = 0.0
    """A replica that failed is tried again after this, or before where no other is left."""
    stale: bool = False
    """Its weights are not known to be those of the others."""
    paused: bool = False
    """It took part in a pause and waits for its resume."""

    def quarantine(self) -> None:
        """Its weights are not known from now on: what runs on it goes on elsewhere."""
        self.stale = True
        self.cancel_streams()

    def cancel_streams(self) -> None:
        for stream in self.running:
            stream.cancel()


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
        self._replica_by_session: OrderedDict[str, Replica] = OrderedDict()
        self._paused = False
        self._update_lock = asyncio.Lock()
        """A pause is over before a resume begins, and nobody joins in between."""
        for engine in engines:
            self._validate(engine)
            self._register(engine)

    @property
    def version(self) -> int:
        """Of those in use; one that is behind says nothing about the others."""
        replicas = self._replicas.values()
        in_use = [one.engine.version for one in replicas if not one.stale]
        return max(in_use or [one.engine.version for one in replicas], default=0)

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
    def stale(self) -> tuple[str, ...]:
        """Names of the replicas that are not used before the next pause and resume."""
        return tuple(name for name, one in self._replicas.items() if one.stale)

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the replicas that are avoided now."""
        now = self._clock()
        return tuple(name for name, one in self._replicas.items() if one.stale or one.avoid_until > now)

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        progress = GenerationState(prompt_ids, params)
        failed: dict[Replica, Exception] = {}
        while (finish := progress.finish_reason) is None:
            replica = self._select_replica(session, failed)
            before, failure = progress.produced, None
            stream = CancellableStream(
                replica.engine.generate(progress.prompt_ids, progress.remaining_params, session=session)
            )
            replica.running.add(stream)
            try:
                async for chunk in stream:
                    progress.add(chunk)
                    yield chunk
                    if chunk.finish_reason is not None:
                        replica.avoid_until = 0.0
                        return
            except EngineInputError:
                raise
            except (EngineError, OSError) as error:
                failure = error
                replica.avoid_until = self._clock() + self.retry_after_s
            finally:
                replica.running.discard(stream)
                await stream.close()
            if progress.produced > before:
                failed.clear()
            if failure is not None:
                failed[replica] = failure
        yield progress.final_chunk(finish, self.version)

    async def add(self, engine: Engine) -> None:
        """Takes a further replica into use; while paused, it is paused too.

        One of another version than the others' waits for the next pause and resume.
        """
        async with self._update_lock:
            self._validate(engine)
            if self._paused:
                await engine.pause()
            self._register(engine).paused = self._paused

    async def remove(self, name: str) -> None:
        """Takes a replica out and closes it; its sessions move, and its calls go on elsewhere at once."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            raise InputError(f"replica: got {name!r}, expected one of {', '.join(self._replicas) or 'none'}")
        try:
            # Before the cut: an engine that is closed may hand out what it has.
            await replica.engine.close()
        finally:
            replica.cancel_streams()

    def release_session(self, session: str) -> None:
        """Lets go of a session that has ended."""
        replica = self._replica_by_session.pop(session, None)
        if replica is not None:
            replica.session_count -= 1

    async def ready(self) -> None:
        await asyncio.gather(*[replica.engine.ready() for replica in self._replicas.values()])

    async def pause(self) -> None:
        """Replicas that fail are left; if all in use do, none is, and it can be tried again."""
        async with self._update_lock:
            self._paused = True
            replicas = list(self._replicas.values())
            failed = await _for_each_replica(replicas, lambda engine: engine.pause())
            for one in replicas:
                one.paused = one not in failed
            in_use = [one for one in replicas if not one.stale] or replicas
            if in_use and all(one in failed for one in in_use):
                raise self._all_failed_error("pause", failed)
            for one in failed:
                one.quarantine()

    async def resume(self, version: int | None = None) -> None:
        """Replicas that fail are left; if all do, all are still held, and it can be tried again.

        Those that missed the pause are not asked: whatever weights they have, it is not known to be these.
        """
        async with self._update_lock:
            asked = [one for one in self._replicas.values() if one.paused or not one.stale]
            failed = await _for_each_replica(asked, lambda engine: engine.resume(version))
            resumed = [one for one in asked if one not in failed]
            if version is None:
                version = max((one.engine.version for one in resumed if not one.stale), default=self.version)
            # Without a new version nobody has new weights: who was behind still is.
            in_step = [one for one in resumed if one.engine.version == version]
            if self._replicas and not in_step:
                raise self._all_failed_error("resume", failed)
            self._paused = False
            for one in resumed:
                one.paused, one.stale = False, one not in in_step
            for one in failed:
                one.quarantine()

    async def close(self) -> None:
        await asyncio.gather(*[replica.engine.close() for replica in self._replicas.values()])

    def _validate(self, engine: Engine) -> None:
        if engine.name in self._replicas:
            raise InputError(f"replica: {engine.name!r} is in use already")
        if self._replicas and engine.logprob_kind != self.logprob_kind:
            raise InputError(
                f"replica {engine.name!r}: {engine.logprob_kind} logprobs, expected {self.logprob_kind}"
            )

    def _register(self, engine: Engine) -> Replica:
        is_behind = bool(self._replicas) and engine.version != self.version
        replica = self._replicas[engine.name] = Replica(engine, stale=is_behind)
        return replica

    def _select_replica(self, session: str, failed: dict[Replica, Exception]) -> Replica:
        """Where a call goes: to its session's replica, or to the one with the fewest calls, then sessions."""
        now = self._clock()
        usable = [one for one in self._replicas.values() if not one.stale and one not in failed]
        if not usable:
            cause = next(reversed(failed.values()), None)
            raise EngineError(
                f"{self.name}: no replica is left to ask" + (f": {cause}" if cause else "")
            ) from cause
        fresh = [one for one in usable if one.avoid_until <= now]
        known = self._replica_by_session.get(session)
        if known is not None and known in fresh:
            self._replica_by_session.move_to_end(session)
            return known
        chosen = min(fresh or usable, key=lambda one: (len(one.running), one.session_count))
        if session:
            self.release_session(session)
            self._replica_by_session[session] = chosen
            chosen.session_count += 1
            if len(self._replica_by_session) > MAX_STICKY_SESSIONS:
                self.release_session(next(iter(self._replica_by_session)))
        return chosen

    def _all_failed_error(self, what: str, failed: dict[Replica, BaseException]) -> EngineError:
        error = next(iter(failed.values()), None)
        failure = EngineError(f"{self.name}: {what} failed everywhere: {error or 'all missed the pause'}")
        failure.__cause__ = error
        return failure


async def _for_each_replica(
    replicas: Sequence[Replica], act: Callable[[Engine], Coroutine[Any, Any, None]]
) -> dict[Replica, BaseException]:
    """Acts on every replica and gives back those that failed, and why."""
    outcomes = await asyncio.gather(*[act(one.engine) for one in replicas], return_exceptions=True)
    return {one: error for one, error in zip(replicas, outcomes, strict=True) if error is not None}
