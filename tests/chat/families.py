"""Real tokenizers for tests: which there are, what their replies may look like, and how to get one."""

from __future__ import annotations

import shutil
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.testing.plans import ReplyStyle

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"

FAMILIES = {
    "qwen3": ReplyStyle(),
    "qwen2_5": ReplyStyle(),
    # One call at a time, and its template prints a call without the text beside it.
    "llama3_2": ReplyStyle(max_tool_calls=1, text_with_tool_calls=False),
    "mistral_nemo": ReplyStyle(max_tool_calls=1, text_with_tool_calls=False),
    # Its template loses the end of a single call, so its calls are left to the renderers codec.
    "deepseek_v3": ReplyStyle(max_tool_calls=0),
    "gemma3": ReplyStyle(max_tool_calls=0),
}


def load_tokenizer(name: str) -> TokenizerDir:
    """The tokenizer of a family, read once; skips with a reason where it could not be fetched."""
    if not (CACHE / name / "tokenizer.json").exists():
        why = "npm is missing" if shutil.which("npm") is None else "run scripts/fetch_tokenizers.py"
        pytest.skip(f"no real {name} tokenizer: {why}")
    return _open(name)


@cache
def load_codec(name: str) -> GenericCodec:
    """The codec of a family; skips where `tokenizer_of` does."""
    return GenericCodec(load_tokenizer(name))


def load_codec_with_template(template: str, family: str = "qwen3", **options: Any) -> GenericCodec:
    """A family's tokenizer with another chat template."""
    tokenizer = copy(load_tokenizer(family))
    tokenizer._template_sources, tokenizer._chat_templates, tokenizer._template_traits = (
        {"default": template},
        {},
        {},
    )
    return GenericCodec(tokenizer, **options)


@cache
def _open(name: str) -> TokenizerDir:
    return TokenizerDir.open(CACHE / name)
