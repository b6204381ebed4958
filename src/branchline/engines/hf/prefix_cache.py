"""Keys and values of ended sequences, kept for the next request that begins with the same ids and images.

Invariant: an entry's keys and values were computed under the current weights, for exactly its ids and images;
among the ids, the placeholders of each image have a number of its own. The bytes
of all entries stay within the limit; the least recently used entry is evicted first. A prefix of a longer
entry is not kept, so a growing conversation is one entry.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Entries in order of use, the least recently used first."""

    def __init__(self, limit_bytes: int, token_bytes: int) -> None:
        self._limit = limit_bytes // token_bytes
        self._entries: list[CachedPrefix] = []
        self.evictions = 0
        """Number of entries dropped to stay within the limit."""

    @property
    def token_count(self) -> int:
        return sum(len(entry.ids) for entry in self._entries)

    def find_longest(self, ids: PrefixKeys) -> tuple[int, CachedPrefix | None]:
        """The entry with the longest common prefix with `ids`, and the length of that prefix."""
        best, found = 0, None
        for entry in self._entries:
            if (size := common_prefix_length(ids, entry.ids)) > best:
                best, found = size, entry
        return best, found

    def touch(self, entry: CachedPrefix) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def add(self, ids: PrefixKeys, read: Callable[[], KeysValues]) -> None:
        """Adds a sequence; `read` copies its keys and values and is called only if it is kept."""
        size, covering = self.find_longest(ids)
        if covering is not None and size == len(ids):
            self.touch(covering)
            return
        if not 0 < len(ids) <= self._limit:
            return
        self._entries = [
            entry for entry in self._entries if common_prefix_length(entry.ids, ids) < len(entry.ids)
        ]
        while self.token_count > self._limit - len(ids):
            del self._entries[0]
            self.evictions += 1
        self._entries.append(CachedPrefix(ids.copy(), read()))

    def clear(self) -> None:
        self._entries.clear()
