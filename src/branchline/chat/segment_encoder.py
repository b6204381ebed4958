"""Encodes text through two caches: one of segments, the text between two added tokens, and one of words.

A tokenizer splits a text at its added tokens (`<|im_end|>`) before anything else, so the ids of a text are
the concatenated ids of its segments. System prompts and tool lists are long segments that recur in every
session. If a tokenizer does not work like that, whole texts are encoded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from branchline.chat.parsing.base import REPLACEMENT_CHARACTER
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.token_arrays import NO_IDS, Ids, as_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CACHE_BYTES = 64 * 1024 * 1024
_MAX_WORDS = 1 << 16
_MAX_WORD_LENGTH = 48
_SAFETY_PROBES = ("a", " a", "\n\nA b", "  \n", "é中🙂", '{"a": [1, 2]}', "x\n")


class SegmentEncoder:
    """Text to ids through a cache of segments. Safe to share between threads."""

    def __init__(self, tokenizer: TokenizerDir) -> None:
        self._tokenizer = tokenizer
        self._added_ids = dict(tokenizer.added_tokens)
        # Longest first: a token must not match where it is only the prefix of a longer one.
        names = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        self._added_arrays = {name: as_ids([token]) for name, token in self._added_ids.items()}
        # Some vocabularies add runs of whitespace; those are text, not control tokens.
        control = [token for name, token in self._added_ids.items() if name.replace("\u2581", " ").strip()]
        self.is_control = np.zeros(max([tokenizer.vocab_size, *(token + 1 for token in control)]), np.bool_)
        """Whether each id is an added token that is more than whitespace."""
        self.is_control[control] = True
        self._cache: ByteLimitedCache[tuple[str, Ids]] = ByteLimitedCache(
            _CACHE_BYTES, lambda entry: 4 * len(entry[1]) + len(entry[0]) + 200
        )
        self.encoded_tokens = 0
        """Tokens that the tokenizer encoded; the others came from the cache."""
        self.word_cache = WordCache.open(tokenizer)
        """None if the tokenizer does not encode word by word."""
        self.encodes_by_segment = True
        self.encodes_by_segment = self._verify_segments()

    # -- text to ids ---------------------------------------------------------------------------------

    def encode(self, text: str) -> Ids:
        """Returns the ids of a text, exactly as the tokenizer does."""
        segments = self._added_pattern.split(text) if self.encodes_by_segment else [text]
        # Without segments a text may contain added tokens, which are not words.
        words = self.word_cache if self.encodes_by_segment else None
        parts: list[Ids] = []
        for segment in filter(None, segments):
            ids = self._added_arrays.get(segment) if self.encodes_by_segment else None
            if ids is None:
                cached = self._cache.get(segment)
                if cached is None:
                    ids = words.encode(segment) if words is not None else None
                    cached = (segment, self._tokenizer.encode(segment) if ids is None else ids)
                    self._cache.put(segment, cached)
                    self.encoded_tokens += len(cached[1])
                ids = cached[1]
            parts.append(ids)
        if not parts:
            return NO_IDS
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def normalize(self, text: str) -> str:
        """Returns the text in the Unicode form in which the tokenizer encodes it."""
        if text.isascii() or not self._tokenizer.normalizes_nfc:
            return text
        return unicodedata.normalize("NFC", text)

    def normalize_bytes(self, data: bytes) -> bytes:
        """Returns the bytes of a text in the same form; bytes that are no text stay as they are."""
        if data.isascii() or not self._tokenizer.normalizes_nfc:
            return data
        try:
            return unicodedata.normalize("NFC", data.decode()).encode()
        except UnicodeDecodeError:
            return data

    def split_ids(self, text: str, ids: Ids, offsets: Sequence[int]) -> tuple[list[Ids], list[int]]:
        """Splits the ids of a text at offsets in the text. A token that crosses an offset goes to its left.

        Returns the parts and the offsets at which the text is really split.
        """
        # The bytes of the tokens are the bytes of the text, so their lengths give the end of each token.
        lengths = map(len, map(self._tokenizer.token_bytes, ids.tolist()))
        ends = np.cumsum(np.fromiter(lengths, np.int64, len(ids)))
        if not text.isascii():
            characters = _characters_before(text)
            ends = characters[np.minimum(ends, len(characters) - 1)]
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

    def find_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Returns the ids of those names that are added tokens."""
        return frozenset(self._added_ids[name] for name in names if name in self._added_ids)

    def control_tokens_in(self, ids: Ids) -> list[int]:
        """Returns the control tokens among ids."""
        known = ids[(ids >= 0) & (ids < len(self.is_control))]
        tokens: list[int] = known[self.is_control[known]].tolist()
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
        try:
            return b"".join(map(self._tokenizer.token_bytes, ids.tolist()))
        except CodecError:
            return b"".join(
                [self._tokenizer.token_bytes_or(token, REPLACEMENT_CHARACTER) for token in ids.tolist()]
            )


