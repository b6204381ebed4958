"""Packed batches: every row keeps its own tokens, ancestors and weights, with and without shared prefixes."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline.core.errors import ExportError
from branchline.core.message import Media
from branchline.export.packing import (
    NO_ANSWER,
    NO_PARENT,
    SEVERAL_ANSWERS,
    PackedBatch,
    TrainingRow,
    pack_rows,
)
from tests.export.packed_rows import make_row, random_rows


def sequence(row: TrainingRow) -> list[int]:
    return [*row.sample.prompt_ids.tolist(), *row.sample.response_ids.tolist()]


def visible(batch: PackedBatch, query: int) -> list[int]:
    return [key for key in range(query + 1) if query < batch.subtree_ends[key]]


def check_batches(rows: list[TrainingRow], batches: list[PackedBatch]) -> None:
    """Checks everything that a batch promises against the single rows."""
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(rows)))
    for batch in batches:
        weights, positive, negative = np.zeros((3, len(batch)))
        for index, path in zip(batch.rows, batch.paths, strict=True):
            row, places = rows[index], path.tolist()
            assert batch.ids[path].tolist() == sequence(row)
            assert batch.positions[path].tolist() == list(range(len(path)))
            assert batch.parents[path].tolist() == [NO_PARENT, *places[:-1]][: len(places)]
            for depth, place in enumerate(places):
                assert visible(batch, place) == places[: depth + 1]
            start = len(row.sample.prompt_ids)
            for offset, (weight, advantage) in enumerate(zip(row.weights, row.advantages, strict=True)):
                place = places[start + offset]
                weights[place] += weight
                positive[place] += max(weight * advantage, 0)
                negative[place] += min(weight * advantage, 0)
                if weight:
                    assert batch.old_logprobs[place] == row.sample.response_logprobs[offset]
                    assert batch.versions[place] == row.sample.response_versions[offset]
        assert np.allclose(batch.weights, weights, rtol=1e-6)
        assert np.allclose(batch.positive_advantages, positive, rtol=1e-6)
        assert np.allclose(batch.negative_advantages, negative, rtol=1e-6)
        assert np.isnan(batch.old_logprobs[batch.weights == 0]).all()


@example(2743, 5, True, False)
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans(), st.booleans())
def test_a_token_attends_to_exactly_the_tokens_before_it_on_its_rows(
    seed: int, count: int, share: bool, limited: bool
) -> None:
    rng = Random(seed)
    rows = random_rows(rng, count, vocabulary=rng.choice([2, 50]))
    limit = rng.randint(1, max(map(len, rows)) + 20) if limited else None
    batches = pack_rows(rows, limit, share_prefixes=share)
    check_batches(rows, batches)
    for batch in batches if limit is not None else ():
        # A longer row is a batch of its own, with rows that add no token to it.
        assert limit is not None
        assert len(batch) <= limit or len(batch) == max(map(len, batch.paths))
    if not share:
        assert sum(map(len, batches)) == sum(map(len, rows))


def test_rows_share_the_longest_common_prefix() -> None:
    rows = [make_row([1, 2, 3], [4, 5]), make_row([1, 2, 3], [4, 6]), make_row([1, 2, 3], [7])]
    (batch,) = pack_rows(rows)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.subtree_ends.tolist() == [7, 7, 7, 6, 5, 6, 7]
    assert batch.weights.tolist() == [0, 0, 0, 2, 1, 1, 1]
    assert batch.path_tokens == 14


def test_advantages_of_either_sign_are_summed_apart() -> None:
    rows = [
        make_row([1], [2], advantages=[2.0]),
        make_row([1], [2, 3], weights=[0.5, 1], advantages=[-1, -1]),
    ]
    (batch,) = pack_rows(rows)
    assert batch.positive_advantages.tolist() == [0, 2, 0]
    assert batch.negative_advantages.tolist() == [0, -0.5, -1]
    assert batch.weights.tolist() == [0, 1.5, 1]


@pytest.mark.parametrize("other", [{"logprobs": [-0.25, -0.5]}, {"version": 3}])
def test_a_token_that_was_sampled_twice_is_not_shared(other: dict[str, object]) -> None:
    rows = [make_row([1], [2, 3]), make_row([1], [2, 3], **other)]  # type: ignore[arg-type]
    (batch,) = pack_rows(rows)
    assert len(batch) == 5
    check_batches(rows, [batch])


def test_a_sampled_token_is_shared_with_a_row_in_which_it_is_context() -> None:
    rows = [make_row([1], [2, 3]), make_row([1, 2, 3], [4])]
    (batch,) = pack_rows(rows)
    assert batch.ids.tolist() == [1, 2, 3, 4]
    assert batch.weights.tolist() == [0, 1, 1, 1]


def test_a_token_that_was_sampled_twice_is_not_shared_through_a_row_in_which_it_is_context() -> None:
    rows = [
        make_row([1], [2, 3]),
        make_row([1, 2, 3], [4]),
        make_row([1], [2, 3, 5], logprobs=[-0.25, -0.5, -0.5]),
    ]
    (batch,) = pack_rows(rows)
    assert len(batch) == 7
    check_batches(rows, [batch])


def answers_of(batch: PackedBatch, rows: list[TrainingRow]) -> list[list[list[int]]]:
    """Returns the numbers of the tokens of each answer of each row, in the order of `rows`."""
    found: dict[int, list[list[int]]] = {}
    for index, path in zip(batch.rows, batch.paths, strict=True):
        start = len(rows[index].sample.prompt_ids)
        spans = rows[index].answer_spans()
        found[index] = [batch.answers[path[start + a : start + b]].tolist() for a, b in spans]
    return [found[index] for index in range(len(rows))]


def test_answers_that_begin_alike_share_their_first_tokens_unless_whole_answers_are_needed() -> None:
    rows = [make_row([1], [2, 3, 4]), make_row([1], [2, 3, 5]), make_row([1], [2, 3])]
    (batch,) = pack_rows(rows)
    assert len(batch) == 5
    assert set(batch.answers.tolist()) == {NO_ANSWER, SEVERAL_ANSWERS}
    (batch,) = pack_rows(rows, share_partial_answers=False)
    assert len(batch) == 1 + 3 + 3 + 2
    check_batches(rows, [batch])


def test_an_answer_is_not_shared_through_a_row_in_which_its_first_tokens_are_context() -> None:
    rows = [
        make_row([1], [2, 3, 4, 5]),
        make_row([1, 2, 3], [9], weights=[0]),
        make_row([1], [2, 3, 9, 8]),
    ]
    (batch,) = pack_rows(rows, share_partial_answers=False)
    check_batches(rows, [batch])
    (first,), _, (third,) = answers_of(batch, rows)
    assert len(set(first)) == len(set(third)) == 1
    assert first != third


def test_an_answer_is_not_shared_in_part_with_a_row_after_one_that_leaves_inside_it() -> None:
    rows = [
        make_row([1], [2, 3, 4]),
        make_row([1, 2, 3], [4, 5], logprobs=[-0.25, -0.25]),
        make_row([1], [2, 3, 4, 6], weights=[1, 1, 1, 0]),
    ]
    (batch,) = pack_rows(rows, share_partial_answers=False)
    check_batches(rows, [batch])
    (first,), (second,), (third,) = answers_of(batch, rows)
    assert all(len(set(numbers)) == 1 for numbers in (first, second, third))
    assert len({first[0], second[0], third[0]}) == 3


def test_an_equal_answer_is_shared_through_a_row_in_which_it_is_context() -> None:
    rows = [
        make_row([1], [2, 3]),
        make_row([1, 2, 3], [4]),
        make_row([1], [2, 3, 5, 6], weights=[1, 1, 0, 1]),
    ]
    (batch,) = pack_rows(rows, share_partial_answers=False)
    check_batches(rows, [batch])
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_a_whole_answer_has_one_number_of_its_own(seed: int, count: int, limited: bool) -> None:
    rng = Random(seed)
    rows = random_rows(rng, count, vocabulary=rng.choice([2, 50]), max_branch=4)
    limit = max(map(len, rows)) + rng.randint(0, 20) if limited else None
    batches = pack_rows(rows, limit, share_partial_answers=False)
    check_batches(rows, batches)
    for batch in batches:
        members: dict[int, set[tuple[int, ...]]] = {}
        for index, path in zip(batch.rows, batch.paths, strict=True):
            start = len(rows[index].sample.prompt_ids)
            for first, end in rows[index].answer_spans():
                places = tuple(path[start + first : start + end].tolist())
                (number,) = set(batch.answers[list(places)].tolist())
                members.setdefault(number, set()).add(places)
        assert all(number >= 0 and len(places) == 1 for number, places in members.items())
        assert (batch.answers[batch.weights == 0] == NO_ANSWER).all()


def repeated_tokens(lengths: list[int], shared: list[int], cuts: tuple[int, ...], limit: int) -> int | None:
    edges = [0, *cuts, len(lengths)]
    total = 0
    for start, end in pairwise(edges):
        size = sum(lengths[start:end]) - sum(shared[start + 1 : end])
        if size > max(limit, *lengths[start:end]):
            return None
        total += size
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_tree_over_the_limit_is_cut_where_the_fewest_tokens_repeat(seed: int) -> None:
    rng = Random(seed)
    rows = [
        make_row([1], row_ids)
        for row_ids in ([rng.randrange(2) for _ in range(rng.randint(1, 8))] for _ in range(6))
    ]
    limit = rng.randint(1, max(map(len, rows)) + 10)
    batches = pack_rows(rows, limit)
    ordered = sorted(map(sequence, rows))
    lengths = [len(ids) for ids in ordered]
    shared = [0]
    for one, other in pairwise(ordered):
        equal = [a == b for a, b in zip(one, other, strict=False)]
        shared.append(equal.index(False) if False in equal else len(equal))
    options = [
        repeated_tokens(lengths, shared, cuts, limit)
        for number in range(len(rows))
        for cuts in combinations(range(1, len(rows)), number)
    ]
    assert sum(map(len, batches)) == min(option for option in options if option is not None)


def test_a_row_over_the_limit_is_a_batch_of_its_own() -> None:
    rows = [make_row([6], [2]), make_row([1, 2, 3], [4, 5]), make_row([7], [8])]
    batches = pack_rows(rows, 4)
    assert [sorted(batch.rows) for batch in batches] == [[1], [0, 2]]
    assert [len(batch) for batch in batches] == [5, 4]
    assert sorted(map(len, pack_rows(rows, 1))) == [2, 2, 5]


def test_copies_and_prefixes_of_a_row_over_the_limit_stay_with_it() -> None:
    long = make_row([1, 2, 3], [4, 5])
    (batch,) = pack_rows([long, make_row([1, 2, 3], [4]), long], 2)
    assert (len(batch), len(batch.rows)) == (5, 3)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_holds_no_token_is_refused(limit: int) -> None:
    with pytest.raises(ExportError, match=f"max_tokens: got {limit}, expected 1 or more"):
        pack_rows([make_row([1], [2])], limit)


def test_a_row_with_images_is_refused() -> None:
    row = make_row([1], [2])
    object.__setattr__(row.sample, "media", (Media("image", "digest"),))
    with pytest.raises(ExportError, match="images"):
        pack_rows([row])


def test_weights_of_another_length_are_refused() -> None:
    row = make_row([1], [2, 3])
    with pytest.raises(ExportError, match="weights: got 1 values, expected one for each of 2"):
        TrainingRow(row.sample, row.weights[:1], row.advantages)


def test_no_rows_give_no_batch() -> None:
    assert pack_rows([]) == []
