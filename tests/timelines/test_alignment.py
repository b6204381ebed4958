"""Locating the end of an earlier output in a prompt that encodes it with other ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.timelines.alignment import (
    Aligner,
    Alignment,
    AlignmentMethod,
    EarlierPath,
    PathReasoning,
    Permission,
    TokenBytes,
)
from branchline.timelines.log import LoggedOutput

TOKEN_BYTES = {7: b"?", 1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"abc", 6: b"bc", 9: b"<end>", 8: b"d"}


NEXT = [Message("user", "d")]


def align(
    prompt: list[int],
    before: list[int],
    sampled: list[int],
    token_bytes: TokenBytes | None = TOKEN_BYTES.__getitem__,
    *,
    finish_reason: str = "stop",
    stop_ids: frozenset[int] = frozenset(),
    answer: str = "abc",
    first_output: int | None = None,
    other_tools: bool = False,
) -> Alignment:
    output = LoggedOutput(Message("assistant", answer), as_ids(sampled), finish_reason=finish_reason)
    start = len(before) if first_output is None else first_output
    path = EarlierPath(as_ids(before), output, as_ids(sampled), start)
    aligner = Aligner(token_bytes, stop_ids)
    alignment = aligner.align(as_ids(prompt), path, NEXT, other_tools=other_tools)
    assert alignment is not None
    return alignment


def end_and_method(alignment: Alignment) -> tuple[int, AlignmentMethod]:
    return alignment.end, alignment.method


def test_identical_ids_need_no_tokenizer() -> None:
    assert end_and_method(align([7, 1, 6, 9, 8], [7], [1, 6, 9], None)) == (4, AlignmentMethod.IDENTICAL)


def test_equal_bytes_are_found_with_any_ids() -> None:
    assert end_and_method(align([7, 3, 4, 9, 8], [7], [1, 6, 9])) == (4, AlignmentMethod.BYTES)
    assert end_and_method(align([7, 5, 8], [7], [1, 2, 4], finish_reason="length")) == (
        2,
        AlignmentMethod.BYTES,
    )
    assert end_and_method(align([7, 5], [7], [1, 6], finish_reason="length")) == (2, AlignmentMethod.BYTES)


def test_a_token_that_crosses_the_end_is_no_boundary() -> None:
    assert align([7, 1, 6, 8], [7], [3], finish_reason="length").method == AlignmentMethod.ESTIMATE


def test_an_unknown_last_id_is_no_stop_token() -> None:
    assert align([7, 5, 9, 8], [7], [1, 6, 9], None).method == AlignmentMethod.ESTIMATE


def test_without_a_tokenizer_a_known_stop_token_marks_the_end() -> None:
    known = frozenset({9})
    aligned = align([7, 5, 9, 8], [7], [1, 6, 9], None, stop_ids=known)
    assert end_and_method(aligned) == (3, AlignmentMethod.STOP_TOKEN)
    assert aligned.needs == {Permission.REPAIR}
    cut = align([7, 5, 9, 8], [7], [1, 6, 9], None, stop_ids=known, finish_reason="length")
    assert cut.method == AlignmentMethod.ESTIMATE


def test_another_stop_token_before_it_is_the_end_of_another_text() -> None:
    # The template ends the answer with 8; 9 comes later, after the next user message.
    aligned = align([7, 5, 8, 1, 9, 2], [7], [1, 6, 9], None, stop_ids=frozenset({8, 9}))
    assert aligned.method == AlignmentMethod.ESTIMATE


def test_with_a_tokenizer_the_text_up_to_the_stop_token_must_show_the_answer() -> None:
    # The template trims the answer: 6 is `bc`, 2 4 are `b` and `c`, and a space was dropped.
    spaced = {**TOKEN_BYTES, 11: b" "}.__getitem__
    known = frozenset({9})
    aligned = align([7, 5, 9, 8], [7], [1, 6, 11, 9], spaced, stop_ids=known)
    assert end_and_method(aligned) == (3, AlignmentMethod.STOP_TOKEN)
    other = align([7, 2, 9, 8], [7], [1, 6, 11, 9], spaced, stop_ids=known)
    assert other.method == AlignmentMethod.ESTIMATE


def test_an_output_after_other_tools_is_found_by_the_ids_from_the_first_output_on() -> None:
    assert align([30, 31, 7, 1, 6, 9, 8], [20, 7], [1, 6, 9], None).method == AlignmentMethod.ESTIMATE
    long = [*range(100, 110)]
    aligned = align([30, *long, 1, 6, 9, 8], [20, 21, *long], [1, 6, 9], None, other_tools=True)
    assert aligned == Alignment(14, AlignmentMethod.ANCHOR, 11, frozenset({Permission.IGNORE_TOOLS}))
    unexplained = align([30, *long, 1, 6, 9, 8], [20, 21, *long], [1, 6, 9], None)
    assert unexplained.needs == {Permission.INEXACT}


def test_after_other_tools_an_earlier_turn_must_have_the_same_ids() -> None:
    long = [*range(100, 110)]
    # An output of two tokens at 12, of which the later prompt dropped the first.
    before, later = [20, 21, *long, 60, 61, *long], [30, *long, 61, *long, 1, 6, 9, 8]
    aligned = align(later, before, [1, 6, 9], None, first_output=12, other_tools=True)
    assert Permission.INEXACT in aligned.needs


MARK = [120, 121, 122]
TURN = [*range(100, 107), *MARK]


def test_after_other_tools_a_later_turn_with_the_sampled_ids_is_not_the_answer() -> None:
    # The prompt has other ids (2 1) for the first answer, and the sampled ones for the same answer later.
    output = LoggedOutput(Message("assistant", "x"), as_ids([1, 6, 9]))
    path = EarlierPath(as_ids([30, *TURN]), output, as_ids([1, 6, 9]), 11)
    prompt = as_ids([*TURN, 2, 1, 9, *TURN, 1, 6, 9, *MARK])
    following = [Message("user", "d"), Message("assistant", "x"), Message("user", "d")]
    aligned = Aligner(None, frozenset({9})).align(prompt, path, following, other_tools=True)
    assert aligned == Alignment(
        13, AlignmentMethod.STOP_TOKEN, 10, frozenset({Permission.IGNORE_TOOLS, Permission.REPAIR})
    )
    aligned = Aligner().align(prompt, path, following, other_tools=True)
    assert aligned is not None
    assert Permission.INEXACT in aligned.needs


def test_after_other_tools_a_generation_prompt_that_was_joined_with_text_is_not_skipped() -> None:
    # 122 and the first id of the answer became 123, so that the first mark is that of the second answer.
    output = LoggedOutput(Message("assistant", " "), as_ids([7, 9]))
    path = EarlierPath(as_ids([30, *TURN]), output, as_ids([7, 9]), 11)
    prompt = as_ids([31, *TURN[:-1], 123, 9, *TURN, 7, 9, *MARK])
    following = [Message("user", "d"), Message("assistant", ""), Message("user", "d")]
    aligned = Aligner(None, frozenset({9})).align(prompt, path, following, other_tools=True)
    assert aligned is not None
    assert Permission.INEXACT in aligned.needs


@given(
    st.lists(
        st.tuples(st.sampled_from([100, 101]), st.sampled_from([(1, 9), (2, 9), (6, 9), (9,)])), min_size=2
    ),
    st.sampled_from([(1, 9), (2, 9), (6, 9), (9,), (1, 2)]),
    st.lists(st.integers(30, 33), max_size=3),
    st.lists(st.integers(30, 33), max_size=3),
)
def test_after_other_tools_no_message_is_skipped(
    turns: list[tuple[int, tuple[int, ...]]], sampled: tuple[int, ...], tools: list[int], other: list[int]
) -> None:
    prompt = [*other, *(token for user, shown in turns for token in (user, *MARK, *shown)), 102, *MARK]
    before = [*tools, turns[0][0], *MARK]
    output = LoggedOutput(Message("assistant", "x"), as_ids(sampled))
    path = EarlierPath(as_ids(before), output, as_ids(sampled), len(before))
    following = [Message(role, "d") for _ in turns[1:] for role in ("user", "assistant")]
    aligned = Aligner(None, frozenset({9})).align(
        as_ids(prompt), path, [*following, Message("user", "d")], other_tools=True
    )
    assert aligned is not None
    if Permission.INEXACT not in aligned.needs:
        assert prompt[aligned.end :].count(MARK[0]) == len(turns)


def test_an_estimate_stays_in_range_and_needs_permission() -> None:
    for prompt, end in (([7, 5, 8], 2), ([7], 1), ([], 0)):
        aligned = align(prompt, [7], [1, 6], None, finish_reason="length")
        assert end_and_method(aligned) == (end, AlignmentMethod.ESTIMATE)
        assert Permission.INEXACT in aligned.needs


def test_a_prompt_that_dropped_reasoning_is_not_aligned_unless_the_bytes_show_it() -> None:
    known = frozenset({9})
    output = LoggedOutput(Message("assistant", "abc", reasoning_content="b"), as_ids([2, 1, 6, 9]))
    path = EarlierPath(as_ids([7]), output, as_ids([2, 1, 6, 9]), 1, PathReasoning(in_output=True))
    for token_bytes in (None, TOKEN_BYTES.__getitem__):
        assert Aligner(token_bytes, known).align(as_ids([7, 5, 9, 8]), path, NEXT) is None
    shown = Aligner(TOKEN_BYTES.__getitem__, known).align(as_ids([7, 2, 5, 9, 8]), path, NEXT)
    assert shown is not None
    assert shown.method == AlignmentMethod.BYTES


def test_with_a_tokenizer_a_repaired_answer_has_the_sampled_text_apart_from_spaces() -> None:
    spaced = {**TOKEN_BYTES, 11: b" "}.__getitem__
    for sampled, shown in (([4, 1, 6, 9], [1, 6, 9]), ([1, 6, 8, 9], [3, 4, 9]), ([1, 6, 9], [4, 3, 4, 9])):
        aligned = align([7, *shown, 8], [7], sampled, spaced, stop_ids=frozenset({9}))
        assert aligned.method == AlignmentMethod.ESTIMATE, "the log's message has the text abc"
    aligned = align([7, 1, 11, 6, 9, 8], [7], [11, 5, 9], spaced, stop_ids=frozenset({9}))
    assert end_and_method(aligned) == (5, AlignmentMethod.STOP_TOKEN)


def test_with_a_tokenizer_an_estimate_ends_where_the_text_of_the_answer_does() -> None:
    # The answer `abc` was cut off before its stop string 7; 9 and 8 are the template's.
    stops = frozenset({9})
    for sampled, shown, end in (
        ([1, 6, 7], [3, 4, 9, 8, 8, 8], 3),
        ([1, 6, 7, 9], [3, 4, 9, 8, 8, 8], 4),
        ([11, 1, 6, 7], [5, 9, 8, 8, 8], 2),
    ):
        spaced = {**TOKEN_BYTES, 11: b" "}.__getitem__
        answer = " abc" if sampled[0] == 11 else "abc"
        aligned = align([7, *shown], [7], sampled, spaced, stop_ids=stops, answer=answer)
        assert aligned == Alignment(end, AlignmentMethod.ESTIMATE, 1, frozenset({Permission.INEXACT}))


OPEN, CLOSE, BREAK, ASSISTANT, USER = 100, 101, 102, 103, 104
Texts = st.lists(st.integers(1, 8), max_size=6)


def turn(role: int, text: list[int], is_chatml: bool) -> list[int]:
    """A message as ChatML (header, text, end, line break) or as Llama 3 writes it (no line break)."""
    return [OPEN, role, BREAK, *text, CLOSE, BREAK][: None if is_chatml else -1]


@given(
    Texts,
    Texts,
    st.lists(st.tuples(Texts, Texts), max_size=2),
    Texts,
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_an_estimate_without_a_tokenizer_loses_and_repeats_no_message(
    asked: list[int],
    shown: list[int],
    turns: list[tuple[list[int], list[int]]],
    last: list[int],
    is_chatml: bool,
    is_stopped: bool,
    data: st.DataObject,
) -> None:
    generation_prompt = [OPEN, ASSISTANT, BREAK]
    before = turn(USER, asked, is_chatml) + generation_prompt
    texts = [entry for user, answer in turns for entry in ((USER, user), (ASSISTANT, answer))]
    later = [*texts, (USER, last)]
    rest = [one for role, text in later for one in turn(role, text, is_chatml)] + generation_prompt
    end = [CLOSE, BREAK][: None if is_chatml else -1]
    prompt = [*before, *shown, *end, *rest]
    sampled = [*data.draw(Texts), *([CLOSE] if is_stopped else [9])]
    following = [Message("user" if role == USER else "assistant", "x" * len(text)) for role, text in later]
    output = LoggedOutput(Message("assistant", "x" * data.draw(st.integers(1, 50))), as_ids(sampled))
    path = EarlierPath(as_ids(before), output, as_ids(sampled), len(before))
    aligned = Aligner().align(as_ids(prompt), path, following)
    assert aligned is not None
    if aligned.method == AlignmentMethod.ESTIMATE:
        context = sampled + prompt[aligned.end :]
        assert context[len(sampled) - is_stopped :] in (
            [*end, *rest],
            # An id that by accident ends each message and stands nowhere else: text after it is repeated.
            *([[*shown[-count:], *end, *rest] for count in range(1, len(shown) + 1)]),
        )


def test_reasoning_that_only_the_sampled_ids_have_is_reasoning() -> None:
    thinks = {**TOKEN_BYTES, 11: b"<think>", 12: b"</think>"}.__getitem__
    sampled = as_ids([11, 2, 12, 5, 9])
    path = EarlierPath(as_ids([7]), LoggedOutput(Message("assistant", "abc"), sampled), sampled, 1)
    assert Aligner(thinks, frozenset({9})).align(as_ids([7, 5, 9, 8]), path, NEXT) is None


token_lists = st.lists(st.sampled_from(sorted(TOKEN_BYTES)), max_size=8)


@given(token_lists, token_lists, token_lists, token_lists, st.booleans())
def test_alignment_by_bytes_splits_the_text_at_the_end_of_the_output(
    before: list[int], sampled: list[int], prompt_tail: list[int], rest: list[int], startswith: bool
) -> None:
    prompt = [*before, *prompt_tail, *rest] if startswith else [*prompt_tail, *rest]
    alignment = align(prompt, before, sampled)
    assert 0 <= alignment.end <= len(prompt)
    if alignment.method in (AlignmentMethod.BYTES, AlignmentMethod.IDENTICAL):
        text = b"".join(TOKEN_BYTES[token] for token in prompt[: alignment.end])
        assert text == b"".join(TOKEN_BYTES[token] for token in [*before, *sampled])
