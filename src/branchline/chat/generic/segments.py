"""Encodes text piece by piece: what stands between two added tokens is encoded once and remembered.

A tokenizer splits a text at its added tokens (`<|im_end|>`) before anything else, so the ids of a text are
the ids of its segments laid end to end. System prompts and tool lists are long segments that come back in
every session: they cost a look-up. Where a tokenizer does not work like that, whole texts are encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from branchline.chat.generic.words import WordEncoder
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.cache import SizedCache
from branchline.core.errors import CodecError
from branchline.core.fields import clean
from branchline.core.runs import NO_IDS, Ids

_CACHE_BYTES = 64 * 1024 * 1024
_SAFETY_PROBES = ("a", " a", "\n\nA b", "  \n", "é中🙂", '{"a": [1, 2]}', "x\n")


class SegmentEncoder:
    """Text to ids through a cache of segments."""

    def __init__(self, tokenizer: TokenizerDir, cache_bytes: int = _CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._id_of = dict(tokenizer.added_tokens)
        # Longest first: `<|im_start|>` must not be read as a shorter token it begins with.
        names = sorted(self._id_of, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")
        self._cache: SizedCache[tuple[str, Ids]] = SizedCache(
            cache_bytes, lambda entry: 4 * len(entry[1]) + len(entry[0]) + 200
        )
        self._words = WordEncoder.of(tokenizer.word_pattern, tokenizer.encode_all, tokenizer.word_ends)
        self._lengths = np.full(tokenizer.vocab_size, -1, np.int32)
        self.encoded_tokens = 0
        """Tokens that really were encoded; the rest came from the cache."""
        self.is_segmentwise = True
        self.is_segmentwise = self._check_segments()
        if not self.is_segmentwise:
            self._words = None

    @property
    def marker_ids(self) -> list[int]:
        """Added tokens that say something; some vocabularies add runs of spaces and newlines too."""
        return [token for name, token in self._id_of.items() if name.replace("\u2581", " ").strip()]

    def encode(self, text: str) -> Ids:
        """The ids of a text, exactly as the tokenizer gives them."""
        if not text:
            return NO_IDS
        if not self.is_segmentwise:
            return self._segment(text)
        parts: list[Ids] = []
        place = 0
        for found in self._added.finditer(text):
            if found.start() > place:
                parts.append(self._segment(text[place : found.start()]))
            parts.append(self._added_id(found[0]))
            place = found.end()
        if place < len(text):
            parts.append(self._segment(text[place:]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spell(self, ids: Ids) -> str | None:
        """The text that ids spell; None where they do not end with a letter."""
        try:
            return b"".join(map(self._tokenizer.token_bytes, ids.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def spell_bytes(self, ids: Ids) -> bytes:
        """The bytes that ids spell; ids beyond the vocabulary spell U+FFFD."""
        tokens, token_bytes = ids.tolist(), self._tokenizer.token_bytes
        try:
            return b"".join(map(token_bytes, tokens))
        except CodecError:
            return b"".join([self._spell_any(token) for token in tokens])

    def _spell_any(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except CodecError:
            return "\ufffd".encode()

    def added_in(self, text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Added tokens written out in a text: (start, end, id)."""
        for found in self._added.finditer(text, start, len(text) if end is None else end):
            yield found.start(), found.end(), self._id_of[found[0]]

    def next_added(self, text: str, start: int) -> tuple[int, int, int] | None:
        """The first added token at or after a place."""
        return next(self.added_in(text, start), None)

    def split(self, text: str, ids: Ids, places: Sequence[int]) -> tuple[list[Ids], list[int]]:
        """A text's ids cut at places of the text, and where each cut really is: a token that crosses a
        place goes to the left of it."""
        if not places:
            return [ids], []
        ends = self._token_ends(text, ids)
        cuts: list[int] = []
        reached: list[int] = []
        for place in places:
            # Tokens that end at or before the place, and the one that reaches beyond it but began before.
            cut = int(np.searchsorted(ends, place, side="right"))
            begun = int(ends[cut - 1]) if cut else 0
            crosses = begun < place and cut < len(ids)
            cuts.append(cut + crosses)
            reached.append(int(ends[cut]) if crosses else place)
        return np.split(ids, cuts), reached

    def _token_ends(self, text: str, ids: Ids) -> NDArray[np.int64]:
        """The place in the text where each token ends, from the bytes of the tokens."""
        byte_ends = np.cumsum(self._byte_lengths(ids), dtype=np.int64)
        if text.isascii():
            return byte_ends
        spelled = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        # A letter counts from its first byte on; bytes 10xxxxxx continue one.
        letters = np.zeros(len(spelled) + 2, np.int64)
        np.cumsum((spelled & 0xC0) != 0x80, out=letters[1:-1])
        letters[-1] = len(text) + 1
        return letters[np.minimum(byte_ends, len(spelled) + 1)]

    def _byte_lengths(self, ids: Ids) -> NDArray[np.int32]:
        """How many bytes each token spells, looked up in a table that fills as tokens are met."""
        lengths = self._lengths[ids]
        if (lengths < 0).any():
            for token in np.unique(ids[lengths < 0]).tolist():
                self._lengths[token] = len(self._tokenizer.token_bytes(token))
            lengths = self._lengths[ids]
        return lengths

    def _added_id(self, name: str) -> Ids:
        return np.array([self._id_of[name]], np.int32)

    def _segment(self, text: str) -> Ids:
        known = self._cache.get(text)
        if known is not None:
            return known[1]
        ids = self._tokenizer.encode(text) if self._words is None else self._words.encode(clean(text))
        self.encoded_tokens += len(ids)
        self._cache.put(text, (text, ids))
        return ids

    def _check_segments(self) -> bool:
        """Whether segments laid end to end are the whole, on this tokenizer."""
        if not self._tokenizer.splits_at_added_tokens:
            return False
        names = list(self._id_of)[:2] + list(self._id_of)[-2:]
        for name in names:
            for probe in _SAFETY_PROBES:
                text = f"{probe}{name}{probe}{name}{name}{probe}"
                if self.encode(text).tolist() != self._tokenizer.encode(text).tolist():
                    return False
        return True
