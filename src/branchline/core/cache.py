"""An LRU cache with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteLimitedCache(Generic[Value]):
    """Keeps the most recently used values up to `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[object, Value] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def get(self, key: object) -> Value | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: object, value: Value) -> None:
        with self._lock:
            old = self._values.pop(key, None)
            if old is not None:
                self.bytes -= self._size_of(old)
            self._values[key] = value
            self.bytes += self._size_of(value)
            while self.bytes > self._max_bytes and len(self._values) > 1:
                _, dropped = self._values.popitem(last=False)
                self.bytes -= self._size_of(dropped)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)
