"""Encodes prompts as JSON lists of ids; of a known session only the ids that are new are encoded.

The next prompt of a session mostly begins with its last one, and at 100,000 ids encoding all of it takes
milliseconds.
"""

from __future__ import annotations

import msgspec
import numpy as np

from branchline.core.cache import ByteLimitedCache
from branchline.core.token_arrays import Ids

_MAX_CACHE_BYTES = 64 * 2**20


class PromptEncoder:
    """Encodes the prompts of many sessions.

    >>> encoder = PromptEncoder()
    >>> encoder.encode(np.array([1, 2], np.int32), "s"), encoder.encode(np.array([1, 2, 3], np.int32), "s")
    (b'[1,2]', b'[1,2,3]')
    """

    def __init__(self, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        self._cache: ByteLimitedCache[tuple[Ids, bytes]] = ByteLimitedCache(
            max_bytes, lambda entry: entry[0].nbytes + len(entry[1]) + 200
        )

    def encode(self, ids: Ids, session: str = "") -> bytes:
        """Returns the ids as JSON, and caches them for the session's next prompt if it has a name."""
        encoded = self._extend_cached(ids, session) if session else None
        if encoded is None:
            encoded = msgspec.json.encode(ids.tolist())
        if session:
            self._cache.put(session, (ids, encoded))
        return encoded

    def _extend_cached(self, ids: Ids, session: str) -> bytes | None:
        """Returns the session's last prompt extended to `ids`; None if `ids` do not begin with it."""
        cached = self._cache.get(session)
        if cached is None:
            return None
        cached_ids, encoded = cached
        count = len(cached_ids)
        if not count or not np.array_equal(ids[:count], cached_ids):
            return None
        if len(ids) == count:
            return encoded
        return b"%b,%b" % (encoded[:-1], msgspec.json.encode(ids[count:].tolist())[1:])
