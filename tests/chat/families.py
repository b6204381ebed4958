"""Real tokenizers for tests, and what the replies of each family may look like."""

from __future__ import annotations

import shutil
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
    # One call at a time, and its template shows a call without the text next to it.
    "llama3_2": ReplyStyle(max_tool_calls=1, text_with_tool_calls=False),
    "mistral_nemo": ReplyStyle(max_tool_calls=1, text_with_tool_calls=False),
    # Its template loses the end of a single call; the renderers codec is for its calls.
    "deepseek_v3": ReplyStyle(max_tool_calls=0),
    "gemma3": ReplyStyle(max_tool_calls=0),
}


def load_tokenizer(name: str) -> TokenizerDir:
    """Returns the tokenizer of a family, opened once; skips the test if it was not fetched."""
    if not (CACHE / name / "tokenizer.json").exists():
        why = "npm is missing" if shutil.which("npm") is None else "run scripts/fetch_tokenizers.py"
        pytest.skip(f"no real {name} tokenizer: {why}")
    return _open(name)


@cache
def load_codec(name: str) -> GenericCodec:
    """Returns the codec of a family; skips the test if its tokenizer was not fetched."""
    return GenericCodec(load_tokenizer(name))


def load_codec_with_template(template: str, family: str = "qwen3", **options: Any) -> GenericCodec:
    """Returns a codec with a family's tokenizer and another chat template."""
    return GenericCodec(load_tokenizer(family), chat_template=template, **options)


@cache
def _open(name: str) -> TokenizerDir:
    return TokenizerDir.open(CACHE / name)
