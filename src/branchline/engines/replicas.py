"""Several engines as one: a session stays on its replica, a new one goes to that with the fewest calls.

Tokens that were yielded are final: when a replica fails or is removed, its calls continue on another one
after the ids they have yielded. No chunk is repeated or lost.

All replicas in use sample under one version. A replica with other weights, or with unknown ones because it
missed a pause or a resume, is *stale*: its calls move, and it gets no new ones until it has been paused and
resumed together with the others. `replica_pool.py` decides which replica serves a call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from branchline.chat.vision import ImageSpan
from branchline.core.errors import (
    EngineError,
    EngineInputError,
    EngineOutputError,
    InputError,
    raise_errors,
)
from branchline.core.token_arrays import Ids
from branchline.engines.base import (
    CONSTRAINT_FIELDS,
    Chunk,
    Engine,
    LogprobKind,
    SamplingParams,
    remaining_request,
)
from branchline.engines.replica_pool import CancellableStream, Replica, ReplicaPool


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
        """Time between two checks of a replica that failed."""
        self._pool = ReplicaPool(name, retry_after_s, clock)
        self._replicas = self._pool.replicas
        self._paused = False
        self._update_lock = asyncio.Lock()
        """Held by pause, resume and add: one is complete before the next begins."""
        for engine in engines:
            self._validate(engine)
            self._register(engine)

    @property
    def version(self) -> int:
        """The version of the replicas in use, or the highest one if all are stale."""
        replicas = self._replicas.values()
        in_use = [replica.engine.version for replica in replicas if not replica.stale]
        return max(in_use or [replica.engine.version for replica in replicas], default=0)

    @property
    def logprob_kind(self) -> LogprobKind:
        return next((replica.engine.logprob_kind for replica in self._replicas.values()), "raw")

    @property
    def logprobs_after_truncation(self) -> bool | None:
        """None if replicas differ: a call may be moved from one to another."""
        values = {replica.engine.logprobs_after_truncation for replica in self._replicas.values()}
        return values.pop() if len(values) == 1 else None

    @property
    def greedy_logprob_temperature(self) -> float | None:
        """None if replicas differ."""
        values = {replica.engine.greedy_logprob_temperature for replica in self._replicas.values()}
        return values.pop() if len(values) == 1 else None

    @property
    def max_context(self) -> int | None:
        """The smallest of all replicas: a call must fit wherever it may be moved."""
        lengths = [replica.engine.max_context for replica in self._replicas.values()]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def supports_images(self) -> bool:
        """Whether all replicas do: a call may be moved to any of them."""
        return all(replica.engine.supports_images for replica in self._replicas.values())

    @property
    def supported_fields(self) -> frozenset[str]:
        """The fields that all replicas support: a call may be moved to any of them."""
        engines = [replica.engine for replica in self._replicas.values()]
        return CONSTRAINT_FIELDS.intersection(*[engine.supported_fields for engine in engines])

    @property
    def constrains_raw_logprobs(self) -> bool:
        """Whether any replica does: its logprobs could not be distinguished from those of the others."""
        return any(replica.engine.constrains_raw_logprobs for replica in self._replicas.values())

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(replica.engine for replica in self._replicas.values())

    @property
    def in_flight(self) -> dict[str, int]:
        """The number of running calls of each replica, by name."""
        return {name: len(replica.running) for name, replica in self._replicas.items()}

    @property
    def stale(self) -> tuple[str, ...]:
        """Names of the replicas that serve no calls before the next pause and resume."""
        return tuple(name for name, replica in self._replicas.items() if replica.stale)

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Names of the replicas that are stale, or excluded: those serve calls only if no other can."""
        replicas = self._replicas.items()
        return tuple(name for name, replica in replicas if replica.stale or replica.excluded)

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        yielded: list[Chunk] = []
        failed: dict[Replica, Exception] = {}
        """Replicas that failed since the last token."""
        avoided = self._pool.pop_avoided(session)
        while True:
            # A request that ended before its first token is only sent again.
            preempted = yielded[-1].num_preempted + 1 if yielded else 0
            rest = remaining_request(prompt_ids, params, yielded, self.version)
            if isinstance(rest, Chunk):
                yield rest
                return
            replica = self._pool.select(session, failed, avoided, rest)
            silent_since, has_begun = self._pool.clock(), False
            stream = CancellableStream(replica.engine.generate(*rest, session=session, images=images))
            replica.running.add(stream)
            try:
                async for chunk in stream:
                    replica.last_chunk_at, has_begun = self._pool.clock(), True
                    if preempted:
                        chunk = replace(chunk, num_preempted=preempted + chunk.num_preempted)
                    yielded.append(chunk)
                    if len(chunk.ids):
                        failed.clear()
                    yield chunk
                    silent_since = self._pool.clock()
                    if chunk.finish_reason is not None:
                        self._pool.include(replica)
                        return
            except asyncio.CancelledError:
                self._pool.record_disconnect(replica, session, silent_since, rest)
                raise
            except EngineInputError:
                raise
            except (EngineError, OSError) as error:
                failed[replica] = error
                self._pool.record_error(replica, error, silent_since, rest)
                if has_begun and isinstance(error, EngineOutputError):
                    # Tokens that it yielded before are not to be continued.
                    self._pool.avoid_next_time(replica, session)
                    raise
            finally:
                replica.running.discard(stream)
                await stream.aclose()

    async def add(self, engine: Engine) -> None:
        """Adds a replica, paused if the others are. With another version than theirs it is stale."""
        async with self._update_lock:
            self._validate(engine)
            if self._paused:
                await engine.pause()
            self._register(engine).paused = self._paused

    async def remove(self, name: str) -> None:
        """Removes and closes a replica; its sessions move, and its calls continue on other replicas."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            raise InputError(f"replica: got {name!r}, expected one of {', '.join(self._replicas) or 'none'}")
        if replica.check is not None:
            replica.check.cancel()
        try:
            # Before its streams are cancelled: closing an engine may yield tokens that have arrived.
            await replica.engine.close()
        finally:
            replica.cancel_streams()

    def release_session(self, session: str) -> None:
        """Drops the placement of a session that has ended."""
        self._pool.release_session(session)

    async def ready(self) -> None:
        """Returns if a replica is ready; others are excluded. Raises EngineError if none is."""
        replicas = list(self._replicas.values())
        failed = await _for_each_replica(replicas, lambda engine: engine.ready())
        for replica, error in failed.items():
            if not isinstance(error, EngineError | OSError) or len(failed) == len(replicas):
                raise error
            replica.is_ready = False
            self._pool.exclude(replica, error)

    async def pause(self) -> None:
        """Pauses all replicas; those that fail become stale. Raises EngineError, and changes none, if all in
        use fail."""
        async with self._update_lock:
            self._paused = True
            replicas = list(self._replicas.values())
            failed = await _for_each_replica(replicas, lambda engine: engine.pause())
            for replica in replicas:
                replica.paused = replica not in failed
            in_use = [replica for replica in replicas if not replica.stale] or replicas
            if in_use and all(replica in failed for replica in in_use):
                raise self._all_failed_error("pause", failed)
            for replica in failed:
                replica.mark_stale()

    async def resume(self, version: int | None = None) -> None:
        """Resumes the paused replicas; those that fail become stale. Raises EngineError if all fail; then all
        stay paused.

        Replicas that missed the pause are not resumed: their weights are unknown.
        """
        async with self._update_lock:
            targets = [replica for replica in self._replicas.values() if replica.paused or not replica.stale]
            failed = await _for_each_replica(targets, lambda engine: engine.resume(version))
            resumed = [replica for replica in targets if replica not in failed]
            if version is None:
                # No replica has new weights, so a stale one stays stale.
                in_use = [replica.engine.version for replica in resumed if not replica.stale]
                version = max(in_use, default=self.version)
            current = [replica for replica in resumed if replica.engine.version == version]
            if self._replicas and not current:
                raise self._all_failed_error("resume", failed)
            self._paused = False
            for replica in resumed:
                replica.paused, replica.stale = False, replica not in current
            for replica in failed:
                replica.mark_stale()

    async def close(self) -> None:
        for replica in self._replicas.values():
            if replica.check is not None:
                replica.check.cancel()
        closing = [replica.engine.close() for replica in self._replicas.values()]
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        raise_errors(
            f"{self.name}: replicas could not be closed", [one for one in outcomes if one is not None]
        )

    def _validate(self, engine: Engine) -> None:
        if engine.name in self._replicas:
            raise InputError(f"replica: got {engine.name!r}, expected a name that is not in use already")
        if self._replicas and engine.logprob_kind != self.logprob_kind:
            raise InputError(
                f"replica {engine.name!r}: got {engine.logprob_kind} logprobs, expected {self.logprob_kind}"
            )

    def _register(self, engine: Engine) -> Replica:
        is_stale = bool(self._replicas) and engine.version != self.version
        replica = self._replicas[engine.name] = Replica(engine, stale=is_stale)
        return replica

    def _all_failed_error(self, action: str, failed: dict[Replica, BaseException]) -> EngineError:
        cause = next(iter(failed.values()), None)
        error = EngineError(
            f"{self.name}: {action} failed on all replicas: {cause or 'all missed the pause'}"
        )
        error.__cause__ = cause
        return error


async def _for_each_replica(
    replicas: Sequence[Replica], action: Callable[[Engine], Coroutine[Any, Any, None]]
) -> dict[Replica, BaseException]:
    """Runs the action on every replica; returns those that failed, with their errors."""
    outcomes = await asyncio.gather(*[action(replica.engine) for replica in replicas], return_exceptions=True)
    return {replica: error for replica, error in zip(replicas, outcomes, strict=True) if error is not None}
