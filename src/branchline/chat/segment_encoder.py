"""Encodes text through two caches: one of segments, the text between two added tokens, and one of words.

A tokenizer splits a text at its added tokens (`<|im_end|>`) before anything else, so the ids of a text are
the concatenated ids of its segments, and their bytes are the bytes of the text. System prompts and tool lists
are long segments that recur in every session.

Not every tokenizer works like that: some insert a space where a text or a segment starts (Llama 2), some
remove spaces next to added tokens (Phi-3). `verify` compares both ways on texts. If they differ, text is
encoded as a whole, as the tokenizer does it after the token that precedes it, and offsets come from the
tokenizer instead of the bytes of the tokens.
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
from branchline.chat.token_escapes import MessageEscapes, TokenEscaper, token_pattern
from branchline.chat.tokenizer import ORDINARY, TokenizerDir
from branchline.core.cache import ByteLimitedCache
from branchline.core.errors import CodecError
from branchline.core.token_arrays import NO_IDS, Ids, as_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CACHE_BYTES = 64 * 1024 * 1024
_ENTRY_BYTES = 200
"""What a cached segment takes besides its text and its ids."""
_MAX_WORDS = 1 << 16
_MAX_WORD_LENGTH = 48
_LONG_TEXT = 1 << 12
"""From this length on, splitting a text would make other threads wait for too long."""
_MAX_WORDS_TEXT = 1 << 18
"""Longer texts go to the tokenizer, which is slower but lets other threads run meanwhile."""
_PROBE_TEXTS = ("a", " a", "\n\nA b", "  \n", "é中🙂", '{"a": [1, 2]}', "x\n")
_SENTENCEPIECE_SPACE = "\u2581"
_CATEGORY_OR_CLASS = re.compile(r"\\p\{(?P<category>\w+)\}|\\.|\[(?P<class>(?:\\.|[^\]\\])*)\]", re.DOTALL)
"""A Unicode category (`\\p{L}`), an escaped character, or the characters of a class in brackets."""


class SegmentEncoder:
    """Text to ids through a cache of segments. Safe to share between threads."""

    def __init__(self, tokenizer: TokenizerDir) -> None:
        self._tokenizer = tokenizer
        self._added_ids = dict(tokenizer.added_tokens)
        self._added_names = {token: name for name, token in self._added_ids.items()}
        self._added_pattern = re.compile(f"({token_pattern(filter(None, self._added_ids))})")
        self._added_arrays = {name: as_ids([token]) for name, token in self._added_ids.items()}
        # Some vocabularies add runs of whitespace; those are text, not control tokens.
        control = {
            name: token
            for name, token in self._added_ids.items()
            if name.replace(_SENTENCEPIECE_SPACE, " ").strip()
        }
        self.is_control = np.zeros(
            max([tokenizer.vocab_size, *(token + 1 for token in control.values())]), np.bool_
        )
        """Whether each id is an added token that is more than whitespace."""
        self.is_control[list(control.values())] = True
        self._byte_lengths = np.full(len(self.is_control), -1, np.int32)
        """The number of bytes of each token; -1 until it is needed."""
        special = {name for name, token in control.items() if token in tokenizer.special_ids}
        self.escaper = TokenEscaper(control, special)
        """Keeps text of messages from becoming control tokens; `encode` removes its marks."""
        self._cache: ByteLimitedCache[Ids] = ByteLimitedCache(_CACHE_BYTES)
        self.encoded_tokens = 0
        """Tokens that the tokenizer encoded; the others came from the cache."""
        self.word_cache = WordCache.open(tokenizer)
        """None if the tokenizer does not encode word by word."""
        self.encodes_by_segment = tokenizer.splits_at_added_tokens
        """Whether segments are encoded separately; if not, the whole text is encoded."""
        self.verify([*_PROBE_TEXTS, *self._texts_around_added_tokens()])

    def verify(self, texts: Iterable[str]) -> None:
        """Encodes texts by segment only as long as all of these have the same ids as a whole, and the bytes
        of the ids are the bytes of the text."""
        for text in texts:
            if not self.encodes_by_segment:
                return
            whole = self._tokenizer.encode(text)
            if not (
                np.array_equal(self.encode(text), whole)
                and self.decode_bytes(whole) == self.normalize(text).encode("utf-8", "replace")
            ):
                self.encodes_by_segment = False
                self._cache.clear()

    def _texts_around_added_tokens(self) -> list[str]:
        # Runs of `▁` are text, and their bytes are spaces.
        names = [name for name in self._added_ids if name.strip(_SENTENCEPIECE_SPACE)]
        few = names[:2] + names[-2:]
        return [
            "".join(f"x{name}y" for name in names),
            "".join(f"x \n{name} \n" for name in names),
            *(f"{probe}{name}{probe}{name}{name}{probe}" for name in few for probe in _PROBE_TEXTS),
        ]

    # -- text to ids ---------------------------------------------------------------------------------

    def encode(self, text: str, after: int | None = None) -> Ids:
        """Returns the ids of a text, as the tokenizer encodes it after a token, `after`, or at the start.

        Escaped texts (`escaper`) get ordinary tokens.
        """
        parts: list[Ids] = []
        for piece in self.escaper.split(text):
            if self.encodes_by_segment:
                for segment in filter(None, self._added_pattern.split(piece)):
                    ids = self._added_arrays.get(segment)
                    parts.append(self._encode_segment(segment) if ids is None else ids)
            elif piece:
                parts.append(self._encode_after(piece, after))
            after = ORDINARY
        if not parts:
            return NO_IDS
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode_parts(self, parts: Sequence[str], after: int | None) -> tuple[list[Ids], list[int]]:
        """Encodes consecutive parts of a text as one text. A token that crosses the end of a part belongs to
        it.

        Returns the ids of each part, and for every part but the last, by how many characters it grew.
        """
        text = "".join(parts)
        ids = self.encode(text, after)
        if len(parts) == 1:
            return [ids], []
        cuts = list(accumulate(sum(map(len, self.escaper.split(part))) for part in parts[:-1]))
        ends = self._token_ends(text, ids, after)
        indices: list[int] = []
        moves: list[int] = []
        for cut in cuts:
            # Tokens that end at or before the cut, and the one that starts before it and ends after it.
            index = int(np.searchsorted(ends, cut, side="right"))
            start = int(ends[index - 1]) if index else 0
            crosses = start < cut and index < len(ids)
            indices.append(index + crosses)
            moves.append(int(ends[index]) - cut if crosses else 0)
        return np.split(ids, indices), moves

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

    def _encode_segment(self, segment: str) -> Ids:
        ids = self._cache.get(segment)
        if ids is None:
            ids = self.word_cache.encode(segment) if self.word_cache is not None else None
            ids = self._tokenizer.encode(segment) if ids is None else ids
            self._cache.put(segment, ids, ids.nbytes + len(segment) + _ENTRY_BYTES)
            self.encoded_tokens += len(ids)
        return ids

    def _encode_after(self, text: str, after: int | None) -> Ids:
        """Returns the ids of a text after a token, cached."""
        name = None if after is None else self._added_names.get(after, "")
        key = f"{name}\0{text}"
        ids = self._cache.get(key)
        if ids is None:
            ids, _ = self._tokenizer.encode_after(text, after)
            self._cache.put(key, ids, ids.nbytes + len(key) + _ENTRY_BYTES)
            self.encoded_tokens += len(ids)
        return ids

    def _token_ends(self, text: str, ids: Ids, after: int | None) -> NDArray[np.int64]:
        """Returns the offset in the unescaped text at which each of its ids ends."""
        pieces = self.escaper.split(text)
        if self.encodes_by_segment:
            plain = "".join(pieces)
            # The bytes of the tokens are the bytes of the text, so their lengths give the end of each token.
            lengths = self._byte_lengths[ids]
            if lengths.min(initial=0) < 0:
                for token in np.unique(ids[lengths < 0]).tolist():
                    self._byte_lengths[token] = len(self._tokenizer.token_bytes(token))
                lengths = self._byte_lengths[ids]
            ends: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64)
            total = int(ends[-1]) if len(ends) else 0
            if plain.isascii() and total == len(plain):
                return ends
            characters = _characters_before(plain)
            if total == len(characters) - 2:
                return characters[ends]
        # The bytes differ where a text contains the character that stands for a space (`▁`).
        found: list[NDArray[np.int64]] = []
        offset = 0
        for piece in pieces:
            if piece:
                found.append(self._tokenizer.encode_after(piece, after)[1] + offset)
                offset += len(piece)
            after = ORDINARY
        ends = np.concatenate(found) if found else np.zeros(0, np.int64)
        if len(ends) != len(ids):
            raise CodecError(
                f"{self._tokenizer.path}: got {len(ids)} ids for a text, expected {len(ends)}: {text[:40]!r}"
            )
        return ends

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

    def control_names_in(self, ids: Ids) -> frozenset[str]:
        """Returns the texts of the control tokens among ids."""
        return frozenset(self._added_names[token] for token in self.control_tokens_in(ids))

    def message_escapes(self, end_ids: frozenset[int], allow_special_tokens: bool) -> MessageEscapes:
        """Returns the escapes of messages whose replies end with one of these tokens."""
        return MessageEscapes(self.escaper, self.control_names_in, end_ids, allow_special_tokens)

    # -- ids to text ---------------------------------------------------------------------------------

    def decode(self, ids: Ids) -> str | None:
        """Returns the text of ids, or None if they do not end at a character. The text of a control token
        that is spelled in ordinary tokens is escaped."""
        try:
            text = b"".join(map(self._tokenizer.token_bytes, ids.tolist())).decode()
            control = self.control_tokens_in(ids)
            if self.escaper.count(text) <= len(control):
                return text
            pieces: list[str] = []
            cuts = np.flatnonzero(np.isin(ids, control))
            for run in np.split(ids, np.union1d(cuts, cuts + 1)):
                piece = b"".join(map(self._tokenizer.token_bytes, run.tolist())).decode()
                is_control = len(run) == 1 and int(run[0]) in control
                pieces.append(piece if is_control else self.escaper.escape(piece))
            return "".join(pieces)
        except UnicodeDecodeError:
            return None

    def find_text_end(self, text: str, start: int, ids: Ids, after: int | None) -> int | None:
        """Returns the end of the text at an offset whose ids, after a token, are these; None if the text
        there has other ids. Needed if the ids do not have the bytes of the text."""
        recorded = self.decode_bytes(ids).decode("utf-8", "replace")
        end = start
        for char in recorded:
            if not _is_blank(char):
                while end < len(text) and (_is_blank(text[end]) or text[end] in self.escaper.mark):
                    end += 1
                if end >= len(text) or text[end] != char:
                    return None
                end += 1
        ends = [end]
        while end < len(text) and _is_blank(text[end]):
            end += 1
            ends.append(end)
        # Blanks that a token removes belong to it, so the longest text is the right one.
        for end in reversed(ends):
            if np.array_equal(self.encode(text[start:end], after), ids):
                return end
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
    takes a fifth of the time of the tokenizer. `re` splits twice as fast as `regex`, which lets other threads
    run meanwhile, so `regex` splits long texts. Only ASCII text is encoded this way: for other characters
    they may differ in their version of Unicode. Whether all split alike is tested at load. Safe to share
    between threads.
    """

    def __init__(
        self,
        split_short: Callable[[str], list[str]],
        split_long: Callable[[str], list[str]],
        backend: Tokenizer,
    ) -> None:
        self._split_short, self._split_long = split_short, split_long
        self._backend = backend
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def open(cls, tokenizer: TokenizerDir) -> WordCache | None:
        """Returns the cache of a tokenizer, or None if one expression does not find its words."""
        pattern = _word_pattern(tokenizer.normalizer, tokenizer.pre_tokenizer)
        if pattern is None:
            return None
        try:
            import regex
        except ImportError:
            return None
        try:
            split_short = re.compile(_write_for_ascii(pattern), re.ASCII).findall
            cache = cls(split_short, regex.compile(pattern).findall, tokenizer.backend)
        except (re.error, regex.error):
            return None
        if not all(map(cache._equals_tokenizer, _probe_texts())):
            return None
        cache._ids.clear()
        return cache

    def encode(self, text: str) -> Ids | None:
        """Returns the ids of a text without added tokens, or None if the tokenizer must encode it."""
        if not text.isascii() or len(text) > _MAX_WORDS_TEXT:
            return None
        words = self._split_short(text) if len(text) < _LONG_TEXT else self._split_long(text)
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
        """Whether all split a text into the same words and encode it alike."""
        ends = [end for _, (_, end) in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        words = self._split_short(text)
        if words != self._split_long(text) or list(accumulate(map(len, words))) != ends:
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


def _write_for_ascii(pattern: str, *, in_class: bool = False) -> str:
    r"""Returns an expression without Unicode categories, which `re` lacks, that finds the same in ASCII text.

    >>> _write_for_ascii(r"[^\s\p{N}]+|\p{N}")
    '[^\\s0123456789]+|[0123456789]'
    """

    def write(match: re.Match[str]) -> str:
        if match["category"] is None:
            characters = match["class"]
            return match[0] if characters is None else f"[{_write_for_ascii(characters, in_class=True)}]"
        known = [
            char for char in map(chr, range(128)) if unicodedata.category(char).startswith(match["category"])
        ]
        members = re.escape("".join(known))
        return members if in_class else f"[{members}]"

    return _CATEGORY_OR_CLASS.sub(write, pattern)


def _probe_texts() -> list[str]:
    """Texts in which each kind of ASCII character stands next to each other kind, and runs of some kinds."""
    kinds = "".join(char for char in map(chr, range(128)) if not char.isalnum()) + "azAZ09stSTrevmdl"
    pairs = "".join(map("".join, product(kinds, repeat=2)))
    runs = list(map("".join, product("aZ1 \n\r\t'.s", repeat=3)))
    return [pairs, "".join(runs), *runs[::17]]


def _is_blank(char: str) -> bool:
    return char.isspace() or char == _SENTENCEPIECE_SPACE


def _characters_before(text: str) -> NDArray[np.int64]:
    """Returns how many characters of a text start before each of its bytes; the last entry is one more."""
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    characters = np.zeros(len(data) + 2, np.int64)
    # Bytes 10xxxxxx continue a character.
    np.cumsum((data & 0xC0) != 0x80, out=characters[1:-1])
    characters[-1] = len(text) + 1
    return characters
