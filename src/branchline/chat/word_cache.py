"""Encodes ASCII text word by word: most words of a text have occurred before, and their ids are cached.

A byte-level tokenizer splits a text into words with one regular expression and encodes each word on its own,
so the ids of a text are the concatenated ids of its words. Splitting here and looking the words up takes a
fifth of the time of the tokenizer. Only ASCII text is encoded this way: for other characters two regular
expression engines may differ in their version of Unicode. Whether both split alike is tested at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, chain, product
from typing import TYPE_CHECKING, Any

import numpy as np

from branchline.core.token_arrays import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_WORDS = 1 << 16
_MAX_WORD_LENGTH = 48


class WordCache:
    """The ids of words. Safe to share between threads."""

    def __init__(self, find_words: Callable[[str], list[str]], tokenizer: Tokenizer) -> None:
        self._find_words = find_words
        self._tokenizer = tokenizer
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def open(cls, tokenizer: Tokenizer, normalizer: Any, pre_tokenizer: Any) -> WordCache | None:
        """Returns the cache of a tokenizer, or None if one expression does not find its words."""
        pattern = _word_pattern(normalizer, pre_tokenizer)
        if pattern is None:
            return None
        try:
            # Unlike `re` it has the Unicode categories of these expressions (`\p{L}`).
            import regex
        except ImportError:
            return None
        try:
            cache = cls(regex.compile(pattern).findall, tokenizer)
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
            new = self._encode_new({word for word, ids in zip(words, found, strict=True) if ids is None})
            found = [new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
        return np.fromiter(chain.from_iterable(found), np.int32)  # type: ignore[arg-type]

    def _encode_new(self, words: set[str]) -> dict[str, tuple[int, ...]]:
        texts = list(words)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        new = {word: tuple(encoding.ids) for word, encoding in zip(texts, encodings, strict=True)}
        if len(self._ids) + len(new) > _MAX_WORDS:
            self._ids.clear()
        self._ids.update([item for item in new.items() if len(item[0]) <= _MAX_WORD_LENGTH][:_MAX_WORDS])
        return new

    def _equals_tokenizer(self, text: str) -> bool:
        """Whether both split a text into the same words and encode it alike."""
        splits = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        if list(accumulate(map(len, self._find_words(text)))) != [end for _, (_, end) in splits]:
            return False
        ids = self.encode(text)
        return ids is not None and ids.tolist() == self._tokenizer.encode(text, add_special_tokens=False).ids


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
