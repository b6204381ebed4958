"""Placement and health of replicas: which one serves a call, and which faults count against it.

Faults of a replica exclude it: its server cannot be reached, is silent, or fails a check. An error that
answers a request may be the request's fault, so it only starts a check: a few tokens, sampled in the
background.
An excluded replica is checked from time to time and used again when a check succeeds. Each session has a
home, to which it returns then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from branchline.core.errors import (
    EngineBusyError,
    EngineError,
    EngineInputError,
    EngineUnavailableError,
)
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, Engine, SamplingParams

log = logging.getLogger("branchline.engines")

# The least recently used session beyond this number gets a new replica on its next call, at a prefill's cost.
MAX_STICKY_SESSIONS = 100_000
CHECK_TOKENS = 8
SUSPICIOUS_SILENCE_S = 1.0
"""A caller that disconnects after a shorter wait does not count against the replica."""


class CancellableStream:
    """A stream that is read in its consumer's task, and that other code can end while the consumer waits.

    `cancel` cancels the wait and not the task: to the consumer the stream has ended. A stream that ends
    without a finish reason and without `cancel` raises EngineError.
    """

    def __init__(self, stream: AsyncGenerator[Chunk, None]) -> None:
        self._stream = stream
        self._is_cancelled = self._is_finished = False
        self._waiting_task: asyncio.Task[Any] | None = None
        self._cancelled_task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Ends the stream after the chunks it has yielded; its consumer closes it."""
        if not self._is_cancelled:
            self._is_cancelled, self._cancelled_task = True, self._waiting_task
            if self._cancelled_task is not None:
                self._cancelled_task.cancel()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> CancellableStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_cancelled:
            raise StopAsyncIteration
        self._waiting_task = task = asyncio.current_task()
        assert task is not None, "streams are read in tasks"
        cancelling = task.cancelling()
        try:
            chunk = await anext(self._stream)
        except StopAsyncIteration:
            if not self._is_finished:
                raise EngineError("the stream ended before its generation did") from None
            raise
        except asyncio.CancelledError:
            # The stream ends, unless the consumer's task was cancelled as well.
            if self._cancelled_task is not None and task.cancelling() <= cancelling + 1:
                raise StopAsyncIteration from None
            raise
        finally:
            self._waiting_task = None
            if self._cancelled_task is not None:
                self._cancelled_task.uncancel()
        self._is_finished = chunk.finish_reason is not None
        return chunk


@dataclass(eq=False)
class Replica:
    """One engine and its state."""

    engine: Engine
    running: set[CancellableStream] = field(default_factory=set)
    session_count: int = 0
    """Sessions that are placed here now, at home or not."""
    excluded: bool = False
    """After a fault, calls go to other replicas, if there are any, until a check succeeds."""
    is_ready: bool = True
    """False if `ready` failed: then a check begins with it."""
    check: asyncio.Task[None] | None = None
    """The running check."""
    next_check: float = 0.0
    """No check begins before this time."""
    last_chunk_at: float = -math.inf
    """When it last yielded a chunk, to any call."""
    stale: bool = False
    """Its weights may differ from those of the others."""
    paused: bool = False
    """It was paused and has not been resumed."""

    def mark_stale(self) -> None:
        """Marks its weights as unknown and moves its calls to other replicas."""
        self.stale = True
        self.cancel_streams()

    def cancel_streams(self) -> None:
        for stream in self.running:
            stream.cancel()


@dataclass(eq=False, slots=True)
class Placement:
    """Where a session is."""

    home: Replica
    """The replica that it returns to."""
    current: Replica
    avoided: Replica | None = None
    """Not used for the next call, because the last one got no valid answer there."""


