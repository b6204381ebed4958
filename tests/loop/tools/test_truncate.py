"""Scenario D3, and the exact fit of D4."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from branchline.chat.base import Codec
from branchline.chat.toy import ToyCodec
from branchline.core.errors import InputError
from branchline.core.token_arrays import Ids
from branchline.loop.tools.truncate import TruncateSide, truncate
from tests.chat.families import load_codec

TOY = ToyCodec()
SIDES: tuple[TruncateSide, ...] = ("left", "right", "middle")


def by_tokens(text: str, limit: int, side: TruncateSide, codec: Codec = TOY) -> str:
    return truncate(text, limit, side, "tokens", encode=codec.encode, decode=codec.decode)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "(truncated)...fgh"),
        ("right", "abc...(truncated)"),
        ("middle", "ab...(truncated)...h"),
    ],
)
def test_the_mark_stands_where_something_is_missing(side: TruncateSide, expected: str) -> None:
    assert truncate("abcdefgh", 3, side, "characters") == expected
    assert by_tokens("abcdefgh", 3, side) == expected


@pytest.mark.parametrize("side", SIDES)
def test_a_text_that_exactly_fits_is_kept(side: TruncateSide) -> None:
    assert truncate("abcdefgh", 8, side, "characters") == "abcdefgh"
    assert by_tokens("abcdefgh", 8, side) == "abcdefgh"
    assert by_tokens("", 0, side) == ""


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "(truncated)..."), ("right", "...(truncated)"), ("middle", "...(truncated)...")],
)
def test_a_limit_of_nothing_leaves_the_mark(side: TruncateSide, expected: str) -> None:
    assert truncate("abc", 0, side, "characters") == expected
    assert by_tokens("abc", 0, side) == expected


def test_the_unit_is_honoured() -> None:
    assert truncate("ééé", 3, "right", "characters") == "ééé"
    assert by_tokens("ééé", 3, "right") == "é...(truncated)", "three bytes are one letter and a half"


def test_a_cut_never_falls_inside_a_character() -> None:
    text = "a🙂b"
    for limit in (1, 2, 3, 4):
        assert by_tokens(text, limit, "right") == "a...(truncated)"
    assert by_tokens(text, 5, "right") == "a🙂...(truncated)"
    assert by_tokens(text, 4, "left") == "(truncated)...b"
    assert by_tokens(text, 5, "left") == "(truncated)...🙂b"


def test_where_a_tokenizer_changes_a_text_what_the_model_would_see_is_cut() -> None:
    def encode(text: str) -> Ids:
        return TOY.encode(text.lower())

    assert truncate("ABCDEF", 6, "left", "tokens", encode=encode, decode=TOY.decode) == "ABCDEF"
    cut = truncate("ABCDEF", 4, "middle", "tokens", encode=encode, decode=TOY.decode)
    assert cut == "ab...(truncated)...ef"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"limit": -1}, "limit: got -1, expected 0 or more"),
        ({"side": "top"}, "side: got 'top', expected one of left, right, middle"),
        ({"unit": "words"}, "unit: got 'words', expected tokens or characters"),
        ({"unit": "tokens"}, "expected encode and decode with it"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        truncate(**{"text": "abc", "limit": 1, "side": "left", "unit": "characters", **arguments})


def parts(shown: str, side: TruncateSide) -> tuple[str, str]:
    """What was kept, read back from what is shown. Only for texts without the mark's letters in them."""
    before, _, behind = shown.partition("(truncated)")
    assert side == "left" or before.endswith("...")
    assert side == "right" or behind.startswith("...")
    return before.removesuffix("..."), behind.removeprefix("...")


TEXTS = st.text(st.sampled_from("ab \né🙂日\ufffd\u0301"), max_size=30)


@given(TEXTS, st.integers(0, 40), st.sampled_from(SIDES))
@example("\ufffd", 2, "middle")
def test_characters_kept_are_the_texts_own_and_as_many_as_allowed(
    text: str, limit: int, side: TruncateSide
) -> None:
    shown = truncate(text, limit, side, "characters")
    if len(text) <= limit:
        assert shown == text
        return
    head, tail = parts(shown, side)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == limit
    assert len(head) - len(tail) in {"left": (-limit,), "right": (limit,), "middle": (0, 1)}[side]


@given(TEXTS, st.integers(0, 60), st.sampled_from(SIDES))
@example("\ufffd", 2, "middle")
@example("\ufffd\ufffd", 4, "right")
def test_tokens_kept_are_the_texts_own_and_never_more_than_allowed(
    text: str, limit: int, side: TruncateSide
) -> None:
    shown = by_tokens(text, limit, side)
    if len(text.encode()) <= limit:
        assert shown == text
        return
    head, tail = parts(shown, side)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) <= len(text)
    kept = len(head.encode()) + len(tail.encode())
    assert kept <= limit
    if "\ufffd" not in text:
        # All but the half characters at the cuts.
        assert kept > limit - (3 if side != "middle" else 6) - 1


@pytest.mark.parametrize("family", ["qwen3", "llama3_2", "gemma3"])
def test_real_tokenizers_keep_whole_characters_too(family: str) -> None:
    codec = load_codec(family)

    @given(st.text(st.sampled_from("abc \n1é🙂日本語𓀀"), min_size=1, max_size=40), st.integers(0, 40))
    def check(text: str, limit: int) -> None:
        whole = codec.decode(codec.encode(text))
        for side in SIDES:
            shown = by_tokens(text, limit, side, codec)
            if len(codec.encode(text)) <= limit:
                assert shown == text
                continue
            head, tail = parts(shown, side)
            assert whole.startswith(head)
            assert whole.endswith(tail)
            assert "\ufffd" not in shown
            assert len(head) + len(tail) <= len(whole)

    check()
    text = "one two three four five six"
    ids = codec.encode(text)
    assert by_tokens(text, len(ids), "middle", codec) == text
    assert by_tokens(text, 2, "right", codec) == codec.decode(ids[:2]) + "...(truncated)"
