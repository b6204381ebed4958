"""A model's tokenizer directory, read lightly: ids, their exact bytes, and the prompt its template writes.

For a byte-level tokenizer the bytes of a text's tokens are the bytes of the text (as the tokenizer
normalises it), whichever ids spell it: `[71, 4791]` and `[14990]` are both `hello`. That is what makes a
repair certain. What is encoded here was not sampled, and whoever uses it has to say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from branchline.chat.generic.chat_template import ChatTemplate, to_json
from branchline.chat.generic.pretoken_cache import pretoken_pattern
from branchline.chat.generic.template_traits import TemplateTraits, probe_template_traits
from branchline.core.errors import CodecError
from branchline.core.json_fields import replace_surrogates
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids, as_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tools = Sequence[Mapping[str, Any]]
ChatTemplateKwargs = Mapping[str, Any]
_NO_KWARGS: ChatTemplateKwargs = {}
_INSTALL = "pip install 'branchline[tokenizer]'"
_SENTENCEPIECE_SPACE = "\u2581"
"""What sentencepiece writes for a space."""
_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of `tokenizer.json` that say how its tokens spell bytes; the rest is for `tokenizers`."""

    added_tokens: list[_AddedToken] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class _TokenBytesCache(dict[int, bytes]):
    """The bytes of each token, found once: what is spelled again is looked up without a line of Python."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._compute = spell

    def __missing__(self, token: int) -> bytes:
        spelled = self[token] = self._compute(token)
        return spelled


class TokenizerDir:
    """The tokenizer of one model. Open it with `TokenizerDir.open(path)`."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, file: _TokenizerFile, config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._is_byte_level = _contains_step([file.decoder, file.pre_tokenizer], "ByteLevel")
        self._normalizes_nfc = _contains_step(file.normalizer, "NFC")
        self.pretoken_pattern = pretoken_pattern(file.normalizer, file.pre_tokenizer)
        """The expression that words are found with, where that is all there is to it."""
        self._added = {token.id: token for token in file.added_tokens}
        ids = np.fromiter(tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        self._known_ids = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
        self._known_ids[ids] = True
        self._token_bytes_cache = _TokenBytesCache(self._compute_token_bytes)
        self.token_bytes: Callable[[int], bytes] = self._token_bytes_cache.__getitem__
        """The exact bytes that one token spells; CodecError for an id that is none."""
        self._template_sources = _read_template_sources(path, config)
        self._special_tokens = _read_special_tokens(config)
        self._chat_templates: dict[str, ChatTemplate] = {}
        self._template_traits: dict[ChatTemplate, TemplateTraits] = {}
        self._stop_ids = _read_stop_ids(path, config, self.added_tokens)
        # Equal prompts must stay equal however long a log takes to read.
        self._render_time = datetime.now()

    @classmethod
    def open(cls, path: str | Path) -> TokenizerDir:
        """Reads `tokenizer.json`, and the config and chat template beside it where there are any."""
        path = Path(path)
        if not path.is_dir():
            raise CodecError(f"{path}: not a directory, expected one with a tokenizer.json")
        # The fast call is one for batches; a pool of threads for a batch of one would only forbid forking.
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
            # The Rust side raises bare Exceptions.
            raise CodecError(f"{path / 'tokenizer.json'}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(path, tokenizer, file, _read_config(path / "tokenizer_config.json"))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._known_ids)

    def encode(self, text: str) -> Ids:
        """The ids of a text; none are added around it, those written out in it (`<|im_end|>`) are one id."""
        (ids,) = self.encode_batch([text])
        return as_ids(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each of many texts."""
        texts = [replace_surrogates(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def pretoken_ends(self, text: str) -> list[int]:
        """Where the words of a text end that are encoded each by itself; the text is composed already."""
        found = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [end for _, (_, end) in found]

    def decode(self, ids: Ids) -> str:
        """Text for people to read: special tokens are shown, an id that does not decode is `<id>`."""
        spelled = [
            self.token_bytes(token) if self._is_known(token) else b"<%d>" % token for token in ids.tolist()
        ]
        return b"".join(spelled).decode("utf-8", "replace")

    def invalid_id_error(self, ids: Ids) -> str | None:
        """None where every id decodes, else which one does not."""
        good = (ids >= 0) & (ids < self.vocab_size)
        good[good] = self._known_ids[ids[good]]
        place = int(good.argmin()) if len(good) else 0
        return None if good.all() else f"id {int(ids[place])} at place {place} {self._expected_ids}"

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
            plain = self._is_byte_level or added.special
            return (added.content if plain else added.content.replace(_SENTENCEPIECE_SPACE, " ")).encode()
        spelling = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level:
            # A few vocabularies hold letters beside the 256 that stand for bytes; those mean themselves.
            return b"".join(_BYTE_LEVEL_DECODER.get(letter) or letter.encode() for letter in spelling)
        byte = _BYTE_FALLBACK.fullmatch(spelling)
        return bytes.fromhex(byte[1]) if byte else spelling.replace(_SENTENCEPIECE_SPACE, " ").encode()

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are found in a text before anything else is looked at, by what they say."""
        return {token.content: token.id for token in self._added.values()}

    @property
    def splits_at_added_tokens(self) -> bool:
        """Whether an added token ends one piece of text and begins another, whatever stands around it."""
        return not any(
            token.lstrip or token.rstrip or token.single_word or not token.content
            for token in self._added.values()
        )

    @property
    def normalizes_nfc(self) -> bool:
        """Whether letters and accents are composed (NFC) before encoding."""
        return self._normalizes_nfc

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and their like."""
        return self._special_tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an output, as far as the directory says."""
        return self._stop_ids

    @property
    def has_template(self) -> bool:
        return bool(self._template_sources)

    def chat_template(self, *, tools: bool = False) -> ChatTemplate:
        """The chat template; some models have one of its own for conversations with tools."""
        name = "tool_use" if tools and "tool_use" in self._template_sources else "default"
        if name not in self._template_sources:
            named = ", ".join(sorted(self._template_sources)) or "none"
            raise CodecError(f"{self.path}: no chat template named {name!r}, it has {named}")
        if name not in self._chat_templates:
            try:
                self._chat_templates[name] = ChatTemplate(self._template_sources[name], self._special_tokens)
            except CodecError as error:
                raise CodecError(f"{self.path}: chat template {name!r}: {error}") from error
        return self._chat_templates[name]

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs = _NO_KWARGS,
    ) -> str:
        """The prompt as the model's chat template writes it, generation prompt included."""
        chosen = self.chat_template(tools=bool(tools))
        dialect = self._template_traits.get(chosen)
        if dialect is None:
            dialect = self._template_traits[chosen] = probe_template_traits(chosen)
        try:
            return chosen.render(
                dialect.to_template_messages(messages),
                [dict(tool) for tool in tools],
                chat_template_kwargs,
                now=self._render_time,
            )
        except CodecError as error:
            raise CodecError(f"{self.path}: {error}") from error

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        chat_template_kwargs: ChatTemplateKwargs = _NO_KWARGS,
    ) -> Ids:
        """Ids for a prompt that was logged without; where there is no template, `role: text` lines."""
        if self._template_sources:
            return self.encode(self.render_prompt(messages, tools, chat_template_kwargs))
        lines = [f"{message.role}: {_reply_text(message)}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def encode_reply(self, message: Message) -> Ids:
        """Ids for an output that was logged without: its text, then each tool call as a line of JSON."""
        return self.encode(_reply_text(message))


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
    """Chat templates by name; a file of its own goes before what the config holds."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return {"default": _read_bytes(file).decode()}
        except UnicodeError as error:
            raise CodecError(f"{file}: expected UTF-8: {error}") from error
    given = config.get("chat_template") or []
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    except (TypeError, KeyError) as error:
        expected = "chat_template: expected a string or a list of named templates"
        raise CodecError(f"{path / 'tokenizer_config.json'}: {expected}") from error


def _read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, which templates use by name."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: v.get("content") if isinstance(v, dict) else v for name, v in tokens.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_stop_ids(path: Path, config: Mapping[str, Any], added: Mapping[str, int]) -> frozenset[int]:
    """The end-of-text tokens of the tokenizer and, where there is one, of the generation config."""
    end = _read_special_tokens(config).get("eos_token", "")
    ends = {added[end]} if end in added else set()
    file = path / "generation_config.json"
    if file.exists():
        given = _read_config(file).get("eos_token_id") or []
        ends.update(given if isinstance(given, list) else [given])
    return frozenset(ends)


def _contains_step(part: object, kind: str) -> bool:
    """Whether a step of a tokenizer, or one inside it, is of a kind."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_contains_step(inner, kind) for inner in part.values())
    return isinstance(part, list) and any(_contains_step(inner, kind) for inner in part)


def _byte_level_alphabet() -> dict[str, bytes]:
    """The byte that each letter of a byte-level token stands for; unprintable ones were moved up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [*shown, *range(256, 256 + len(hidden))]
    return {chr(letter): bytes([byte]) for letter, byte in zip(letters, shown + hidden, strict=True)}


_BYTE_LEVEL_DECODER = _byte_level_alphabet()


def _reply_text(message: Message) -> str:
    calls = [
        to_json({"name": call.name, "arguments": _parse_arguments(call)}, separators=(",", ":"))
        for call in message.tool_calls
    ]
    return "\n".join([message.content, *calls] if message.content else calls)


def _parse_arguments(call: ToolCall) -> Any:
    try:
        # Not the canonical meaning: keys stay in the order the model wrote them.
        value = msgspec.json.decode(call.arguments or "{}")
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
