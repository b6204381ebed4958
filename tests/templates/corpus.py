"""The corpus of real chat templates, each with a tokenizer that knows the control tokens in its source.

The templates come without their tokenizers. Which tokens a template's tokenizer has can be read from its
source, so each template gets a small vocabulary with these added tokens.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from tests.chat.families import CACHE as TOKENIZERS_DIR
from tests.templates.stop_tokens import declared_stop_tokens

TEMPLATES_DIR = TOKENIZERS_DIR.parent / "templates"
_DOCS = Path(__file__).resolve().parents[2] / "docs"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text into words as Qwen's tokenizers do."""

_SPECIAL_TOKEN = re.compile(
    r"<\|[^<>|\n'{} ]{1,40}\|?>"  # <|im_start|>, <|turn>, <|"|>
    r"|<[^<>|\n'{}/ ]{1,40}\|>"  # <turn|>
    r"|<｜[^<>｜\n'{}]{1,40}｜>"  # <｜User｜>
    r"|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_(?:turn|image|utterance)>|<seed:[a-z:_]+>"
    r"|\[/?(?:[A-Z]+_)*[A-Z]{3,}\]|\[gMASK\]|<sop>"  # [INST], [TOOL_CALLS]
    r"|\[\|[a-z]+\|\]"  # EXAONE
    r"|\]~!?b\d?[\[\]]|\[e~\[|<(?:beginning|end)_of_sentence>"  # MiniMax
    r"|<SPECIAL_\d+>|<sep>|</?(?:assistant|user|system)>"  # Nemotron, Reka, Laguna
)
_PLAIN_TOKEN = re.compile(
    r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value|seed:tool_call|minimax:tool_call)>"
)
"""Tokens that tokenizers add without marking them as special."""
BOS, EOS = "<|zq_bos|>", "<|zq_eos|>"
REQUIRED_ARGUMENTS: dict[str, dict[str, Any]] = {
    # It shows these texts in place of the tools and the time.
    "llama_cpp/fireworks-ai-llama-3-firefunction-v2": {
        "functions": '[{"name": "work", "parameters": {"type": "object"}}]',
        "datetime": "1 May 2025",
    },
}
"""The arguments without which a template refuses every conversation."""
_THINKING_ARGUMENTS: dict[str, dict[str, Any]] = {
    "llama_cpp/MiniMax-M3": {"thinking_mode": "enabled"},
    "llama_cpp/Qwen-QwQ-32B": {"enable_thinking": True},
    "llama_cpp/deepseek-ai-DeepSeek-V3.1": {"thinking": True},
    "llama_cpp/deepseek-ai-DeepSeek-V3.2": {"thinking": True},
    "llama_cpp/deepseek-ai-DeepSeek-V4": {"thinking": True},
    "llama_cpp/deepseek-ai-DeepSeek-V4-Flash-0731": {"thinking": True},
    "llama_cpp/google-gemma-4-31B-it": {"enable_thinking": True},
    "llama_cpp/google-gemma-4-31B-it-interleaved": {"enable_thinking": True},
    "llama_cpp/poolside-Laguna-XS.2": {"enable_thinking": True},
    "llama_cpp/poolside-Laguna-XS-2.1": {"enable_thinking": True},
    "llama_cpp/tencent-Hy3": {"reasoning_effort": "high"},
    "trl/qwen3_5_nothink": {"enable_thinking": True},
}
"""The arguments with which templates think that do not think without."""


def thinking_name(name: str) -> str:
    """Returns the name under which a template is played with thinking."""
    arguments = _THINKING_ARGUMENTS[name].items()
    return f"{name} ({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments)})"


_THINKING_NAMES = {thinking_name(name): name for name in _THINKING_ARGUMENTS}


def played_names() -> list[str]:
    """Returns the templates that were fetched; those that think only with arguments twice."""
    fetched = template_names()
    return sorted([*fetched, *(played for played, name in _THINKING_NAMES.items() if name in fetched)])


def template_names() -> list[str]:
    """Returns the templates that were fetched, as `collection/name`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in TEMPLATES_DIR.glob("*/*.jinja"))


def template_source(name: str) -> str:
    path = TEMPLATES_DIR / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"no template {name}: run scripts/fetch_templates.py")
    return path.read_text()


def tokens_of(source: str) -> tuple[list[str], list[str]]:
    """Returns the special and the other added tokens that a template writes."""
    special = dict.fromkeys(_SPECIAL_TOKEN.findall(source))
    plain = dict.fromkeys(_PLAIN_TOKEN.findall(source))
    return list(special), [token for token in plain if token not in special]


@cache
def load_template_codec(name: str, **options: Any) -> GenericCodec:
    """Returns the codec of a template of the corpus, with its arguments."""
    source = _THINKING_NAMES.get(name, name)
    kwargs = _THINKING_ARGUMENTS[source] if source != name else REQUIRED_ARGUMENTS.get(name)
    return GenericCodec(load_template_tokenizer(source), default_chat_template_kwargs=kwargs, **options)


@cache
def load_template_tokenizer(name: str, *, declares_stops: bool = True) -> TokenizerDir:
    """Returns a tokenizer with the template and the added tokens of its source. `declares_stops`: its files
    declare the stop tokens of the real model, if they are known; else only an invented `eos_token`."""
    source = template_source(name)
    special, plain = tokens_of(source)
    stops = (declares_stops and declared_stop_tokens(name)) or (EOS,)
    tokenizer = Tokenizer.from_str(_base_tokenizer())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*special, BOS, EOS)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in plain])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in stops])
    path = TEMPLATES_DIR / ("tokenizers_with_stops" if declares_stops else "tokenizers_without_stops") / name
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(source)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": stops[0]}))
    stop_ids = [tokenizer.token_to_id(token) for token in stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return TokenizerDir.open(path)


@cache
def _base_tokenizer() -> str:
    """Returns a byte-level tokenizer with a vocabulary of words from this project's documents."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([path.read_text() for path in sorted(_DOCS.rglob("*.md"))], trainer)
    return tokenizer.to_str()
