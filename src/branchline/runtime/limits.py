"""Enforces the limits of a session: how many calls it may make and how many tokens it may sample.

Calls of a session run concurrently. So a call counts from its start, and the tokens it may sample are
reserved before it samples: all calls together never exceed the session's limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from branchline.core.errors import SessionError
from branchline.engines.base import Chunk
from branchline.runtime.call_record import CallRequest
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT


@contextmanager
def count_call(managed: ManagedSession, call_id: str, resumes: str = "") -> Iterator[None]:
    """Counts a call as running. `resumes` is the id of the cancelled call that it continues.

    Raises SessionError if the session is closed, has made all its calls, or `resumes` is being resumed.
    """
    managed.require_open()
    limit = managed.options.limits.calls
    if limit is not None and _count_other_calls(managed, resumes) >= limit:
        raise SessionError("out_of_calls", f"session {managed.id} may make {limit} calls and has made them")
    if resumes in managed.resuming_call_ids:
        raise SessionError("conflict", f"resume: call {resumes} is being resumed already")
    if resumes:
        managed.resuming_call_ids.add(resumes)
    ended = managed.running_calls[call_id] = asyncio.Event()
    managed.in_flight += 1
    managed.last_used = time.monotonic()
    try:
        yield
    finally:
        managed.in_flight -= 1
        managed.last_used = time.monotonic()
        managed.resuming_call_ids.discard(resumes)
        del managed.running_calls[call_id]
        ended.set()


def _count_other_calls(managed: ManagedSession, resumes: str) -> int:
    """Calls that were made or are running. A cancelled call and the call that resumes it count as one."""
    tree, continued = managed.session.tree, {*managed.resuming_call_ids, resumes}
    made = [call for call in tree.calls if call.id not in continued and not tree.is_resumed(call)]
    return len(made) + managed.in_flight - (resumes in managed.running_calls)


@contextmanager
def reserve_tokens(
    managed: ManagedSession, call_request: CallRequest, max_tokens: int, partial: Sequence[Chunk] = ()
) -> Iterator[int]:
    """Reserves tokens for a call and yields how many each of its answers may have, `partial` included.

    `max_tokens` is what an answer may have by its request and its engine. `partial` is what a resumed call
    sampled already: these tokens are counted in the tree, so only the rest is reserved.
    """
    limit, begun, reserved = managed.options.limits.tokens, sum([len(chunk.ids) for chunk in partial]), 0
    if limit is not None:
        is_finished = bool(partial) and partial[-1].finish_reason is not None
        if not is_finished:
            reserved = _tokens_to_reserve(
                managed, call_request, limit, max_tokens - begun, is_begun=begun > 0
            )
        max_tokens = min(max_tokens, begun + reserved)
    managed.reserved_tokens += reserved * call_request.n
    try:
        yield max_tokens
    finally:
        managed.reserved_tokens -= reserved * call_request.n


def _tokens_to_reserve(
    managed: ManagedSession, call_request: CallRequest, limit: int, max_tokens: int, *, is_begun: bool
) -> int:
    """How many further tokens each answer may have in a session with a limit."""
    left, n = limit - managed.sampled_tokens, call_request.n
    if left <= 0:
        if is_begun:
            # The resumed answer ends here, as it would have without the interruption.
            return 0
        raise SessionError(
            "out_of_tokens", f"session {managed.id} may sample {limit} tokens and has sampled them"
        )
    free = (left - managed.reserved_tokens) // n
    if free <= 0 < max_tokens:
        if managed.reserved_tokens:
            raise SessionError(
                "busy",
                f"session {managed.id} may sample {limit} tokens, and running calls have reserved the rest;"
                " try again in a moment",
            )
        raise SessionError(
            "out_of_tokens",
            f"session {managed.id} may sample {limit} tokens; {left} are left, too few for n={n}",
        )
    if call_request.params.max_tokens == NO_LIMIT:
        # A call without a limit of its own must leave tokens to concurrent calls.
        max_tokens = min(max_tokens, max(FALLBACK_MAX_TOKENS, free // 2))
    return max(0, min(free, max_tokens))