class ReplicaPool:
    """The replicas of one engine, and the placement of sessions on them."""

    def __init__(self, name: str, retry_after_s: float, clock: Callable[[], float]) -> None:
        self.name = name
        self.retry_after_s = retry_after_s
        """Time between two checks of a replica."""
        self.clock = clock
        self.replicas: dict[str, Replica] = {}
        self._placements: OrderedDict[str, Placement] = OrderedDict()

    # -- placement -----------------------------------------------------------------------------------

    def select(
        self,
        session: str,
        failed: dict[Replica, Exception],
        avoided: Replica | None,
        request: tuple[Ids, SamplingParams],
    ) -> Replica:
        """Returns the session's home, or where it is meanwhile, or the replica with the fewest calls, then
        the fewest sessions. Excluded replicas, and the one to avoid, are used only if there are no others.

        Raises EngineError if all replicas have failed or are stale.
        """
        usable = [replica for replica in self.replicas.values() if not replica.stale]
        for replica in usable:
            if replica.excluded:
                self._start_check(replica, request)
        usable = [replica for replica in usable if replica not in failed]
        placement = self._placements.get(session)
        if not usable:
            if placement is not None:
                self._place(placement, placement.home)
            raise self._no_replica_error(failed)
        usable = [replica for replica in usable if not replica.excluded] or usable
        usable = [replica for replica in usable if replica is not avoided] or usable
        if placement is not None:
            self._placements.move_to_end(session)
            for replica in (placement.home, placement.current):
                if replica in usable:
                    return self._place(placement, replica)
        selected = min(usable, key=lambda replica: (len(replica.running), replica.session_count))
        if placement is not None:
            if placement.home.engine.name not in self.replicas:
                placement.home = selected
            return self._place(placement, selected)
        if session:
            self._placements[session] = Placement(selected, selected)
            selected.session_count += 1
            if len(self._placements) > MAX_STICKY_SESSIONS:
                self.release_session(next(iter(self._placements)))
        return selected

    def release_session(self, session: str) -> None:
        """Drops the placement of a session that has ended."""
        placement = self._placements.pop(session, None)
        if placement is not None:
            placement.current.session_count -= 1

    def _place(self, placement: Placement, replica: Replica) -> Replica:
        placement.current.session_count -= 1
        replica.session_count += 1
        placement.current = replica
        return replica

    def pop_avoided(self, session: str) -> Replica | None:
        """Returns the replica that the session's next call must avoid, for this call only."""
        placement = self._placements.get(session)
        if placement is None:
            return None
        avoided, placement.avoided = placement.avoided, None
        return avoided

    def avoid_next_time(self, replica: Replica, session: str) -> None:
        if (placement := self._placements.get(session)) is not None:
            placement.avoided = replica

    # -- health --------------------------------------------------------------------------------------

    def record_error(
        self,
        replica: Replica,
        error: Exception,
        silent_since: float,
        request: tuple[Ids, SamplingParams],
    ) -> None:
        """Excludes the replica if it is at fault, and checks it if the request may be."""
        if isinstance(error, EngineBusyError) or self.replicas.get(replica.engine.name) is not replica:
            return  # A replica that was removed has been closed.
        if not isinstance(error, EngineUnavailableError | OSError):
            self._start_check(replica, request)
        elif not getattr(error, "timed_out", False):
            self.exclude(replica, error)
        elif replica.last_chunk_at <= silent_since:
            # No call got a token, so the others would time out too.
            self.exclude(replica, error)
            replica.cancel_streams()

    def record_disconnect(
        self, replica: Replica, session: str, silent_since: float, request: tuple[Ids, SamplingParams]
    ) -> None:
        """Records that a caller was cancelled while it waited. Its session's next call goes elsewhere. If no
        other call got a token in that time, the replica is excluded, and checked at once."""
        if self.clock() - silent_since < SUSPICIOUS_SILENCE_S:
            return
        self.avoid_next_time(replica, session)
        if replica.last_chunk_at <= silent_since:
            self.exclude(replica, "silent when its caller disconnected", check_after_s=0)
            self._start_check(replica, request)

    def exclude(
        self, replica: Replica, reason: BaseException | str, *, check_after_s: float | None = None
    ) -> None:
        if not replica.excluded:
            log.warning("replica %s is excluded until a check succeeds: %s", replica.engine.name, reason)
        replica.excluded = True
        replica.next_check = self.clock() + (self.retry_after_s if check_after_s is None else check_after_s)

    def include(self, replica: Replica) -> None:
        if replica.excluded:
            log.warning("replica %s is used again", replica.engine.name)
        replica.excluded = False

    def _start_check(self, replica: Replica, request: tuple[Ids, SamplingParams]) -> None:
        """Starts a check, unless one is running or ended less than `retry_after_s` ago."""
        if replica.check is None and self.clock() >= replica.next_check:
            replica.next_check = self.clock() + self.retry_after_s
            replica.check = asyncio.create_task(self._check(replica, *request))

    async def _check(self, replica: Replica, prompt_ids: Ids, params: SamplingParams) -> None:
        """Samples a few tokens after the first id of a prompt; excludes the replica if that fails."""
        params = SamplingParams(max_tokens=CHECK_TOKENS, vocab_size=params.vocab_size)
        try:
            if not replica.is_ready:
                await replica.engine.ready()
                replica.is_ready = True
            async with aclosing(replica.engine.generate(prompt_ids[:1], params)) as chunks:
                async for _ in chunks:
                    pass
        except (EngineBusyError, EngineInputError):
            self.include(replica)  # Its server answers.
        except (EngineError, OSError) as error:
            self.exclude(replica, error)
        else:
            self.include(replica)
        finally:
            replica.check = None

    def _no_replica_error(self, failed: dict[Replica, Exception]) -> EngineError:
        """The error of a call that no replica can serve: if one is busy, later it may."""
        causes = list(reversed(failed.values()))
        cause = next(
            (error for error in causes if isinstance(error, EngineBusyError)), next(iter(causes), None)
        )
        message = f"{self.name}: no usable replica" + (f": {cause}" if cause else "")
        error = EngineError(message)
        if isinstance(cause, EngineBusyError):
            error = EngineBusyError(message, cause.retry_after, is_overloaded=cause.is_overloaded)
        error.__cause__ = cause
        return error
