"""Words that are looked up give the ids that the tokenizer gives, or are left to it."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.generic import pretoken_cache
from branchline.chat.generic.pretoken_cache import PretokenCache, pretoken_pattern
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.json_fields import replace_surrogates
from tests.chat.families import load_codec

CACHEABLE = ["qwen3", "qwen2_5", "llama3_2", "mistral_nemo"]
every_family = pytest.mark.parametrize("family", CACHEABLE)

GPT2_LIKE = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Split", "pattern": {"Regex": GPT2_LIKE}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def pre_tokenizer_steps(*given: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(given)}


@cache
def open_cache(family: str) -> tuple[TokenizerDir, PretokenCache]:
    tokenizer = load_codec(family).tokenizer
    encoder = PretokenCache.create(
        tokenizer.pretoken_pattern, tokenizer.encode_batch, tokenizer.pretoken_ends
    )
    assert encoder is not None, f"{family} should be encoded by words"
    return tokenizer, encoder


FRAGMENTS = ["'s", "'LL", "I'm", " ", "  ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2014", "\u2019s",
          "\u201c", "é", "ß", "\u017f", "\u212a", "Ω", "ы", "中文", "ｆｕ", "🙂", "👩\u200d💻", "e\u0301",
          "\u0301", "\u2028", "\u200b", "\x1c", "\x85", "\x00", "\ufffd", "123456", "12", "{", '"a": ', "->",
          "==", "...", "</", "def f(x):\n", "\ufb01"]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6) | st.text("aA1 \n\r.'", max_size=8)).map(
    "".join
)


@every_family
@settings(max_examples=400)
@given(text=texts.map(replace_surrogates))
def test_any_text_gets_the_ids_that_the_tokenizer_gives(family: str, text: str) -> None:
    tokenizer, encoder = open_cache(family)
    assert encoder.encode(text).tolist() == tokenizer.encode(text).tolist()


@every_family
def test_every_letter_of_unicode_between_others_is_encoded_as_the_tokenizer_does(family: str) -> None:
    tokenizer, encoder = open_cache(family)
    letters = [chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000]
    for frame in ("a{}b", " {} {}1", "\n{}\n", "{}'s."):
        text = "".join(frame.replace("{}", letter) for letter in letters)
        assert encoder.encode(text).tolist() == tokenizer.encode(text).tolist()
        for letter in letters[:: 7 if len(letters) > 1000 else 1]:
            lone = frame.replace("{}", letter)
            assert encoder.encode(lone).tolist() == tokenizer.encode(lone).tolist()


@every_family
def test_most_text_never_reaches_the_tokenizer_twice(family: str) -> None:
    tokenizer, _ = open_cache(family)
    asked: list[str] = []

    def encode_all(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return tokenizer.encode_batch(texts)

    encoder = PretokenCache.create(tokenizer.pretoken_pattern, encode_all, tokenizer.pretoken_ends)  # type: ignore[arg-type]
    assert encoder is not None
    asked.clear()
    text = "The cat sat — on “the” mat.\nThe cat sat on 中文.\nThe mat is flat.\n"
    encoder.encode(text)
    assert asked.count("The cat sat on 中文.\n") == 1
    asked.clear()
    encoder.encode(text)
    assert asked == ["The cat sat on 中文.\n"], "only the line with letters that are not settled"


def test_the_table_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = open_cache("qwen3")
    encoder = PretokenCache.create(
        tokenizer.pretoken_pattern, tokenizer.encode_batch, tokenizer.pretoken_ends
    )
    assert encoder is not None
    monkeypatch.setattr(pretoken_cache, "_MAX_PRETOKENS", 50)
    assert len(encoder.encode(" ".join(f"{chr(97 + n % 26)}{n}" for n in range(200))))
    assert len(encoder._ids) <= 50
    for number in range(40):
        text = (
            " ".join(f"w{chr(97 + number % 26)}{chr(97 + k)}x{number * 7 + k}" for k in range(10)) + "y" * 100
        )
        assert encoder.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert len(encoder._ids) <= 50
    assert not any(len(word) > pretoken_cache._MAX_PRETOKEN_CHARS for word in encoder._ids)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizer_steps(SPLIT)),
        (None, pre_tokenizer_steps(BYTES, SPLIT)),
        (None, pre_tokenizer_steps(SPLIT, {**BYTES, "add_prefix_space": True})),
        (None, pre_tokenizer_steps(SPLIT, {**BYTES, "use_regex": True})),
        (None, pre_tokenizer_steps(SPLIT, {"type": "ByteLevel", "add_prefix_space": False})),
        (None, pre_tokenizer_steps({"type": "Digits", "individual_digits": True}, SPLIT, BYTES)),
        (None, pre_tokenizer_steps({**SPLIT, "behavior": "Removed"}, BYTES)),
        (None, pre_tokenizer_steps({**SPLIT, "invert": True}, BYTES)),
        (None, pre_tokenizer_steps({**SPLIT, "pattern": {"String": " "}}, BYTES)),
        ({"type": "Lowercase"}, pre_tokenizer_steps(SPLIT, BYTES)),
        ({"type": "NFKC"}, pre_tokenizer_steps(SPLIT, BYTES)),
        (None, BYTES),
        (None, None),
    ],
)
def test_a_tokenizer_that_does_more_than_split_has_no_words(
    normalizer: object, pre_tokenizer: object
) -> None:
    assert pretoken_pattern(normalizer, pre_tokenizer) is None
    assert pretoken_pattern(None, pre_tokenizer_steps(SPLIT, BYTES)) == GPT2_LIKE


@pytest.mark.parametrize(
    "pattern",
    [r"(?<=a)b|.", r"^a|.", r"a$|.", r"\bword|.", r"\d+|.", r"\w+|.", r"[\S]+|\s", r"[a&&b]|.", r"\P{L}|.",
     r"[[a]b]|.", r"\p{Han}+|.", r"(", r"[a"],
)  # fmt: skip
def test_an_expression_that_python_says_otherwise_is_left_to_the_tokenizer(pattern: str) -> None:
    assert PretokenCache.create(pattern, lambda texts: [[0] for _ in texts], lambda text: [len(text)]) is None


def test_a_tokenizer_that_disagrees_is_left_alone() -> None:
    tokenizer, _ = open_cache("qwen3")

    def merging(texts: list[str]) -> list[list[int]]:
        """Joins what the expression would part."""
        return [
            [7] if re.search(r"\r\na", text) else ids
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True)
        ]

    assert PretokenCache.create(tokenizer.pretoken_pattern, merging, tokenizer.pretoken_ends) is None  # type: ignore[arg-type]


def test_where_lines_cannot_be_told_apart_a_text_is_encoded_whole() -> None:
    tokenizer, _ = open_cache("qwen3")
    asked: list[str] = []

    def encode_all(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return tokenizer.encode_batch(texts)

    def word_ends(text: str) -> list[int]:
        """As GPT-2's words: two line breaks before a letter are two words, two at the end are one."""
        ends = tokenizer.pretoken_ends(text)
        return [end for end in ends if not text[:end].endswith("\n\n")] if "\n\n" in text[-2:] else ends

    encoder = PretokenCache(tokenizer.pretoken_pattern or "", encode_all, word_ends)  # type: ignore[arg-type]
    assert encoder._line_start_chars() == ""
    asked.clear()
    encoder.encode("one\ntwo 中\nthree")
    assert asked == ["one\ntwo 中\nthree"]


@every_family
def test_a_line_that_begins_with_what_a_word_may_end_with_is_no_line_of_its_own(family: str) -> None:
    tokenizer, encoder = open_cache(family)
    assert ("/" in encoder._line_start_chars()) is (family != "mistral_nemo")
    for sign in map(chr, range(0x21, 0x7F)):
        for text in (f"漢字.\n{sign}usr/bin", f"漢/\n{sign}{sign}a", f"漢\n{sign}1\n{sign}\n漢"):
            assert encoder.encode(text).tolist() == tokenizer.encode(text).tolist()