class WordCache:
    """Encodes ASCII text word by word: most words of a text have occurred before, and their ids are cached.

    A byte-level tokenizer splits a text into words with one regular expression and encodes each word on its
    own, so the ids of a text are the concatenated ids of its words. Splitting here and looking the words up
    takes a fifth of the time of the tokenizer. Only ASCII text is encoded this way: for other characters two
    regular expression engines may differ in their version of Unicode. Whether both split alike is tested at
    load. Safe to share between threads.
    """

    def __init__(self, find_words: Callable[[str], list[str]], backend: Tokenizer) -> None:
        self._find_words = find_words
        self._backend = backend
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def open(cls, tokenizer: TokenizerDir) -> WordCache | None:
        """Returns the cache of a tokenizer, or None if one expression does not find its words."""
        pattern = _word_pattern(tokenizer.normalizer, tokenizer.pre_tokenizer)
        if pattern is None:
            return None
        try:
            # Unlike `re` it has the Unicode categories of these expressions (`\p{L}`).
            import regex
        except ImportError:
            return None
        try:
            cache = cls(regex.compile(pattern).findall, tokenizer.backend)
        except regex.error:
            return None
        if not all(map(cache._equals_tokenizer, _probe_texts())):
            return None
        cache._ids.clear()
        return cache

    def encode(self, text: str) -> Ids | None:
        """Returns the ids of a text without added tokens, or None if the tokenizer must encode it."""
        if not text.isascii():
            return None
        words = self._find_words(text)
        if sum(map(len, words)) != len(text):
            return None
        found = list(map(self._ids.get, words))
        if None in found:
            new_words = list({word for word, ids in zip(words, found, strict=True) if ids is None})
            encodings = self._backend.encode_batch_fast(new_words, add_special_tokens=False)
            new = {word: tuple(encoding.ids) for word, encoding in zip(new_words, encodings, strict=True)}
            found = [new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
            if len(self._ids) + len(new) > _MAX_WORDS:
                self._ids.clear()
            kept = [item for item in new.items() if len(item[0]) <= _MAX_WORD_LENGTH]
            self._ids.update(kept[:_MAX_WORDS])
        return np.fromiter(chain.from_iterable(found), np.int32)  # type: ignore[arg-type]

    def _equals_tokenizer(self, text: str) -> bool:
        """Whether both split a text into the same words and encode it alike."""
        splits = self._backend.pre_tokenizer.pre_tokenize_str(text)
        if list(accumulate(map(len, self._find_words(text)))) != [end for _, (_, end) in splits]:
            return False
        ids = self.encode(text)
        return ids is not None and ids.tolist() == self._backend.encode(text, add_special_tokens=False).ids


def _word_pattern(normalizer: Any, pre_tokenizer: Any) -> str | None:
    """Returns the expression that splits a text into words, or None if the tokenizer does more than that."""
    # NFC leaves ASCII as it is.
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    steps = pre_tokenizer.get("pretokenizers", []) if isinstance(pre_tokenizer, Mapping) else []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = steps
    pattern = split["pattern"].get("Regex")
    if split.get("behavior") != "Isolated" or split.get("invert") or not isinstance(pattern, str):
        return None
    return None if byte_level.get("add_prefix_space") or byte_level.get("use_regex", True) else pattern


def _probe_texts() -> list[str]:
    """Texts in which each kind of ASCII character stands next to each other kind, and runs of some kinds."""
    kinds = "".join(char for char in map(chr, range(128)) if not char.isalnum()) + "azAZ09stSTrevmdl"
    pairs = "".join(map("".join, product(kinds, repeat=2)))
    runs = list(map("".join, product("aZ1 \n\r\t'.s", repeat=3)))
    return [pairs, "".join(runs), *runs[::17]]


def _characters_before(text: str) -> NDArray[np.int64]:
    """Returns how many characters of a text start before each of its bytes; the last entry is one more."""
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    characters = np.zeros(len(data) + 2, np.int64)
    # Bytes 10xxxxxx continue a character.
    np.cumsum((data & 0xC0) != 0x80, out=characters[1:-1])
    characters[-1] = len(text) + 1
    return characters
