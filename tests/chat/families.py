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
from branchline.testing.behaviours import Manners

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"

FAMILIES = {
    "qwen3": Manners(),
    "qwen2_5": Manners(),
    # One call at a time, and its template prints a call without the text beside it.
    "llama3_2": Manners(most_calls=1, text_beside_calls=False),
    "mistral_nemo": Manners(most_calls=1, text_beside_calls=False),
    # Its template loses the end of a single call, so its calls are left to the renderers codec.
    "deepseek_v3": Manners(most_calls=0),
    "gemma3": Manners(most_calls=0),
}


def tokenizer_of(name: str) -> TokenizerDir:
    """The tokenizer of a family, read once; skips with a reason where it could not be fetched."""
    if not (CACHE / name / "tokenizer.json").exists():
        why = "npm is missing" if shutil.which("npm") is None else "run scripts/fetch_tokenizers.py"
        pytest.skip(f"no real {name} tokenizer: {why}")
    return _open(name)


@cache
def codec_of(name: str) -> GenericCodec:
    """The codec of a family; skips where `tokenizer_of` does."""
    return GenericCodec(tokenizer_of(name))


def codec_speaking(template: str, family: str = "qwen3", **options: Any) -> GenericCodec:
    """A family's tokenizer with another chat template."""
    tokenizer = copy(tokenizer_of(family))
    tokenizer._sources, tokenizer._templates, tokenizer._dialects = {"default": template}, {}, {}
    return GenericCodec(tokenizer, **options)


@cache
def _open(name: str) -> TokenizerDir:
    return TokenizerDir.open(CACHE / name)
