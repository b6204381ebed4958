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
from branchline.runtime.call_record import CallRecord
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT

if TYPE_CHECKING:
    from branchline.runtime.call_lifecycle import CallRequest


@contextmanager
def count_call(live: ManagedSession, asked: CallRequest, record: CallRecord) -> Iterator[None]:
    """A call until its answer is sampled. It counts at once, for others may come beside it."""
    live.require_open()
    limits, resumes = live.options.limits, asked.request.resume_call_id
    if limits.calls is not None and _count_other_calls(live, resumes) >= limits.calls:
        raise SessionError(
            "out_of_calls", f"session {live.id} may make {limits.calls} calls and has made them"
        )
    if resumes in live.resuming_call_ids:
        raise SessionError("conflict", f"resume: call {resumes} is being resumed already")
    if resumes:
        live.resuming_call_ids.add(resumes)
    over = live.running_calls[record.call_id] = asyncio.Event()
    live.in_flight += 1
    live.last_used = time.monotonic()
    try:
        yield
    finally:
        live.in_flight -= 1
        live.last_used = time.monotonic()
        live.resuming_call_ids.discard(resumes)
        del live.running_calls[record.call_id]
        over.set()


def _count_other_calls(live: ManagedSession, resumes: str) -> int:
    """Calls that were made or are under way beside one that resumes another: the two count as one."""
    tree, continued = live.session.tree, {*live.resuming_call_ids, resumes}
    made = [call for call in tree.calls if call.id not in continued and not tree.is_resumed(call)]
    return len(made) + live.in_flight - (resumes in live.running_calls)


@contextmanager
def reserve_tokens(
    live: ManagedSession, asked: CallRequest, room: int, before: Sequence[Chunk] = ()
) -> Iterator[int]:
    """A call while it may sample: nobody else gets the tokens that a session with a limit has left for it.

    `room` is what an answer could have, were there no limit. Gives how many tokens each of them may have,
    with those that were there `before`: the session has counted these, so only the rest is reserved.
    """
    most, begun, rest = live.options.limits.tokens, sum([len(chunk.ids) for chunk in before]), 0
    if most is not None:
        is_over = bool(before) and before[-1].finish_reason is not None
        rest = 0 if is_over else _tokens_to_reserve(live, asked, most, room - begun, is_begun=begun > 0)
        room = min(room, begun + rest)
    live.reserved_tokens += rest * asked.n
    try:
        yield room
    finally:
        live.reserved_tokens -= rest * asked.n


def _tokens_to_reserve(
    live: ManagedSession, asked: CallRequest, most: int, wanted: int, *, is_begun: bool
) -> int:
    """How many more tokens each answer may have in a session that may sample so many."""
    left = most - live.sampled_tokens
    if left <= 0:
        if is_begun:
            # It ends where it stands, as it would have had nobody cut it off.
            return 0
        raise SessionError(
            "out_of_tokens", f"session {live.id} may sample {most} tokens and has sampled them"
        )
    free = (left - live.reserved_tokens) // asked.n
    if free <= 0 < wanted:
        if live.reserved_tokens:
            raise SessionError(
                "busy",
                f"session {live.id} may sample {most} tokens, and calls under way have what is left of them;"
                " try again in a moment",
            )
        raise SessionError(
            "out_of_tokens",
            f"session {live.id} may sample {most} tokens; {left} are left, too few for n={asked.n}",
        )
    if asked.params.max_tokens == NO_LIMIT:
        # Who does not say how much must not take all of it from those that come beside it.
        wanted = min(wanted, max(FALLBACK_MAX_TOKENS, free // 2))
    return max(0, min(free, wanted))
