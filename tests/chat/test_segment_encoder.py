"""SegmentEncoder: the same ids as the tokenizer, and splits that lose no character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat import segment_encoder, tokenizer
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.core.reader import replace_surrogates
from tests.chat.families import FAMILIES, load_codec, load_tokenizer

FRAGMENTS = ["'s", "'LL", "I'm", " ", "  ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2014", "\u2019s",
             "é", "ß", "\u017f", "\u212a", "Ω", "ы", "中文", "ｆｕ", "🙂", "👩\u200d💻", "e\u0301", "\u0301",
             "\u2028", "\u200b", "\x1c", "\x85", "\x00", "\ufffd", "123456", "12", "{", '"a": ', "->", "==",
             "...", "</", "def f(x):\n", "\ufb01"]  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)


def texts(family: str) -> st.SearchStrategy[str]:
    """Generates texts with unusual characters and added tokens."""
    added = sorted(load_tokenizer(family).added_tokens)
    fragments = st.sampled_from(FRAGMENTS) | st.sampled_from(added) | st.text(max_size=6)
    return st.lists(fragments).map("".join).map(replace_surrogates)


@every_family
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_text_gets_the_ids_of_the_tokenizer(family: str, data: st.DataObject) -> None:
    codec, text = load_codec(family), data.draw(texts(family))
    for _ in range(2):
        assert codec.segment_encoder.encode(text).tolist() == codec.tokenizer.encode(text).tolist()


@every_family
def test_real_tokenizers_encode_by_segment_if_added_tokens_split_texts(family: str) -> None:
    tokenizer = load_tokenizer(family)
    assert load_codec(family).segment_encoder.encodes_by_segment == tokenizer.splits_at_added_tokens


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ids_are_split_at_the_nearest_token_end_to_the_right(data: st.DataObject) -> None:
    encoder = load_codec("qwen3").segment_encoder
    text = encoder.normalize(data.draw(texts("qwen3")))
    offsets = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in pairwise([0, *offsets, len(text)])]
    parts, moves = encoder.encode_parts(pieces, None)
    assert [token for part in parts for token in part.tolist()] == encoder.encode(text).tolist()
    for number, (offset, move) in enumerate(zip(offsets, moves, strict=True)):
        assert move >= 0
        end = offset + move
        prefix = [token for part in parts[: number + 1] for token in part.tolist()]
        # A token may end inside a character; the character then counts to the left.
        decoded = b"".join(map(load_tokenizer("qwen3").token_bytes, prefix)).decode("utf-8", "ignore")
        assert len(decoded) in (end, end - 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_long_texts_are_converted_in_pieces_with_the_same_result(data: st.DataObject) -> None:
    encoder = load_codec("qwen3").segment_encoder
    text = data.draw(texts("qwen3"))
    offset = data.draw(st.integers(0, len(text)))
    parts = [text[:offset], text[offset:]]
    expected_ids, expected_moves = encoder.encode_parts(parts, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_PIECE_IDS", data.draw(st.integers(1, 5)))
        patch.setattr(segment_encoder, "_MAX_WORDS_TEXT", data.draw(st.integers(0, 9)))
        encoder._cache.clear()
        ids, moves = encoder.encode_parts(parts, None)
    assert [part.tolist() for part in ids] == [part.tolist() for part in expected_ids]
    assert moves == expected_moves


def test_cached_segments_are_not_encoded_again() -> None:
    encoder = SegmentEncoder(load_tokenizer("qwen3"))
    encoder.encode("<|im_start|>user\nsome words<|im_end|>")
    before = encoder.encoded_tokens
    encoder.encode("<|im_start|>user\nsome words<|im_end|>\nmore")
    assert encoder.encoded_tokens - before == len(load_tokenizer("qwen3").encode("\nmore"))
