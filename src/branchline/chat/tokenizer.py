"""A model's tokenizer directory: ids, the exact bytes of each token, stop ids and chat template sources.

The bytes of a text's tokens are the bytes of the text (as the tokenizer normalises it), whichever ids encode
it: `[71, 4791]` and `[14990]` are both `hello`. This makes it possible to compare ids by their text. Some
tokenizers insert a space where a text starts, or remove spaces next to added tokens; `segment_encoder` finds
out which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import CodecError
from branchline.core.extras import requires_extra
from branchline.core.model_folder import find_model_folder, model_name
from branchline.core.reader import replace_surrogates
from branchline.core.token_arrays import NO_IDS, Ids, as_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SENTENCEPIECE_SPACE = "\u2581"
"""The character that sentencepiece vocabularies use for a space."""
_PIECE_IDS = 1 << 13
"""Long lists of ids are converted in pieces, so that other threads can run in between."""
VOCABULARY_PADDING = 1024
"""How many ids a model of unknown size may have beyond those of its tokenizer; known models have fewer."""
ORDINARY = -1
"""As the id before a text: any token that is not an added one."""
_ORDINARY_CONTEXTS = ("\x02", ".", "a", "\n")
"""Texts after which a text is encoded as in the middle of another one. The first merges with no other
character in most vocabularies."""
_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of `tokenizer.json` that determine the bytes of tokens; `tokenizers` reads the rest."""

    added_tokens: list[_AddedToken] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed once. A hit is a plain dict lookup, without a Python call."""

    def __init__(
        self, owner: TokenizerDir, tokenizer: Tokenizer, added: dict[int, _AddedToken], is_byte_level: bool
    ) -> None:
        self._owner = owner
        self._tokenizer = tokenizer
        self._added = added
        self._is_byte_level = is_byte_level

    def __missing__(self, token: int) -> bytes:
        if not (0 <= token < self._owner.vocab_size and self._owner.known_ids[token]):
            raise CodecError(f"id {token} {self._owner.expected_ids}")
        added = self._added.get(token)
        piece = added.content if added is not None else self._tokenizer.id_to_token(token) or ""
        byte = _BYTE_FALLBACK.fullmatch(piece)
        if added is not None and (self._is_byte_level or added.special):
            data = piece.encode()
        elif self._is_byte_level:
            # A few vocabularies contain characters other than the 256 that represent bytes.
            data = b"".join(_BYTE_LEVEL_DECODER.get(char) or char.encode() for char in piece)
        elif added is None and byte:
            data = bytes.fromhex(byte[1])
        else:
            data = piece.replace(_SENTENCEPIECE_SPACE, " ").encode()
        self[token] = data
        return data


class TokenizerDir:
    """The tokenizer of one model. Open it with `TokenizerDir.open(path)`; `name` is the model's name."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, file: _TokenizerFile, config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.name = model_name(path)
        self.backend = tokenizer
        self.normalizer, self.pre_tokenizer = file.normalizer, file.pre_tokenizer
        """Two steps of the tokenizer as its file describes them."""
        self.normalizes_nfc = _contains_step(file.normalizer, "NFC")
        """Whether text is composed (Unicode NFC) before it is encoded."""
        is_byte_level = _contains_step([file.decoder, file.pre_tokenizer], "ByteLevel")
        added = {token.id: token for token in file.added_tokens}
        self.added_tokens = {token.content: token.id for token in added.values()}
        """Text and id of the tokens that are matched in a text before the tokenizer's model runs."""
        self._added_names = {token: name for name, token in self.added_tokens.items()}
        self.special_ids = frozenset(token.id for token in added.values() if token.special)
        """The added tokens that the tokenizer marks as special."""
        self.splits_at_added_tokens = not any(
            token.lstrip or token.rstrip or token.single_word or not token.content for token in added.values()
        )
        """Whether every added token splits a text, whatever surrounds it."""
        ids = np.fromiter(tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        self.vocab_size = int(ids.max(initial=-1)) + 1
        """The highest id plus one."""
        model_size = _read_model_vocab_size(path)
        self.model_vocab_size = max(self.vocab_size, model_size or self.vocab_size + VOCABULARY_PADDING)
        """The number of ids that the model can sample; most models pad their vocabulary."""
        self.known_ids = np.zeros(self.vocab_size, np.bool_)
        self.known_ids[ids] = True
        self.expected_ids = f"does not decode, expected an id of {path}, 0 to {self.vocab_size - 1}"
        self.token_bytes: Callable[[int], bytes] = _TokenBytes(
            self, tokenizer, added, is_byte_level
        ).__getitem__
        """Returns the exact bytes of one token. Raises CodecError for an unknown id."""
        self._template_sources = _read_template_sources(path, config)
        self.special_tokens: Mapping[str, str] = _read_special_tokens(path, config)
        """`bos_token`, `eos_token` and so on, which templates use by name."""
        self.stop_ids = _read_stop_ids(path, self.special_tokens.get("eos_token", ""), self.added_tokens)
        """The ids that end an output, according to the files of the directory."""

    @classmethod
    def open(cls, path: str | Path) -> TokenizerDir:
        """Reads `tokenizer.json`, and the config and chat template in the same directory if they exist.

        `path` is a directory or a Hugging Face name (`Qwen/Qwen3-8B`, `Qwen/Qwen3-8B@REVISION`).
        """
        path = find_model_folder(path)
        # The fast method encodes batches; a thread pool would not help a batch of one and warns after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with requires_extra():
            from tokenizers import Tokenizer
        raw = _read_bytes(path / "tokenizer.json")
        try:
            file = msgspec.json.decode(raw, type=_TokenizerFile)
            tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:
            # The Rust extension raises plain Exceptions.
            raise CodecError(f"{path / 'tokenizer.json'}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(path, tokenizer, file, _read_config(path / "tokenizer_config.json"))

    def encode(self, text: str) -> Ids:
        """Returns the ids of a text, without adding any; an added token (`<|im_end|>`) in it is one id."""
        text = text if text.isascii() else replace_surrogates(text)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        found = encoding.ids
        starts = range(0, len(found), _PIECE_IDS)
        pieces = [np.array(found[start : start + _PIECE_IDS], np.int32) for start in starts]
        ids = np.concatenate([NO_IDS, *pieces])
        ids.flags.writeable = False
        return ids

    def encode_after(self, text: str, after: int | None) -> tuple[Ids, NDArray[np.int64]]:
        """Returns the ids of a text after a token, and the offset in the text at which each of them ends.

        `after` is None at the start of a prompt. Another text is encoded before this one; its ids must be the
        first ones. Spaces that an added token removes belong to the token.
        """
        contexts: tuple[str, ...] = ("",)
        if after is not None:
            name = self._added_names.get(after)
            contexts = _ORDINARY_CONTEXTS if name is None else (name, *_ORDINARY_CONTEXTS)
        text = text if text.isascii() else replace_surrogates(text)
        for context in contexts:
            context_ids = self.encode(context).tolist()
            encoding = self.backend.encode(context + text, add_special_tokens=False)
            count = len(context_ids)
            if encoding.ids[:count] == context_ids:
                ends = np.array([end for _, end in encoding.offsets[count:]], np.int64) - len(context)
                # Tokens of one character may have equal offsets, an inserted space that of the next one.
                return as_ids(encoding.ids[count:]), np.maximum.accumulate(np.maximum(ends, 0))
        raise CodecError(
            f"{self.path}: cannot encode {text[:40]!r} in the middle of a prompt: it merges with the text "
            f"before it, tried {', '.join(map(repr, contexts))}"
        )

    def decode(self, ids: Ids) -> str:
        """Returns readable text: special tokens are included, an unknown id is `<id>`. A space that the
        tokenizer inserts at the start of a text or after an added token is left out."""
        try:
            pieces = list(map(self.token_bytes, ids.tolist()))
        except CodecError:
            pieces = [self.token_bytes_or(token, b"<%d>" % token) for token in ids.tolist()]
        if pieces and self.inserts_space_at_start:
            spaced = self._tokens_before_inserted_spaces
            for index, token in enumerate([None, *ids.tolist()[:-1]]):
                if token is None or token in spaced:
                    pieces[index] = pieces[index].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    @cached_property
    def inserts_space_at_start(self) -> bool:
        """Whether the tokenizer encodes a text as if a space preceded it."""
        return self._inserts_space("", "a")

    @cached_property
    def _tokens_before_inserted_spaces(self) -> frozenset[int]:
        """The added tokens after which the tokenizer inserts a space."""
        return frozenset(
            token for name, token in self.added_tokens.items() if self._inserts_space(name, name + "a")
        )

    def _inserts_space(self, before: str, text: str) -> bool:
        data = b"".join(map(self.token_bytes, self.encode(text).tolist()))
        return data.removeprefix(before.encode()).startswith(b" ")

    def token_bytes_or(self, token: int, default: bytes) -> bytes:
        """Returns the exact bytes of one token, or `default` for an unknown id."""
        try:
            return self.token_bytes(token)
        except CodecError:
            return default

    def find_id(self, value: int | str, key: str) -> int:
        """Returns the id of a token that is named by its id, also as text, or by its text.

        Raises CodecError, which names `key`, if there is no such token.
        """
        token = int(value) if isinstance(value, int) or value.isdecimal() else -1
        if token < 0 and isinstance(value, str):
            ids = self.encode(value).tolist()
            token = ids[0] if len(ids) == 1 else -1
        if not (0 <= token < self.vocab_size and self.known_ids[token]):
            expected = f"an id from 0 to {self.vocab_size - 1} or the text of one token of {self.path}"
            raise CodecError(f"{key}: got {value!r}, expected {expected}")
        return token

    def invalid_id_error(self, ids: Ids) -> str | None:
        """Returns None if every id is known, else an error text about the first unknown one."""
        known = (ids >= 0) & (ids < self.vocab_size)
        known[known] = self.known_ids[ids[known]]
        index = int(known.argmin()) if len(known) else 0
        return None if known.all() else f"id {int(ids[index])} at index {index} {self.expected_ids}"

    @property
    def has_template(self) -> bool:
        return bool(self._template_sources)

    def template_source(self, *, tools: bool = False) -> str:
        """Returns the source of the chat template; some models have a separate one for prompts with tools.

        Raises CodecError if there is no template.
        """
        name = "tool_use" if tools and "tool_use" in self._template_sources else "default"
        if name not in self._template_sources:
            names = ", ".join(sorted(self._template_sources)) or "none"
            raise CodecError(f"{self.path}: no chat template named {name!r}, it has {names}")
        return self._template_sources[name]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CodecError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(_read_bytes(path) if path.exists() else b"{}", type=dict[str, Any])
    except ValueError as error:
        raise CodecError(f"{path}: expected a JSON object: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode()
    except UnicodeError as error:
        raise CodecError(f"{path}: expected UTF-8: {error}") from error


def _read_template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates by name. `chat_template.jinja` replaces those of the config; the files in
    `additional_chat_templates` are named after their template."""
    file = path / "chat_template.jinja"
    sources = {"default": _read_text(file)} if file.exists() else _read_configured_templates(path, config)
    additional = sorted((path / "additional_chat_templates").glob("*.jinja"))
    return sources | {file.stem: _read_text(file) for file in additional}


def _read_configured_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    configured = config.get("chat_template") or []
    if isinstance(configured, str):
        return {"default": configured}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as error:
        expected = "chat_template: expected a string or a list of named templates"
        raise CodecError(f"{path / 'tokenizer_config.json'}: {expected}") from error


def _read_special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns special tokens by name; the config takes precedence over `special_tokens_map.json`."""
    contents: dict[str, str] = {}
    for source in (_read_config(path / "special_tokens_map.json"), config):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                contents[name] = content
    return contents


def _read_stop_ids(path: Path, eos_token: str, added: Mapping[str, int]) -> frozenset[int]:
    """Returns the end-of-text ids of the tokenizer and of `generation_config.json`."""
    stop_ids = {added[eos_token]} if eos_token in added else set()
    file = path / "generation_config.json"
    if file.exists():
        configured = _read_config(file).get("eos_token_id") or []
        stop_ids.update(configured if isinstance(configured, list) else [configured])
    return frozenset(stop_ids)


def _read_model_vocab_size(path: Path) -> int | None:
    """Returns `vocab_size` of `config.json`, or that of its text model."""
    config = _read_config(path / "config.json")
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int):
            return size
    return None


def _contains_step(part: object, kind: str) -> bool:
    """Whether a part of a tokenizer is a step of a type, or contains one."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_contains_step(inner, kind) for inner in part.values())
    return isinstance(part, list) and any(_contains_step(inner, kind) for inner in part)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns the byte that each character of a byte-level token represents (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(others))]
    return {chr(char): bytes([byte]) for char, byte in zip(characters, printable + others, strict=True)}


_BYTE_LEVEL_DECODER = _byte_level_alphabet()
