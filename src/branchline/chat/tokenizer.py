"""A model's tokenizer directory: ids, the exact bytes of each token, stop ids and chat template sources.

The bytes of a text's tokens are the bytes of the text (as the tokenizer normalises it), whichever ids encode
it: `[71, 4791]` and `[14990]` are both `hello`. This makes it possible to compare ids by their text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from branchline.core.errors import CodecError
from branchline.core.reader import replace_surrogates
from branchline.core.token_arrays import Ids, as_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INSTALL = "pip install 'branchline[tokenizer]'"
_SENTENCEPIECE_SPACE = "\u2581"
"""The character that sentencepiece vocabularies use for a space."""
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


class _TokenBytesCache(dict[int, bytes]):
    """The bytes of each token, computed once. A hit is a plain dict lookup, without a Python call."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, token: int) -> bytes:
        data = self[token] = self._compute(token)
        return data


class TokenizerDir:
    """The tokenizer of one model. Open it with `TokenizerDir.open(path)`."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, file: _TokenizerFile, config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._is_byte_level = _contains_step([file.decoder, file.pre_tokenizer], "ByteLevel")
        self.normalizes_nfc = _contains_step(file.normalizer, "NFC")
        """Whether text is composed (Unicode NFC) before it is encoded."""
        self._added = {token.id: token for token in file.added_tokens}
        ids = np.fromiter(tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        self._known_ids = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
        self._known_ids[ids] = True
        self._token_bytes_cache = _TokenBytesCache(self._compute_token_bytes)
        self.token_bytes: Callable[[int], bytes] = self._token_bytes_cache.__getitem__
        """Returns the exact bytes of one token. Raises CodecError for an unknown id."""
        self._template_sources = _read_template_sources(path, config)
        self.special_tokens: Mapping[str, str] = _read_special_tokens(config)
        """`bos_token`, `eos_token` and so on, which templates use by name."""
        self.stop_ids = _read_stop_ids(path, config, self.added_tokens)
        """The ids that end an output, according to the files of the directory."""

    @classmethod
    def open(cls, path: str | Path) -> TokenizerDir:
        """Reads `tokenizer.json`, and the config and chat template in the same directory if they exist."""
        path = Path(path)
        if not path.is_dir():
            raise CodecError(f"{path}: not a directory, expected one with a tokenizer.json")
        # The fast method encodes batches; a thread pool would not help a batch of one and warns after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise CodecError(f"{path}: needs the tokenizers package: {_INSTALL}") from error
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

    @property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        return len(self._known_ids)

    def encode(self, text: str) -> Ids:
        """Returns the ids of a text, without adding any; an added token (`<|im_end|>`) in it is one id."""
        (encoding,) = self._tokenizer.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)
        return as_ids(encoding.ids)

    def decode(self, ids: Ids) -> str:
        """Returns readable text: special tokens are included, an unknown id is `<id>`."""
        parts = [
            self.token_bytes(token) if self._is_known(token) else b"<%d>" % token for token in ids.tolist()
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def invalid_id_error(self, ids: Ids) -> str | None:
        """Returns None if every id is known, else an error text about the first unknown one."""
        known = (ids >= 0) & (ids < self.vocab_size)
        known[known] = self._known_ids[ids[known]]
        index = int(known.argmin()) if len(known) else 0
        return None if known.all() else f"id {int(ids[index])} at index {index} {self._expected_ids}"

    @property
    def _expected_ids(self) -> str:
        return f"does not decode, expected an id of {self.path}, 0 to {self.vocab_size - 1}"

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and bool(self._known_ids[token])

    def _compute_token_bytes(self, token: int) -> bytes:
        if not self._is_known(token):
            raise CodecError(f"id {token} {self._expected_ids}")
        added = self._added.get(token)
        if added is not None:
            is_literal = self._is_byte_level or added.special
            return (
                added.content if is_literal else added.content.replace(_SENTENCEPIECE_SPACE, " ")
            ).encode()
        piece = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level:
            # A few vocabularies contain characters other than the 256 that represent bytes.
            return b"".join(_BYTE_LEVEL_DECODER.get(char) or char.encode() for char in piece)
        byte = _BYTE_FALLBACK.fullmatch(piece)
        return bytes.fromhex(byte[1]) if byte else piece.replace(_SENTENCEPIECE_SPACE, " ").encode()

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that are matched in a text before the tokenizer's model runs."""
        return {token.content: token.id for token in self._added.values()}

    @property
    def splits_at_added_tokens(self) -> bool:
        """Whether every added token splits a text, whatever surrounds it."""
        return not any(
            token.lstrip or token.rstrip or token.single_word or not token.content
            for token in self._added.values()
        )

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


def _read_template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates by name; `chat_template.jinja` takes precedence over the config."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return {"default": _read_bytes(file).decode()}
        except UnicodeError as error:
            raise CodecError(f"{file}: expected UTF-8: {error}") from error
    configured = config.get("chat_template") or []
    if isinstance(configured, str):
        return {"default": configured}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as error:
        expected = "chat_template: expected a string or a list of named templates"
        raise CodecError(f"{path / 'tokenizer_config.json'}: {expected}") from error


def _read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in tokens.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_stop_ids(path: Path, config: Mapping[str, Any], added: Mapping[str, int]) -> frozenset[int]:
    """Returns the end-of-text ids of the tokenizer and of `generation_config.json`."""
    eos_token = _read_special_tokens(config).get("eos_token", "")
    stop_ids = {added[eos_token]} if eos_token in added else set()
    file = path / "generation_config.json"
    if file.exists():
        configured = _read_config(file).get("eos_token_id") or []
        stop_ids.update(configured if isinstance(configured, list) else [configured])
    return frozenset(stop_ids)


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
