"""Checks of numbers that a user sets. A number that is none is refused where it is set: `True`, a text, NaN
and infinity never become a limit or a reward."""

from __future__ import annotations

import math

from branchline.core.errors import InputError


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raises InputError unless a value is a whole number of at least `least`.

    >>> check_count("keep_last", True)
    Traceback (most recent call last):
    branchline.core.errors.InputError: keep_last: got True, expected a whole number of 1 or more
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: got {value!r}, expected a whole number of {least} or more")


def check_number(name: str, value: object, *, above: float | None = None, most: float | None = None) -> None:
    """Raises InputError unless a value is a finite number of more than `above` and at most `most`."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (above is None or value > above)
        and (most is None or value <= most)
    ):
        return
    bounds = [f"more than {above:g}"] if above is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    expected = "a finite number" + (f" of {' and '.join(bounds)}" if bounds else "")
    raise InputError(f"{name}: got {value!r}, expected {expected}")
