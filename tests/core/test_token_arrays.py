"""Runs encode arrays in one normal form, and id arrays are read-only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import InputError
from branchline.core.token_arrays import (
    NO_IDS,
    Origin,
    as_ids,
    decode_runs,
    encode_runs,
    normalize_runs,
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


def test_runs_contain_plain_ints() -> None:
    numpy_runs: Any = [(np.int64(2), Origin.SAMPLED), (np.int64(1), Origin.SAMPLED), (1, np.int32(7))]
    runs = normalize_runs(numpy_runs)
    assert runs == ((3, 2), (1, 7))
    assert {type(number) for run in runs for number in run} == {int}
    compressed = encode_runs(np.array([7, 7], np.int64))
    assert {type(number) for run in compressed for number in run} == {int}


def test_an_array_is_encoded_as_runs() -> None:
    assert encode_runs(np.array([5, 5, 5, 4, 5])) == ((3, 5), (1, 4), (1, 5))
    assert encode_runs(np.array([9])) == ((1, 9),)
    assert encode_runs(np.array([], np.int32)) == ()


def test_runs_are_decoded_to_the_requested_type() -> None:
    array = decode_runs(((2, Origin.TEMPLATE), (3, Origin.SAMPLED)), np.int8)
    assert array.tolist() == [0, 0, 2, 2, 2]
    assert array.dtype == np.int8
    assert decode_runs(((1, 7),)).dtype == np.int32
    assert decode_runs(()).tolist() == []
    assert decode_runs((), np.int8).dtype == np.int8


values = st.lists(st.integers(-2, 2) | st.integers(-(2**31), 2**31 - 1), max_size=40)
pairs = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 1)), max_size=12)


@given(values)
def test_decoding_inverts_encoding(numbers: list[int]) -> None:
    runs = encode_runs(np.array(numbers, np.int32))
    assert decode_runs(runs).tolist() == numbers
    assert all(count > 0 for count, _ in runs)
    assert all(one[1] != other[1] for one, other in pairwise(runs))


@given(pairs)
def test_normalized_pairs_equal_the_runs_of_their_array(raw_pairs: list[tuple[int, int]]) -> None:
    written_out = [value for count, value in raw_pairs for _ in range(count)]
    runs = normalize_runs(raw_pairs)
    assert decode_runs(runs).tolist() == written_out
    assert runs == encode_runs(np.array(written_out, np.int32))
    assert normalize_runs(runs) == runs


@given(pairs, pairs)
def test_equal_sequences_have_equal_runs(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    same = decode_runs(normalize_runs(one)).tolist() == decode_runs(normalize_runs(other)).tolist()
    assert (normalize_runs(one) == normalize_runs(other)) == same


# -- ids ---------------------------------------------------------------------------------------------


def writable_views() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arrays to convert to ids, each with an array through which its memory could be written."""
    base = np.array([1, 2, 3, 4], np.int32)
    frozen = base[:]
    frozen.flags.writeable = False
    owner = np.array([1, 2, 3, 4], np.int32)
    view = owner[:]
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
        "a read-only array with a writable view": (owner, view),
    }


@pytest.mark.parametrize("name", sorted(writable_views()))
def test_ids_are_read_only_and_share_no_memory(name: str) -> None:
    array, writer = writable_views()[name]
    ids = as_ids(array)
    before = ids.tolist()
    assert not np.shares_memory(ids, array)
    writer[:] = 9
    assert ids.tolist() == before
    assert not ids.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9


def test_converting_an_array_leaves_it_writable() -> None:
    array = np.array([1, 2], np.int32)
    as_ids(array)
    assert array.flags.writeable


@pytest.mark.parametrize(
    "values_", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8)]
)
def test_any_flat_sequence_of_integers_is_converted(values_: Any) -> None:
    ids = as_ids(values_)
    assert ids.tolist() == [1, 2]
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


@pytest.mark.parametrize("empty", [[], (), np.array([]), NO_IDS])
def test_an_empty_sequence_is_converted(empty: Any) -> None:
    assert as_ids(empty).tolist() == []
    assert as_ids(empty).dtype == np.int32


@pytest.mark.parametrize(
    "invalid",
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
def test_other_values_are_rejected(invalid: Any) -> None:
    with pytest.raises(InputError, match="ids: got"):
        as_ids(invalid)


def test_the_shared_empty_array_is_read_only() -> None:
    assert not NO_IDS.flags.writeable
    assert NO_IDS.dtype == np.int32


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_ids_equal_their_input(numbers: list[int]) -> None:
    for made in (numbers, np.array(numbers, np.int64), np.array(numbers, np.int32)):
        assert as_ids(made).tolist() == numbers
