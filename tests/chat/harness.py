"""Shared by the codec tests: small tokenizers on disk, and a session that is driven with text and ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from branchline import Generation, Message, Request, Session, ToolCall
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import as_ids
from branchline.tree.tree import Node, Turn

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)
HELLO_MERGES = (("l", "o"), ("l", "lo"), ("e", "llo"), ("h", "ello"), ("Ġ", "hello"))
"""With these `hello` is one token, and so are `h` and `ello`."""


def save_byte_level(
    path: Path,
    *,
    special: Sequence[str] = ("<|start|>", "<|end|>"),
    added: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
    **config: Any,
) -> Path:
    """Saves a byte-level BPE tokenizer whose config has these entries."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in added])
    tokenizer.enable_truncation(4)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


SpaceRule = Literal["prepend", "always", "first", "never"]
"""Where a sentencepiece-style tokenizer inserts a space: `prepend` is a normalizer (Llama 2), the others are
schemes of the Metaspace pre-tokenizer."""


def save_sentencepiece(
    path: Path,
    space: SpaceRule,
    *,
    special: Sequence[str] = ("<s>", "</s>"),
    lstrip: bool = False,
    rstrip: bool = False,
    **config: Any,
) -> Path:
    """Saves a tokenizer with spaces as `▁` and byte fallback, whose added tokens may remove spaces."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for char in [*map(chr, range(33, 127)), "▁", "\n"]:
        vocab[char] = len(vocab)
    merges = [("▁", "▁"), ("l", "o"), ("e", "l"), ("el", "lo"), ("h", "ello"), ("▁", "hello"),
              ("\n", "\n"), ("t", "h"), ("th", "e"), ("▁", "the"), ("T", "O"), ("[", "TO"), ("a", "n"),
              ("▁", "[TO")]  # fmt: skip
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    if space == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=lstrip, rstrip=rstrip) for name in special]
    )
    path.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def user(text: str) -> Message:
    return Message("user", text)


def system(text: str) -> Message:
    return Message("system", text)


def assistant(text: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, tool_calls=calls, reasoning_content=reasoning)


def without_whitespace(text: str) -> str:
    return "".join(text.split())


class SessionDriver:
    """A session with a real codec, driven by hand-written ids and texts."""

    def __init__(self, codec: GenericCodec, **options: Any) -> None:
        self.codec = codec
        self.session = Session("s", codec, **options)

    def encode(self, text: str) -> list[int]:
        return self.codec.tokenizer.encode(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.codec.decode(as_ids(ids))

    def prepare(self, *messages: Message, **fields: Any) -> Turn:
        return self.session.prepare(Request(messages, **fields))

    def render(self, *messages: Message, **fields: Any) -> str:
        return self.decode(self.prepare(*messages, **fields).prompt_ids.tolist())

    def commit_reply(
        self, messages: list[Message], ids: list[int], finish_reason: str = "stop", **fields: Any
    ) -> Node:
        turn = self.prepare(*messages, **fields)
        call = self.session.commit(turn, Generation(as_ids(ids), finish_reason=finish_reason)).call
        return self.session.tree.nodes[call.outputs[0]]
