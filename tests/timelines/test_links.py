"""Locating the end of an earlier output in a prompt that encodes it with other ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline.core.call import Request
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.timelines.links import Alignment, AlignmentMethod, TokenBytes, align_output
from branchline.timelines.log import LoggedCall, LoggedOutput

TOKEN_BYTES = {1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"abc", 6: b"bc", 9: b"<end>", 8: b"d"}


def align(
    prompt: list[int],
    before: list[int],
    sampled: list[int],
    token_bytes: TokenBytes | None = TOKEN_BYTES.__getitem__,
    *,
    finish_reason: str = "stop",
) -> Alignment:
    question, answer = Message("user", "q"), Message("assistant", "abc")
    output = LoggedOutput(answer, as_ids(sampled), finish_reason=finish_reason)
    earlier = LoggedCall(Request((question,)), (output,), as_ids(before))
    call = LoggedCall(Request((question, answer, Message("user", "d"))), (), as_ids(prompt))
    alignment = align_output(call, earlier, output, 2, token_bytes)
    assert alignment is not None
    return alignment


def test_identical_ids_need_no_tokenizer() -> None:
    assert align([7, 1, 6, 9, 8], [7], [1, 6, 9], None) == Alignment(4, AlignmentMethod.IDENTICAL)


def test_equal_bytes_are_found_with_any_ids() -> None:
    assert align([7, 3, 4, 9, 8], [7], [1, 6, 9]) == Alignment(4, AlignmentMethod.BYTES)
    assert align([7, 5, 8], [7], [1, 2, 4], finish_reason="length") == Alignment(2, AlignmentMethod.BYTES)
    assert align([7, 5], [7], [1, 6], finish_reason="length") == Alignment(2, AlignmentMethod.BYTES)


def test_a_token_that_crosses_the_end_is_no_boundary() -> None:
    assert align([7, 1, 6, 8], [7], [3], finish_reason="length").method == AlignmentMethod.ESTIMATE


def test_without_a_tokenizer_the_stop_token_marks_the_end() -> None:
    assert align([7, 5, 9, 8], [7], [1, 6, 9], None) == Alignment(3, AlignmentMethod.STOP_TOKEN)


def test_an_output_after_a_changed_prefix_is_found_by_the_ids_before_it() -> None:
    assert align([30, 31, 7, 1, 6, 9, 8], [20, 7], [1, 6, 9], None).method == AlignmentMethod.ESTIMATE
    long = [*range(100, 110)]
    assert align([30, *long, 1, 6, 9, 8], [20, 21, *long], [1, 6, 9], None) == Alignment(
        14, AlignmentMethod.ANCHOR
    )


def test_an_estimate_stays_in_range() -> None:
    for prompt, end in (([7, 5, 8], 2), ([7], 1), ([], 0)):
        assert align(prompt, [7], [1, 6], None, finish_reason="length") == Alignment(
            end, AlignmentMethod.ESTIMATE
        )


token_lists = st.lists(st.sampled_from(sorted(TOKEN_BYTES)), max_size=8)


@given(token_lists, token_lists, token_lists, token_lists, st.booleans())
def test_alignment_by_bytes_splits_the_text_at_the_end_of_the_output(
    before: list[int], sampled: list[int], prompt_tail: list[int], rest: list[int], startswith: bool
) -> None:
    prompt = [*before, *prompt_tail, *rest] if startswith else [*prompt_tail, *rest]
    alignment = align(prompt, before, sampled)
    assert 0 <= alignment.end <= len(prompt)
    if alignment.method in (AlignmentMethod.BYTES, AlignmentMethod.IDENTICAL):
        text = b"".join(TOKEN_BYTES[token] for token in prompt[len(before) : alignment.end])
        assert text == b"".join(TOKEN_BYTES[token] for token in sampled)
