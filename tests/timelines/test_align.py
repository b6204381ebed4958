"""Finding the end of an output in a prompt that spells it with other ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline.core.message import Message
from branchline.core.runs import as_ids
from branchline.timelines.align import Cut, Method, TokenBytes, find_end

WORDS = {1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"abc", 6: b"bc", 9: b"<end>", 8: b"d"}


def find(
    prompt: list[int],
    before: list[int],
    said: list[int],
    token_bytes: TokenBytes | None = WORDS.__getitem__,
    *,
    finish: str = "stop",
    answer: str = "abc",
    following: str = "d",
) -> Cut:
    return find_end(
        as_ids(prompt),
        as_ids(before),
        as_ids(said),
        finish=finish,
        following=[Message("user", following)],
        answer=Message("assistant", answer),
        token_bytes=token_bytes,
    )


def test_identical_ids_need_nothing() -> None:
    assert find([7, 1, 6, 9, 8], [7], [1, 6, 9], None) == Cut(4, Method.IDENTICAL)


def test_equal_bytes_are_found_whatever_the_ids() -> None:
    assert find([7, 3, 4, 9, 8], [7], [1, 6, 9]) == Cut(4, Method.BYTES)
    assert find([7, 5, 8], [7], [1, 2, 4], finish="length") == Cut(2, Method.BYTES)
    assert find([7, 5], [7], [1, 6], finish="length") == Cut(2, Method.BYTES)


def test_a_token_that_crosses_the_end_is_no_boundary() -> None:
    assert find([7, 1, 6, 8], [7], [3], finish="length").method == Method.ESTIMATE


def test_without_a_tokenizer_the_stop_token_marks_the_end() -> None:
    assert find([7, 5, 9, 8], [7], [1, 6, 9], None) == Cut(3, Method.STOP_TOKEN)


def test_a_changed_prefix_is_crossed_by_the_ids_around_the_output() -> None:
    assert find([30, 31, 7, 1, 6, 9, 8], [20, 7], [1, 6, 9], None).method == Method.ESTIMATE
    long = [*range(100, 110)]
    assert find([30, *long, 1, 6, 9, 8], [20, 21, *long], [1, 6, 9], None) == Cut(14, Method.ANCHOR)


def test_what_nothing_decides_is_estimated_and_stays_in_range() -> None:
    assert find([7, 5, 8], [7], [1, 6], None, finish="length") == Cut(2, Method.ESTIMATE)
    assert find([7], [7], [1, 6], None, finish="length") == Cut(1, Method.ESTIMATE)
    assert find([], [7], [1], None, finish="length") == Cut(0, Method.ESTIMATE)


token_lists = st.lists(st.sampled_from(sorted(WORDS)), max_size=8)


@given(token_lists, token_lists, token_lists, token_lists, st.booleans())
def test_a_cut_by_bytes_splits_the_text_where_the_output_ends(
    before: list[int], said: list[int], prompt_tail: list[int], rest: list[int], startswith: bool
) -> None:
    prompt = [*before, *prompt_tail, *rest] if startswith else [*prompt_tail, *rest]
    cut = find(prompt, before, said)
    assert 0 <= cut.end <= len(prompt)
    if cut.method in (Method.BYTES, Method.IDENTICAL):
        spelled = b"".join(WORDS[token] for token in prompt[len(before) : cut.end])
        assert spelled == b"".join(WORDS[token] for token in said)
