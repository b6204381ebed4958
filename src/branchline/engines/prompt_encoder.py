"""Prompts as servers take them: ids as JSON, of which only what is new is written.

The next prompt of a session mostly begins with its last one, and at 100,000 tokens writing all of it takes
milliseconds.
"""

from __future__ import annotations

import msgspec
import numpy as np

from branchline.core.cache import ByteLimitedCache
from branchline.core.token_arrays import Ids

_MAX_CACHE_BYTES = 64 * 2**20


class PromptEncoder:
    """Writes the prompts of many sessions.

    >>> writer = PromptEncoder()
    >>> writer.encode(np.array([1, 2], np.int32), "s"), writer.encode(np.array([1, 2, 3], np.int32), "s")
    (b'[1,2]', b'[1,2,3]')
    """

    def __init__(self, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        self._cache: ByteLimitedCache[tuple[Ids, bytes]] = ByteLimitedCache(
            max_bytes, lambda entry: entry[0].nbytes + len(entry[1]) + 200
        )

    def encode(self, ids: Ids, session: str = "") -> bytes:
        """The ids as JSON; those of a named session are remembered for its next prompt."""
        written = self._extend_cached(ids, session) if session else None
        if written is None:
            written = msgspec.json.encode(ids.tolist())
        if session:
            self._cache.put(session, (ids, written))
        return written

    def _extend_cached(self, ids: Ids, session: str) -> bytes | None:
        """Behind the session's last prompt, where this one begins with it."""
        known = self._cache.get(session)
        if known is None:
            return None
        before, written = known
        count = len(before)
        if not count or not np.array_equal(ids[:count], before):
            return None
        if len(ids) == count:
            return written
        return b"%b,%b" % (written[:-1], msgspec.json.encode(ids[count:].tolist())[1:])
