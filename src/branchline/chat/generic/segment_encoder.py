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

from branchline.chat.generic.pretoken_cache import PretokenCache
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.json_fields import replace_surrogates
from branchline.core.token_arrays import NO_IDS, Ids

_CACHE_BYTES = 64 * 1024 * 1024
_SAFETY_PROBES = ("a", " a", "\n\nA b", "  \n", "é中🙂", '{"a": [1, 2]}', "x\n")


class SegmentEncoder:
    """Text to ids through a cache of segments."""

    def __init__(self, tokenizer: TokenizerDir, cache_bytes: int = _CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._added_ids = dict(tokenizer.added_tokens)
        # Longest first: `<|im_start|>` must not be read as a shorter token it begins with.
        names = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")
        self._cache: ByteLimitedCache[tuple[str, Ids]] = ByteLimitedCache(
            cache_bytes, lambda entry: 4 * len(entry[1]) + len(entry[0]) + 200
        )
        self._pretoken_cache = PretokenCache.create(
            tokenizer.pretoken_pattern, tokenizer.encode_batch, tokenizer.pretoken_ends
        )
        self._byte_length_table = np.full(tokenizer.vocab_size, -1, np.int32)
        self.encoded_tokens = 0
        """Tokens that really were encoded; the rest came from the cache."""
        self.encodes_by_segment = True
        self.encodes_by_segment = self._verify_segments()
        if not self.encodes_by_segment:
            self._pretoken_cache = None

    @property
    def control_token_ids(self) -> list[int]:
        """Added tokens that say something; some vocabularies add runs of spaces and newlines too."""
        return [token for name, token in self._added_ids.items() if name.replace("\u2581", " ").strip()]

    def encode(self, text: str) -> Ids:
        """The ids of a text, exactly as the tokenizer gives them."""
        if not text:
            return NO_IDS
        if not self.encodes_by_segment:
            return self._encode_segment(text)
        parts: list[Ids] = []
        place = 0
        for found in self._added_pattern.finditer(text):
            if found.start() > place:
                parts.append(self._encode_segment(text[place : found.start()]))
            parts.append(self._added_token_ids(found[0]))
            place = found.end()
        if place < len(text):
            parts.append(self._encode_segment(text[place:]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode(self, ids: Ids) -> str | None:
        """The text that ids spell; None where they do not end with a letter."""
        try:
            return b"".join(map(self._tokenizer.token_bytes, ids.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def decode_bytes(self, ids: Ids) -> bytes:
        """The bytes that ids spell; ids beyond the vocabulary spell U+FFFD."""
        tokens, token_bytes = ids.tolist(), self._tokenizer.token_bytes
        try:
            return b"".join(map(token_bytes, tokens))
        except CodecError:
            return b"".join([self._token_bytes_or_replacement(token) for token in tokens])

    def _token_bytes_or_replacement(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except CodecError:
            return "\ufffd".encode()

    def find_added_tokens(
        self, text: str, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Added tokens written out in a text: (start, end, id)."""
        for found in self._added_pattern.finditer(text, start, len(text) if end is None else end):
            yield found.start(), found.end(), self._added_ids[found[0]]

    def find_next_added_token(self, text: str, start: int) -> tuple[int, int, int] | None:
        """The first added token at or after a place."""
        return next(self.find_added_tokens(text, start), None)

    def split_ids(self, text: str, ids: Ids, places: Sequence[int]) -> tuple[list[Ids], list[int]]:
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
        lengths = self._byte_length_table[ids]
        if (lengths < 0).any():
            for token in np.unique(ids[lengths < 0]).tolist():
                self._byte_length_table[token] = len(self._tokenizer.token_bytes(token))
            lengths = self._byte_length_table[ids]
        return lengths

    def _added_token_ids(self, name: str) -> Ids:
        return np.array([self._added_ids[name]], np.int32)

    def _encode_segment(self, text: str) -> Ids:
        known = self._cache.get(text)
        if known is not None:
            return known[1]
        ids = (
            self._tokenizer.encode(text)
            if self._pretoken_cache is None
            else self._pretoken_cache.encode(replace_surrogates(text))
        )
        self.encoded_tokens += len(ids)
        self._cache.put(text, (text, ids))
        return ids

    def _verify_segments(self) -> bool:
        """Whether segments laid end to end are the whole, on this tokenizer."""
        if not self._tokenizer.splits_at_added_tokens:
            return False
        names = list(self._added_ids)[:2] + list(self._added_ids)[-2:]
        for name in names:
            for probe in _SAFETY_PROBES:
                text = f"{probe}{name}{probe}{name}{name}{probe}"
                if self.encode(text).tolist() != self._tokenizer.encode(text).tolist():
                    return False
        return True
