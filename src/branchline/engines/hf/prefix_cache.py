"""Keys and values of ended sequences, kept for the next request that begins with the same ids and images.

Invariant: an entry's keys and values were computed under the current weights, for exactly its ids and images;
among the ids, the placeholders of each image have a number of its own. The bytes
of all entries stay within the limit; the least recently used entry is evicted first. A prefix of a longer
entry is not kept, so a growing conversation is one entry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PrefixKeys = NDArray[np.integer[Any]]
"""Ids, with another number for each placeholder of an image (`vision.prefix_keys`)."""
KeysValues = list[tuple[Tensor, Tensor]]
"""One pair for each layer, each [heads, tokens, dim]."""


def common_prefix_length(left: PrefixKeys, right: PrefixKeys) -> int:
    """The length of the common prefix of two sequences.

    >>> from branchline.core.token_arrays import as_ids
    >>> common_prefix_length(as_ids([1, 2, 3]), as_ids([1, 2, 4, 5]))
    2
    """
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    ids: PrefixKeys
    kv: KeysValues


class PrefixCache:
    """Cached sequences. They are also kept sorted: the one with the longest common prefix is a neighbour."""

    def __init__(self, limit_bytes: int, token_bytes: int) -> None:
        self._limit = limit_bytes // token_bytes
        self._by_key: OrderedDict[bytes, CachedPrefix] = OrderedDict()
        """In order of use, the least recently used first."""
        self._sorted_keys: list[bytes] = []
        self.token_count = 0
        self.evictions = 0
        """Number of entries dropped to stay within the limit."""

    @property
    def entries(self) -> Collection[CachedPrefix]:
        return self._by_key.values()

    def find_longest(self, ids: PrefixKeys) -> tuple[int, CachedPrefix | None]:
        """The entry with the longest common prefix with `ids`, and the length of that prefix."""
        place = bisect_left(self._sorted_keys, _sort_key(ids))
        best, found = 0, None
        for key in self._sorted_keys[max(place - 1, 0) : place + 1]:
            entry = self._by_key[key]
            if (size := common_prefix_length(ids, entry.ids)) > best:
                best, found = size, entry
        return best, found

    def touch(self, entry: CachedPrefix) -> None:
        self._by_key.move_to_end(_sort_key(entry.ids))

    def add(self, ids: PrefixKeys, read: Callable[[], KeysValues]) -> None:
        """Adds a sequence; `read` copies its keys and values and is called only if it is kept."""
        size, covering = self.find_longest(ids)
        if covering is not None and size == len(ids):
            self.touch(covering)
            return
        if not 0 < len(ids) <= self._limit:
            return
        key = _sort_key(ids)
        place = bisect_left(self._sorted_keys, key)
        # No entry is a prefix of another one, so a prefix of the new one is the entry before it.
        if place and key.startswith(self._sorted_keys[place - 1]):
            self._drop(self._sorted_keys[place - 1])
        while self.token_count > self._limit - len(ids):
            self._drop(next(iter(self._by_key)))
            self.evictions += 1
        insort(self._sorted_keys, key)
        self._by_key[key] = CachedPrefix(ids.copy(), read())
        self.token_count += len(ids)

    def clear(self) -> None:
        self._by_key.clear()
        self._sorted_keys.clear()
        self.token_count = 0

    def _drop(self, key: bytes) -> None:
        self.token_count -= len(self._by_key.pop(key).ids)
        del self._sorted_keys[bisect_left(self._sorted_keys, key)]


def _sort_key(ids: PrefixKeys) -> bytes:
    """Bytes that have a common prefix exactly as far as the ids do; all ids take the same number of bytes."""
    return ids.astype(">i8").tobytes()
