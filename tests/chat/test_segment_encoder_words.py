"""WordCache: cached words give the ids of the tokenizer, and other texts are left to it."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat import segment_encoder
from branchline.chat.segment_encoder import WordCache
from tests.chat.families import FAMILIES, load_codec, load_tokenizer

every_family = pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_2", "mistral_nemo"])

SPLIT = {"type": "Split", "pattern": {"Regex": r"'s| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"},
         "behavior": "Isolated", "invert": False}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def open_cache(family: str) -> WordCache:
    cache = load_codec(family).segment_encoder.word_cache
    assert cache is not None, f"{family} should be encoded word by word"
    return cache


@every_family
@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.characters(max_codepoint=127)) | st.text("aAsLl1 \n\r\t.'/", max_size=30),
    is_long=st.booleans(),
)
def test_ascii_text_gets_the_ids_of_the_tokenizer(family: str, text: str, is_long: bool) -> None:
    if is_long:
        text *= segment_encoder._LONG_TEXT // max(1, len(text)) + 1
    ids = open_cache(family).encode(text)
    # A text with an added token is never encoded word by word.
    if not any(name in text for name in load_tokenizer(family).added_tokens):
        assert ids is not None
        assert ids.tolist() == load_tokenizer(family).encode(text).tolist()


@every_family
def test_other_text_is_left_to_the_tokenizer(family: str) -> None:
    assert open_cache(family).encode("a caf\u00e9") is None


def test_tokenizers_that_encode_otherwise_have_no_cache() -> None:
    assert {family for family in FAMILIES if load_codec(family).segment_encoder.word_cache is None} == {
        "deepseek_v3",
        "gemma3",
    }


def test_the_number_and_the_length_of_words_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("qwen3")
    known = open_cache("qwen3")
    cache = WordCache(known._split_short, known._split_long, tokenizer.backend)
    monkeypatch.setattr(segment_encoder, "_MAX_WORDS", 50)
    for number in range(40):
        text = " ".join(f"w{chr(97 + number % 26)}{chr(97 + k % 26)}x{k}" for k in range(100)) + "y" * 100
        ids = cache.encode(text)
        assert ids is not None
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert len(cache._ids) <= 50
        assert max(map(len, cache._ids)) <= segment_encoder._MAX_WORD_LENGTH


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, sequence(SPLIT)),
        (None, sequence(BYTE_LEVEL, SPLIT)),
        (None, sequence(SPLIT, {**BYTE_LEVEL, "add_prefix_space": True})),
        (None, sequence(SPLIT, {**BYTE_LEVEL, "use_regex": True})),
        (None, sequence(SPLIT, {"type": "ByteLevel", "add_prefix_space": False})),
        (None, sequence({"type": "Digits", "individual_digits": True}, SPLIT, BYTE_LEVEL)),
        (None, sequence({**SPLIT, "behavior": "Removed"}, BYTE_LEVEL)),
        (None, sequence({**SPLIT, "invert": True}, BYTE_LEVEL)),
        (None, sequence({**SPLIT, "pattern": {"String": " "}}, BYTE_LEVEL)),
        (None, sequence({**SPLIT, "pattern": {"Regex": "("}}, BYTE_LEVEL)),
        ({"type": "Lowercase"}, sequence(SPLIT, BYTE_LEVEL)),
        ({"type": "NFKC"}, sequence(SPLIT, BYTE_LEVEL)),
        (None, BYTE_LEVEL),
        (None, None),
        # Qwen3 splits a text differently: the probes find it out.
        (None, sequence(SPLIT, BYTE_LEVEL)),
    ],
)
def test_a_tokenizer_that_does_more_than_split_into_words_has_no_cache(
    normalizer: Any, pre_tokenizer: Any
) -> None:
    tokenizer = copy(load_tokenizer("qwen3"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    assert WordCache.open(tokenizer) is None
