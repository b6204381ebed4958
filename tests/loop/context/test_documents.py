from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import InputError
from branchline.loop.context.documents import (
    MAX_SEARCH_RESULTS,
    DocumentIndex,
    _highlight,
    chunk_ranges,
    open_index,
)
from tests.chat.families import load_codec

TEXT = " ".join(
    f"item{number} has the colour {colour}." for number in range(40) for colour in ("red", "blue")
)


def build(text: str, chunk_size: int = 120, overlap: int = 0) -> DocumentIndex:
    return DocumentIndex(text, chunk_ranges(text, chunk_size, overlap, len))


texts = st.text("ab \n\té漢", max_size=200)


@given(texts, st.integers(1, 30), st.integers(0, 29))
def test_chunks_cover_the_document_and_none_is_too_long(text: str, chunk_size: int, overlap: int) -> None:
    overlap = min(overlap, chunk_size - 1)
    ranges = chunk_ranges(text, chunk_size, overlap, len)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(text)
    joined, covered = "", 0
    for start, end in ranges:
        assert start <= covered, "no gap"
        assert end > covered or not text, "each chunk has something new"
        assert covered - start <= overlap
        assert end - start <= chunk_size
        joined += text[covered:end]
        covered = end
    assert joined == text


@given(texts, st.integers(2, 30))
def test_chunks_are_cut_between_words_that_fit_a_chunk(text: str, chunk_size: int) -> None:
    longest = max((len(word) for word in re.findall(r"\S+\s*|\s+", text)), default=0)
    if longest <= chunk_size:
        for start, _ in chunk_ranges(text, chunk_size, 0, len)[1:]:
            assert text[start - 1].isspace()


@settings(max_examples=20)
@given(st.text("word sentence. ", min_size=50, max_size=400), st.integers(3, 40))
def test_chunks_by_a_real_tokenizer_have_about_the_requested_tokens(text: str, chunk_size: int) -> None:
    codec = load_codec("qwen3")
    ranges = chunk_ranges(text, chunk_size, 0, lambda part: len(codec.encode(part)))
    for start, end in ranges:
        words = re.findall(r"\S+\s*|\s+", text[start:end])
        assert sum(len(codec.encode(word)) for word in words) <= chunk_size or len(words) == 1


@pytest.mark.parametrize(
    ("chunk_size", "overlap", "problem"),
    [(0, 0, "chunk_size: got 0"), (5, 5, "overlap: got 5, expected 0 or more and less"), (5, -1, "overlap")],
)
def test_sizes_that_make_no_chunks_are_refused(chunk_size: int, overlap: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        chunk_ranges("a b", chunk_size, overlap, len)


def test_a_search_returns_the_most_relevant_chunks_with_highlights() -> None:
    index = build(TEXT)
    hits = index.search("item17 colour")
    assert "item17" in index.read(hits[0].chunk_id)
    assert "**item17**" in hits[0].highlights
    scores = [hit.relevance_score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert len(index.search("colour")) == min(MAX_SEARCH_RESULTS, len(index))


@pytest.mark.parametrize("query", ["", "   ", "!!", "nowhere", 'body:"', "(((", "AND", "NOT red AND", "é"])
def test_a_query_is_never_an_error(query: str) -> None:
    build(TEXT).search(query)


def test_operators_of_the_query_syntax_are_words() -> None:
    index = build("salt and pepper")
    assert index.search("NOT salt")[0].chunk_id == 0


def test_an_empty_document_has_one_empty_chunk() -> None:
    index = build("")
    assert (len(index), index.read(0), index.search("a")) == (1, "", [])


def test_highlights_count_bytes() -> None:
    class Span:
        def __init__(self, start: int, end: int) -> None:
            self.start, self.end = start, end

    assert _highlight("é red é", [Span(3, 6)]) == "é **red** é"
    hit = build("ééé red 漢 blue").search("blue")[0]
    assert hit.highlights.endswith("漢 **blue**")


def test_equal_indexes_are_shared() -> None:
    one = open_index(TEXT, 100, 10, len)
    assert open_index(TEXT, 100, 10, len) is one
    assert open_index(TEXT, 100, 11, len) is not one
    assert open_index(TEXT + "!", 100, 10, len) is not one
