"""An LRU cache with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteLimitedCache(Generic[Value]):
    """Keeps the most recently used values up to `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[object, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def get(self, key: object) -> Value | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: object, value: Value, size: int) -> None:
        """Stores a value that takes `size` bytes, and drops the least recently used ones over the limit."""
        with self._lock:
            _, old_size = self._entries.pop(key, (None, 0))
            self._entries[key] = (value, size)
            self.bytes += size - old_size
            while self.bytes > self._max_bytes and len(self._entries) > 1:
                _, (_, dropped_size) = self._entries.popitem(last=False)
                self.bytes -= dropped_size

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)
