"""Runs stand for arrays, one normal form each, and ids are nobody's to write to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import InputError
from branchline.core.token_arrays import (
    NO_FLOATS,
    NO_IDS,
    Origin,
    as_ids,
    decode_runs,
    encode_runs,
    normalize_runs,
    runs_length,
)

# -- runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], ()),
        ([(0, 5)], ()),
        ([(-2, 5)], ()),
        ([(3, 0), (4, 2)], ((3, 0), (4, 2))),
        ([(3, 1), (4, 1)], ((7, 1),)),
        ([(3, 1), (0, 2), (4, 1)], ((7, 1),)),
        ([(0, 1), (1, -1), (1, -1), (2, 0)], ((2, -1), (2, 0))),
    ],
)
def test_runs_are_never_empty_and_never_repeat_their_neighbour(pairs: Any, runs: Any) -> None:
    assert normalize_runs(pairs) == runs


def test_runs_hold_plain_numbers_whatever_they_were_made_of() -> None:
    runs = normalize_runs([(np.int64(2), Origin.SAMPLED), (np.int64(1), Origin.SAMPLED), (1, np.int32(7))])
    assert runs == ((3, 2), (1, 7))
    assert {type(number) for run in runs for number in run} == {int}
    compressed = encode_runs(np.array([7, 7], np.int64))
    assert {type(number) for run in compressed for number in run} == {int}


def test_an_array_is_compressed_to_its_runs() -> None:
    assert encode_runs(np.array([5, 5, 5, 4, 5])) == ((3, 5), (1, 4), (1, 5))
    assert encode_runs(np.array([9])) == ((1, 9),)
    assert encode_runs(np.array([], np.int32)) == ()


def test_runs_expand_to_an_array_of_the_type_asked_for() -> None:
    array = decode_runs(((2, Origin.TEMPLATE), (3, Origin.SAMPLED)), np.int8)
    assert array.tolist() == [0, 0, 2, 2, 2]
    assert array.dtype == np.int8
    assert decode_runs(((1, 7),)).dtype == np.int32
    assert decode_runs(()).tolist() == []
    assert decode_runs((), np.int8).dtype == np.int8


def test_the_total_is_the_number_of_values() -> None:
    assert runs_length(()) == 0
    assert runs_length(((3, 0), (4, 2))) == 7


values = st.lists(st.integers(-2, 2) | st.integers(-(2**31), 2**31 - 1), max_size=40)
pairs = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 1)), max_size=12)


@given(values)
def test_an_array_comes_back_from_its_runs(numbers: list[int]) -> None:
    runs = encode_runs(np.array(numbers, np.int32))
    assert decode_runs(runs).tolist() == numbers
    assert runs_length(runs) == len(numbers)
    assert all(count > 0 for count, _ in runs)
    assert all(one[1] != other[1] for one, other in pairwise(runs))


@given(pairs)
def test_pairs_and_the_array_they_stand_for_have_the_same_runs(given_pairs: list[tuple[int, int]]) -> None:
    written_out = [value for count, value in given_pairs for _ in range(count)]
    runs = normalize_runs(given_pairs)
    assert decode_runs(runs).tolist() == written_out
    assert runs == encode_runs(np.array(written_out, np.int32))
    assert normalize_runs(runs) == runs


@given(pairs, pairs)
def test_equal_sequences_have_equal_runs(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    same = decode_runs(normalize_runs(one)).tolist() == decode_runs(normalize_runs(other)).tolist()
    assert (normalize_runs(one) == normalize_runs(other)) == same


# -- ids ---------------------------------------------------------------------------------------------


def writable_views() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arrays to make ids of, each with the array through which somebody could still write."""
    base = np.array([1, 2, 3, 4], np.int32)
    frozen = base[:]
    frozen.flags.writeable = False
    owner = np.array([1, 2, 3, 4], np.int32)
    left_over = owner[:]
    owner.flags.writeable = False
    plain, wide, strided = (
        np.array([1, 2, 3, 4], np.int32),
        np.array([1, 2, 3, 4]),
        np.arange(8, dtype=np.int32),
    )
    return {
        "writable": (plain, plain),
        "another width": (wide, wide),
        "a slice": (strided[::2], strided),
        "a read-only view of a writable array": (frozen, base),
        "a read-only array with a writable view": (owner, left_over),
    }


@pytest.mark.parametrize("name", sorted(writable_views()))
def test_ids_are_read_only_and_share_nothing_that_can_be_written(name: str) -> None:
    array, writer = writable_views()[name]
    ids = as_ids(array)
    before = ids.tolist()
    assert not np.shares_memory(ids, array)
    writer[:] = 9
    assert ids.tolist() == before
    assert not ids.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9


def test_making_ids_leaves_the_given_array_alone() -> None:
    array = np.array([1, 2], np.int32)
    as_ids(array)
    assert array.flags.writeable


@pytest.mark.parametrize(
    "given_ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8)]
)
def test_ids_are_made_of_any_row_of_integers(given_ids: Any) -> None:
    ids = as_ids(given_ids)
    assert ids.tolist() == [1, 2]
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


@pytest.mark.parametrize("nothing", [[], (), np.array([]), NO_IDS])
def test_no_ids_are_ids(nothing: Any) -> None:
    assert as_ids(nothing).tolist() == []
    assert as_ids(nothing).dtype == np.int32


@pytest.mark.parametrize(
    "wrong",
    [
        [1.5],
        np.array([1.0, 2.0]),
        [2**31],
        [-(2**31) - 1],
        np.array([2**32 + 1]),
        np.array([2**63], np.uint64),
        [2**70],
        ["1"],
        [None],
        [True],
        [[1, 2]],
        7,
        None,
    ],
)
def test_what_is_no_row_of_ids_is_refused_and_never_bent_into_one(wrong: Any) -> None:
    with pytest.raises(InputError, match="ids: got"):
        as_ids(wrong)


def test_the_empty_arrays_everybody_shares_cannot_be_written() -> None:
    assert not NO_IDS.flags.writeable
    assert not NO_FLOATS.flags.writeable
    assert (NO_IDS.dtype, NO_FLOATS.dtype) == (np.int32, np.float32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_ids_are_exactly_what_was_given(numbers: list[int]) -> None:
    for made in (numbers, np.array(numbers, np.int64), np.array(numbers, np.int32)):
        assert as_ids(made).tolist() == numbers
