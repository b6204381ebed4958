"""Enforces the limit of a session on the tokens that it may sample.

Calls of a session run concurrently. So the tokens that a call may sample are reserved before it samples: all
calls together never exceed the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from branchline.core.errors import SessionError
from branchline.engines.base import Chunk
from branchline.runtime.call_record import CallRequest
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT


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
