"""An index finds exactly the patterns that a text contains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.timelines.text_index import TextIndex

LETTERS = st.text("abé\u2028", max_size=60)


@given(
    st.lists(LETTERS, max_size=20),
    LETTERS,
    st.lists(st.integers(0, 19), max_size=3),
    st.booleans(),
    st.sampled_from([0, 9]),
)
def test_the_index_finds_what_a_search_for_each_pattern_finds(
    patterns: list[str], text: str, quoted: list[int], short: bool, others: int
) -> None:
    least = 8 if short else 16
    text += "".join(patterns[index] + "b" for index in quoted if index < len(patterns))
    long_enough = {pattern for pattern in patterns if len(pattern) >= least}
    long_enough |= {f"{number} is another pattern" for number in range(others)}
    index = TextIndex((pattern.encode() for pattern in long_enough), short=short)
    assert index.find(text.encode()) == {pattern.encode() for pattern in long_enough if pattern in text}


@pytest.mark.parametrize("short", [True, False])
def test_an_empty_index_and_a_short_text_have_no_match(short: bool) -> None:
    assert TextIndex((), short=short).find(b"x" * 100) == set()
    assert TextIndex([b"x" * 16], short=short).find(b"xx") == set()


def test_patterns_with_a_common_beginning_are_told_apart() -> None:
    patterns = [b"I will read the file number %d" % number for number in range(300)]
    index = TextIndex(patterns)
    assert index.find(b"... " + patterns[123] + b" ...") == {patterns[1], patterns[12], patterns[123]}
