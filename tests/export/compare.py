"""Compares samples field by field; arrays may have NaN."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from branchline import Sample


def assert_equal_samples(one: Sample, other: Sample, *, ignore: tuple[str, ...] = ()) -> None:
    """Checks that all fields are equal, with equal types of arrays."""
    for field in fields(Sample):
        if field.name in ignore:
            continue
        left: Any = getattr(one, field.name)
        right: Any = getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, field.name)
        else:
            assert left == right, field.name
            assert type(left) is type(right), field.name
