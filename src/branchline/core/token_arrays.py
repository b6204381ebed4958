"""Token arrays, and run-length encoding of per-token values.

`((3, TEMPLATE), (4, SAMPLED))` encodes seven values. Runs are never empty and never repeat the value of their
neighbour, so equal sequences have equal runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import InputError

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Runs = tuple[tuple[int, int], ...]

NO_IDS: Ids = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class Origin(IntEnum):
    """Where a token comes from."""

    TEMPLATE = 0
    """Added by the chat template: role headers, the generation prompt."""
    CONTEXT = 1
    """Not sampled by the model, or sampled at another position and repeated here."""
    SAMPLED = 2
    """Sampled by the model at this position."""


def normalize_runs(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Removes empty runs and joins neighbours with equal values."""
    runs: list[tuple[int, int]] = []
    for count, value in pairs:
        if count <= 0:
            continue
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0] + int(count), runs[-1][1])
        else:
            runs.append((int(count), int(value)))
    return tuple(runs)


def encode_runs(values: NDArray[np.integer]) -> Runs:
    """Returns the runs of an array.

    >>> encode_runs(np.array([3, 3, 4]))
    ((2, 3), (1, 4))
    """
    if not len(values):
        return ()
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    counts = np.diff(np.append(starts, len(values)))
    return tuple(zip(counts.tolist(), values[starts].tolist(), strict=True))


def decode_runs(runs: Runs, dtype: type[np.integer] = np.int32) -> NDArray[np.integer]:
    """Returns the array that the runs encode."""
    if not runs:
        return np.empty(0, dtype)
    counts, values = zip(*runs, strict=True)
    return np.repeat(np.array(values, dtype), counts)


def as_ids(values: object) -> Ids:
    """Returns a read-only int32 copy: nodes, turns and timelines share id arrays."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise InputError(f"ids: got {array.ndim}-d {array.dtype}, expected a flat list of integers")
    ids = array.astype(np.int32)
    if array.dtype != np.int32 and not np.array_equal(ids, array):
        raise InputError(f"ids: got {array[ids != array][0]}, expected 32-bit integers")
    ids.flags.writeable = False
    return ids
