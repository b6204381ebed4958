"""Finding the end of an output in a prompt that spells it with other ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.timelines.alignment import Alignment, AlignmentMethod, TokenBytes, align_output

TOKEN_BYTES = {1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"abc", 6: b"bc", 9: b"<end>", 8: b"d"}


def align(
    prompt: list[int],
    before: list[int],
    said: list[int],
    token_bytes: TokenBytes | None = TOKEN_BYTES.__getitem__,
    *,
    finish_reason: str = "stop",
    message_text: str = "abc",
    following: str = "d",
) -> Alignment:
    return align_output(
        as_ids(prompt),
        as_ids(before),
        as_ids(said),
        finish_reason=finish_reason,
        following_messages=[Message("user", following)],
        message=Message("assistant", message_text),
        token_bytes=token_bytes,
    )


def test_identical_ids_need_nothing() -> None:
    assert align([7, 1, 6, 9, 8], [7], [1, 6, 9], None) == Alignment(4, AlignmentMethod.IDENTICAL)


def test_equal_bytes_are_found_whatever_the_ids() -> None:
    assert align([7, 3, 4, 9, 8], [7], [1, 6, 9]) == Alignment(4, AlignmentMethod.BYTES)
    assert align([7, 5, 8], [7], [1, 2, 4], finish_reason="length") == Alignment(2, AlignmentMethod.BYTES)
    assert align([7, 5], [7], [1, 6], finish_reason="length") == Alignment(2, AlignmentMethod.BYTES)


def test_a_token_that_crosses_the_end_is_no_boundary() -> None:
    assert align([7, 1, 6, 8], [7], [3], finish_reason="length").method == AlignmentMethod.ESTIMATE


def test_without_a_tokenizer_the_stop_token_marks_the_end() -> None:
    assert align([7, 5, 9, 8], [7], [1, 6, 9], None) == Alignment(3, AlignmentMethod.STOP_TOKEN)


def test_a_changed_prefix_is_crossed_by_the_ids_around_the_output() -> None:
    assert align([30, 31, 7, 1, 6, 9, 8], [20, 7], [1, 6, 9], None).method == AlignmentMethod.ESTIMATE
    long = [*range(100, 110)]
    assert align([30, *long, 1, 6, 9, 8], [20, 21, *long], [1, 6, 9], None) == Alignment(
        14, AlignmentMethod.ANCHOR
    )


def test_what_nothing_decides_is_estimated_and_stays_in_range() -> None:
    assert align([7, 5, 8], [7], [1, 6], None, finish_reason="length") == Alignment(
        2, AlignmentMethod.ESTIMATE
    )
    assert align([7], [7], [1, 6], None, finish_reason="length") == Alignment(1, AlignmentMethod.ESTIMATE)
    assert align([], [7], [1], None, finish_reason="length") == Alignment(0, AlignmentMethod.ESTIMATE)


token_lists = st.lists(st.sampled_from(sorted(TOKEN_BYTES)), max_size=8)


@given(token_lists, token_lists, token_lists, token_lists, st.booleans())
def test_a_cut_by_bytes_splits_the_text_where_the_output_ends(
    before: list[int], said: list[int], prompt_tail: list[int], rest: list[int], startswith: bool
) -> None:
    prompt = [*before, *prompt_tail, *rest] if startswith else [*prompt_tail, *rest]
    cut = align(prompt, before, said)
    assert 0 <= cut.end <= len(prompt)
    if cut.method in (AlignmentMethod.BYTES, AlignmentMethod.IDENTICAL):
        spelled = b"".join(TOKEN_BYTES[token] for token in prompt[len(before) : cut.end])
        assert spelled == b"".join(TOKEN_BYTES[token] for token in said)
