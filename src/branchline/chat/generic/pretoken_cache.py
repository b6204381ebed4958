"""Encodes text word by word: most words of a text were met before, and their ids are looked up.

A byte-level tokenizer cuts a text into words with one regular expression and encodes each by itself, so the
ids of a text are the ids of its words laid end to end. Finding the words here and looking them up costs a
fifth of encoding them. It is done only where it is certain: for letters whose class no version of Unicode
moves, with an expression that can be said in Python, on a tokenizer that has agreed on every such letter in
many neighbourhoods. All else is left to the tokenizer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby, product
from typing import Any

import numpy as np

from branchline.core.token_arrays import Ids

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]
"""The ids of each of many texts, by the tokenizer itself."""
PretokenEnds = Callable[[str], list[int]]
"""Where the words of a text end, by the tokenizer itself."""

_MAX_PRETOKENS, _MAX_PRETOKEN_CHARS = 1 << 16, 48
"""How many words are remembered, and how long one may be."""
_ASCII = "".join(map(chr, range(128)))
_UNICODE_RANGES = ((0xA0, 0x17F), (0x391, 0x3CA), (0x410, 0x450), (0x2010, 0x2028), (0x2030, 0x205F),
           (0x2190, 0x2300), (0x2500, 0x2600))  # fmt: skip
"""Latin, Greek and Cyrillic letters, typographer's signs, arrows, mathematics, boxes: old and settled."""
_PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_LINE_ENDS = ("", "a", "1", " ", "\n", "\r", "\t", ".", "/", "\u00a0", "\u4e00", ". ", " .", "a ", "\n ",
              "./", ".\n", ".\r", "//", "'", "é", "\u2014")  # fmt: skip
_PART = re.compile(
    r"\\p\{(?P<kind>\w+)\}|\\(?P<escape>.)|(?P<bracket>[\[\]])|(?P<plain>[^\\\[\]]+)", re.DOTALL
)
_CATEGORIES = re.compile("[LMNPSZ][a-z]?")
_FORBIDDEN = re.compile(r"\(\?<|&&|\$|(?<!\[)\^")
"""What looks left of a word or says more than Python can."""


def _is_stable_char(letter: str) -> bool:
    """Assigned, composed, no mark, and no other spelling of an ASCII letter where case is ignored."""
    return (
        unicodedata.category(letter)[0] in "LNPSZ"
        and unicodedata.is_normalized("NFC", letter)
        and not letter.casefold().isascii()
    )


_SUPPORTED_CHARS = _ASCII + "".join(
    letter
    for start, end in _UNICODE_RANGES
    for letter in map(chr, range(start, end))
    if _is_stable_char(letter)
)


