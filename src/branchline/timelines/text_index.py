"""Finds which of many texts a text contains, in time that does not depend on how many there are.

Texts are compared as UTF-8, in which one text contains another exactly if its bytes do. A pattern is found by
its first bytes: their hash is compared with that of every position of the text. A hit is confirmed by
comparing the whole pattern, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_WINDOW = 16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FILTER_BITS = 16
_FEW_PATTERNS = 8
"""Up to this number, searching for one pattern after the other is faster."""


class TextIndex:
    """Patterns of at least 16 bytes, or of at least 8 with `short`."""

    def __init__(self, patterns: Iterable[bytes], *, short: bool = False) -> None:
        self._window = _WINDOW // 2 if short else _WINDOW
        self._patterns = frozenset(patterns)
        self._by_hash: dict[int, dict[int, set[bytes]]] = {}
        """The patterns by the hash of their first bytes and by their length."""
        self._filter = np.zeros(1 << _FILTER_BITS, np.bool_)
        for pattern in self._patterns if len(self._patterns) > _FEW_PATTERNS else ():
            code = self._hashes(pattern[: self._window])[0]
            by_length = self._by_hash.setdefault(int(code), {})
            by_length.setdefault(len(pattern), set()).add(pattern)
            self._filter[int(code) >> (64 - _FILTER_BITS)] = True

    def find(self, text: bytes) -> set[bytes]:
        """Returns the patterns that a text contains."""
        if len(self._patterns) <= _FEW_PATTERNS:
            return {pattern for pattern in self._patterns if pattern in text}
        if len(text) < self._window:
            return set()
        codes = self._hashes(text)
        found: set[bytes] = set()
        positions = np.flatnonzero(self._filter[codes >> np.uint64(64 - _FILTER_BITS)])
        for position, code in zip(positions.tolist(), codes[positions].tolist(), strict=True):
            for length, patterns in self._by_hash.get(code, {}).items():
                part = text[position : position + length]
                if part in patterns:
                    found.add(part)
        return found

    def _hashes(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Returns a hash of the window at every position."""
        # Every position as one integer of 8 bytes, without a copy.
        codes = np.ndarray((len(text) - 7,), "<u8", text, 0, (1,)) * _MULTIPLIER
        if self._window == _WINDOW:
            codes = (codes[:-8] ^ (codes[8:] >> np.uint64(29))) * _MULTIPLIER + codes[8:]
        return codes
