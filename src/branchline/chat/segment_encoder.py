"""Encodes text segment by segment: the text between two added tokens is encoded once and cached.

A tokenizer splits a text at its added tokens (`<|im_end|>`) before anything else, so the ids of a text are
the concatenated ids of its segments. System prompts and tool lists are long segments that recur in every
session. If a tokenizer does not work like that, whole texts are encoded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from branchline.chat.parsing.base import REPLACEMENT
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.token_arrays import NO_IDS, Ids

_CACHE_BYTES = 64 * 1024 * 1024
_SAFETY_PROBES = ("a", " a", "\n\nA b", "  \n", "é中🙂", '{"a": [1, 2]}', "x\n")


class SegmentEncoder:
    """Text to ids through a cache of segments. Safe to share between threads."""

    def __init__(self, tokenizer: TokenizerDir) -> None:
        self._tokenizer = tokenizer
        self._added_ids = dict(tokenizer.added_tokens)
        # Longest first: a token must not match where it is only the prefix of a longer one.
        names = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")
        # Some vocabularies add runs of whitespace; those are text, not control tokens.
        control = [token for name, token in self._added_ids.items() if name.replace("\u2581", " ").strip()]
        self._is_control = np.zeros(max([tokenizer.vocab_size, *(token + 1 for token in control)]), np.bool_)
        self._is_control[control] = True
        self._cache: ByteLimitedCache[tuple[str, Ids]] = ByteLimitedCache(
            _CACHE_BYTES, lambda entry: 4 * len(entry[1]) + len(entry[0]) + 200
        )
        self._byte_length_table = np.full(tokenizer.vocab_size, -1, np.int32)
        self.encoded_tokens = 0
        """Tokens that the tokenizer encoded; the others came from the cache."""
        self.encodes_by_segment = True
        self.encodes_by_segment = self._verify_segments()

    # -- text to ids ---------------------------------------------------------------------------------

    def encode(self, text: str) -> Ids:
        """Returns the ids of a text, exactly as the tokenizer does."""
        if not text:
            return NO_IDS
        if not self.encodes_by_segment:
            return self._encode_segment(text)
        parts: list[Ids] = []
        position = 0
        for start, end, token in self.find_added_tokens(text):
            if start > position:
                parts.append(self._encode_segment(text[position:start]))
            parts.append(np.array([token], np.int32))
            position = end
        if position < len(text):
            parts.append(self._encode_segment(text[position:]))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def normalize(self, text: str) -> str:
        """Returns the text in the Unicode form in which the tokenizer encodes it."""
        if not self._tokenizer.normalizes_nfc or text.isascii():
            return text
        return unicodedata.normalize("NFC", text)

    def split_ids(self, text: str, ids: Ids, offsets: Sequence[int]) -> tuple[list[Ids], list[int]]:
        """Splits the ids of a text at offsets in the text. A token that crosses an offset goes to its left.

        Returns the parts and the offsets at which the text is really split.
        """
        if not offsets:
            return [ids], []
        ends = self._token_ends(text, ids)
        cuts: list[int] = []
        actual: list[int] = []
        for offset in offsets:
            # Tokens that end at or before the offset, and the one that starts before it and ends after it.
            cut = int(np.searchsorted(ends, offset, side="right"))
            start = int(ends[cut - 1]) if cut else 0
            crosses = start < offset and cut < len(ids)
            cuts.append(cut + crosses)
            actual.append(int(ends[cut]) if crosses else offset)
        return np.split(ids, cuts), actual

    def _token_ends(self, text: str, ids: Ids) -> NDArray[np.int64]:
        """Returns the offset in the text at which each token ends, computed from the bytes of the tokens."""
        byte_ends = np.cumsum(self._byte_lengths(ids), dtype=np.int64)
        if text.isascii():
            return byte_ends
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        # A character counts from its first byte on; bytes 10xxxxxx continue one.
        characters = np.zeros(len(data) + 2, np.int64)
        np.cumsum((data & 0xC0) != 0x80, out=characters[1:-1])
        characters[-1] = len(text) + 1
        return characters[np.minimum(byte_ends, len(data) + 1)]

    def _byte_lengths(self, ids: Ids) -> NDArray[np.int32]:
        """Returns the number of bytes of each token, from a table that is filled on demand."""
        lengths = self._byte_length_table[ids]
        if (lengths < 0).any():
            for token in np.unique(ids[lengths < 0]).tolist():
                self._byte_length_table[token] = len(self._tokenizer.token_bytes(token))
            lengths = self._byte_length_table[ids]
        return lengths

    def _encode_segment(self, text: str) -> Ids:
        cached = self._cache.get(text)
        if cached is not None:
            return cached[1]
        ids = self._tokenizer.encode(text)
        self.encoded_tokens += len(ids)
        self._cache.put(text, (text, ids))
        return ids

    def _verify_segments(self) -> bool:
        """Whether the concatenated segments equal the whole encode, tested with this tokenizer."""
        if not self._tokenizer.splits_at_added_tokens:
            return False
        names = list(self._added_ids)[:2] + list(self._added_ids)[-2:]
        for name in names:
            for probe in _SAFETY_PROBES:
                text = f"{probe}{name}{probe}{name}{name}{probe}"
                if self.encode(text).tolist() != self._tokenizer.encode(text).tolist():
                    return False
        return True

    # -- added tokens --------------------------------------------------------------------------------

    def find_added_tokens(
        self, text: str, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Yields the added tokens in a text as (start, end, id)."""
        for match in self._added_pattern.finditer(text, start, len(text) if end is None else end):
            yield match.start(), match.end(), self._added_ids[match[0]]

    def is_control_token(self, token: int) -> bool:
        """Whether an added token is more than whitespace."""
        return bool(self._is_control[token])

    def control_tokens_in(self, ids: Ids) -> list[int]:
        """Returns the control tokens among ids."""
        known = ids[(ids >= 0) & (ids < len(self._is_control))]
        tokens: list[int] = known[self._is_control[known]].tolist()
        return tokens

    # -- ids to text ---------------------------------------------------------------------------------

    def decode(self, ids: Ids) -> str | None:
        """Returns the text of ids, or None if they do not end at a character."""
        try:
            return b"".join(map(self._tokenizer.token_bytes, ids.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def decode_bytes(self, ids: Ids) -> bytes:
        """Returns the bytes of ids; an unknown id is U+FFFD."""
        tokens, token_bytes = ids.tolist(), self._tokenizer.token_bytes
        try:
            return b"".join(map(token_bytes, tokens))
        except CodecError:
            return b"".join([self._token_bytes_or_replacement(token) for token in tokens])

    def _token_bytes_or_replacement(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except CodecError:
            return REPLACEMENT