def pretoken_pattern(normalizer: Any, pre_tokenizer: Any) -> str | None:
    """The one expression that a tokenizer finds words with; None where more than that happens."""
    composes = normalizer is None or normalizer in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []})
    steps = pre_tokenizer.get("pretokenizers", []) if isinstance(pre_tokenizer, Mapping) else []
    if not composes or [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, spell = steps
    pattern = split["pattern"].get("Regex")
    if split.get("behavior") != "Isolated" or split.get("invert") or not isinstance(pattern, str):
        return None
    return None if spell.get("add_prefix_space") or spell.get("use_regex", True) else pattern


class PretokenCache:
    """Text to ids through a table of words. Safe to share between threads."""

    def __init__(self, pattern: str, encode_all: EncodeBatch, word_ends: PretokenEnds) -> None:
        self._encode_batch = encode_all
        self._pretoken_ends = word_ends
        self._ascii_pattern = re.compile(_translate(pattern, _ASCII))
        self._unicode_pattern = re.compile(_translate(pattern, _SUPPORTED_CHARS))
        self._unsupported_chars = re.compile(f"[^{re.escape(_SUPPORTED_CHARS)}]")
        self._ids: dict[str, tuple[int, ...]] = {}
        self._line_boundary: re.Pattern[str] | None = None
        """Where a line begins that can be encoded by itself."""

    @classmethod
    def create(
        cls, pattern: str | None, encode_all: EncodeBatch, word_ends: PretokenEnds
    ) -> PretokenCache | None:
        """An encoder for a tokenizer, or None where it would not be certain to be right."""
        if pattern is None:
            return None
        try:
            encoder = cls(pattern, encode_all, word_ends)
        except (ValueError, re.error):
            return None
        if not all(encoder._matches_tokenizer(probe) for probe in _probes()):
            return None
        begins = encoder._line_start_chars()
        encoder._line_boundary = re.compile(rf"(?<=\n)(?=[{re.escape(begins)}])") if begins else None
        encoder._ids.clear()
        return encoder

    def encode(self, text: str) -> Ids:
        """The ids of a text, which has no added token written out in it."""
        words = self._split_pretokens(text)
        if words is not None:
            return _concatenate(self._look_up(words))
        if self._line_boundary is None:
            return _concatenate(self._encode_batch([text]))
        # The lines that can be read are; what stands between them is left to the tokenizer.
        parts: list[Iterable[int]] = []
        for is_known, lines in groupby(self._line_boundary.split(text), self._is_supported):
            piece = "".join(lines)
            words = self._split_pretokens(piece) if is_known else None
            parts += self._encode_batch([piece]) if words is None else self._look_up(words)
        return _concatenate(parts)

    def _is_supported(self, text: str) -> bool:
        return text.isascii() or self._unsupported_chars.search(text) is None

    def _split_pretokens(self, text: str) -> list[str] | None:
        """The words of a text; None where that is not certain."""
        if text.isascii():
            words: list[str] = self._ascii_pattern.findall(text)
        elif self._unsupported_chars.search(text) is None:
            words = self._unicode_pattern.findall(text)
        else:
            return None
        # What no word holds would be lost.
        return words if sum(map(len, words)) == len(text) else None

    def _look_up(self, words: Sequence[str]) -> Sequence[tuple[int, ...]]:
        found = list(map(self._ids.get, words))
        if None not in found:
            return found  # type: ignore[return-value]
        missing = list({word for word, ids in zip(words, found, strict=True) if ids is None})
        met = dict(zip(missing, map(tuple, self._encode_batch(missing)), strict=True))
        kept = [item for item in met.items() if len(item[0]) <= _MAX_PRETOKEN_CHARS]
        if len(self._ids) + len(kept) > _MAX_PRETOKENS:
            self._ids.clear()
        self._ids.update(kept[:_MAX_PRETOKENS])
        return [met[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]

    def _matches_tokenizer(self, text: str) -> bool:
        """Whether the tokenizer finds the same words, and gives the same ids."""
        words = self._split_pretokens(text)
        if words is None or list(accumulate(map(len, words))) != self._pretoken_ends(text):
            return False
        return list(chain(*self._look_up(words))) == self._encode_batch([text])[0]

    def _line_start_chars(self) -> str:
        """The letters before which a line break always ends a word, and which always begin one."""
        behind = ("", "a", "1", ".", "/", " ", "\n")
        return "".join(
            letter
            for letter in _PRINTABLE_ASCII
            if all(
                len(end) + 1 in self._pretoken_ends(f"{end}\n{letter}{rest}")
                for end in _LINE_ENDS
                for rest in behind
            )
            # Nor may it matter to what stands before it that something follows.
            and all(
                self._pretoken_ends(f"{end}\n{letter}")[:-1] == self._pretoken_ends(f"{end}\n")
                for end in _LINE_ENDS
            )
        )


def _concatenate(parts: Iterable[Iterable[int]]) -> Ids:
    return np.fromiter(chain.from_iterable(parts), np.int32)


def _probes() -> Iterable[str]:
    """Texts in which every letter stands beside every kind of letter."""
    signs = "".join(letter for letter in _ASCII if not letter.isalnum())
    some = signs + "azAZ09strevmldSTREVMLD"
    yield "".join(a + b for a, b in product(some, repeat=2))
    yield "".join(map("".join, product("aA1 \n\r\t'.\u00a0é—", repeat=3)))
    yield "".join(f"a{c}a {c} {c}{c}\n{c}A1{c}." for c in _SUPPORTED_CHARS)


def _translate(pattern: str, letters: str) -> str:
    """A tokenizer's expression in Python's words, for texts of these letters. ValueError: none."""
    if _FORBIDDEN.search(pattern):
        raise ValueError(pattern)
    translated: list[str] = []
    inside = False
    for part in _PART.finditer(pattern):
        kind, escape, bracket = part["kind"], part["escape"], part["bracket"]
        if bracket:
            if inside == (bracket == "["):
                raise ValueError(pattern)
            inside = not inside
            translated.append(bracket)
        elif kind or escape in ("s", "S"):
            if (kind and not _CATEGORIES.fullmatch(kind)) or (inside and escape == "S"):
                raise ValueError(pattern)
            members = re.escape("".join(_members(kind or "", letters)))
            shut = "^" if escape == "S" else ""
            translated.append(members if inside else f"[{shut}{members}]" if members else "(?!)")
        elif escape and escape.isalnum() and escape not in "rnt":
            raise ValueError(pattern)
        else:
            translated.append(part[0])
    if inside:
        raise ValueError(pattern)
    return "".join(translated)


def _members(kind: str, letters: str) -> Iterable[str]:
    """The letters of a Unicode category, or all whitespace."""
    if kind:
        return (letter for letter in letters if unicodedata.category(letter).startswith(kind))
    # Python also counts the four separators of ASCII, which Unicode does not.
    return (letter for letter in letters if letter.isspace() and letter not in "\x1c\x1d\x1e\x1f")
