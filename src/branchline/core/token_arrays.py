"""Run-length pairs: the cheap way to say the same thing about many tokens.

`((3, TEMPLATE), (4, SAMPLED))` stands for seven values. Runs are never empty and never repeat the value
of their neighbour, so equal sequences have equal runs.
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
NO_FLOATS: Floats = np.empty(0, np.float32)
NO_IDS.flags.writeable = False
NO_FLOATS.flags.writeable = False


class Origin(IntEnum):
    """Where a token comes from."""

    TEMPLATE = 0
    """The template put it there: role headers, the generation prompt."""
    CONTEXT = 1
    """Somebody else's words, or our own shown again in another place."""
    SAMPLED = 2
    """The model sampled it here."""


def normalize_runs(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Normalised runs: empty ones left out, equal neighbours joined."""
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
    """The runs of an array.

    >>> encode_runs(np.array([3, 3, 4]))
    ((2, 3), (1, 4))
    """
    if not len(values):
        return ()
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    counts = np.diff(np.append(starts, len(values)))
    return tuple(zip(counts.tolist(), values[starts].tolist(), strict=True))


def decode_runs(runs: Runs, dtype: type[np.integer] = np.int32) -> NDArray[np.integer]:
    """The array that the runs stand for."""
    if not runs:
        return np.empty(0, dtype)
    counts, values = zip(*runs, strict=True)
    return np.repeat(np.array(values, dtype), counts)


def runs_length(runs: Runs) -> int:
    return sum(count for count, _ in runs)


def as_ids(values: object) -> Ids:
    """A read-only int32 copy. Ids are shared by nodes, turns and timelines, so nobody may write to them."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and len(given)):
        raise InputError(f"ids: got {given.ndim}-d {given.dtype}, expected a flat list of integers")
    ids = given.astype(np.int32)
    if given.dtype != np.int32 and not np.array_equal(ids, given):
        raise InputError(f"ids: got {given[ids != given][0]}, expected integers of 32 bits")
    ids.flags.writeable = False
    return ids
