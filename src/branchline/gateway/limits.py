"""What a session's limits leave to a call: how many calls it may make, and how many tokens they may sample.

Calls run side by side, so a call counts from its beginning, and what it may sample is reserved for it before
it samples: together they never have more than the session does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from branchline.core.errors import SessionError
from branchline.engines.base import Chunk
from branchline.gateway.config import ROOM_LEFT, UNKNOWN_ROOM
from branchline.gateway.live import LiveSession
from branchline.gateway.record import CallRecord

if TYPE_CHECKING:
    from branchline.gateway.calls import Asked


@contextmanager
def under_way(live: LiveSession, asked: Asked, record: CallRecord) -> Iterator[None]:
    """A call until its answer is sampled. It counts at once, for others may come beside it."""
    live.require_open()
    limits, resumes = live.options.limits, asked.request.resumes
    if limits.calls is not None and _calls_beside(live, resumes) >= limits.calls:
        raise SessionError(
            "out_of_calls", f"session {live.id} may make {limits.calls} calls and has made them"
        )
    if resumes in live.resuming:
        raise SessionError("conflict", f"resume: call {resumes} is being resumed already")
    if resumes:
        live.resuming.add(resumes)
    over = live.running[record.call_id] = asyncio.Event()
    live.in_flight += 1
    live.last_used = time.monotonic()
    try:
        yield
    finally:
        live.in_flight -= 1
        live.last_used = time.monotonic()
        live.resuming.discard(resumes)
        del live.running[record.call_id]
        over.set()


def _calls_beside(live: LiveSession, resumes: str) -> int:
    """Calls that were made or are under way beside one that resumes another: the two count as one."""
    tree, continued = live.session.tree, {*live.resuming, resumes}
    made = [call for call in tree.calls if call.id not in continued and not tree.is_resumed(call)]
    return len(made) + live.in_flight - (resumes in live.running)


@contextmanager
def reserved(live: LiveSession, asked: Asked, room: int, before: Sequence[Chunk] = ()) -> Iterator[int]:
    """A call while it may sample: nobody else gets the tokens that a session with a limit has left for it.

    `room` is what an answer could have, were there no limit. Gives how many tokens each of them may have,
    with those that were there `before`: the session has counted these, so only the rest is reserved.
    """
    most, begun, rest = live.options.limits.tokens, sum([len(chunk.ids) for chunk in before]), 0
    if most is not None:
        is_over = bool(before) and before[-1].finish is not None
        rest = 0 if is_over else _rest(live, asked, most, room - begun, is_begun=begun > 0)
        room = min(room, begun + rest)
    live.reserved_tokens += rest * asked.choices
    try:
        yield room
    finally:
        live.reserved_tokens -= rest * asked.choices


def _rest(live: LiveSession, asked: Asked, most: int, wanted: int, *, is_begun: bool) -> int:
    """How many more tokens each answer may have in a session that may sample so many."""
    left = most - live.sampled_tokens
    if left <= 0:
        if is_begun:
            # It ends where it stands, as it would have had nobody cut it off.
            return 0
        raise SessionError(
            "out_of_tokens", f"session {live.id} may sample {most} tokens and has sampled them"
        )
    free = (left - live.reserved_tokens) // asked.choices
    if free <= 0 < wanted:
        if live.reserved_tokens:
            raise SessionError(
                "busy",
                f"session {live.id} may sample {most} tokens, and calls under way have what is left of them;"
                " try again in a moment",
            )
        raise SessionError(
            "out_of_tokens",
            f"session {live.id} may sample {most} tokens; {left} are left, too few for n={asked.choices}",
        )
    if asked.params.max_tokens == ROOM_LEFT:
        # Who does not say how much must not take all of it from those that come beside it.
        wanted = min(wanted, max(UNKNOWN_ROOM, free // 2))
    return max(0, min(free, wanted))
