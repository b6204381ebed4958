"""Checks of numbers that a user sets, numpy's included. What is none is refused where it is set: `True`, a
text, NaN and infinity never become a limit or a reward."""

from __future__ import annotations

import math
import numbers

from branchline.core.errors import InputError


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raises InputError unless a value is a whole number of at least `least`.

    >>> check_count("keep_last", True)
    Traceback (most recent call last):
    branchline.core.errors.InputError: keep_last: got True, expected a whole number of 1 or more
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise InputError(f"{name}: got {value!r}, expected a whole number of {least} or more")


def check_flag(name: str, value: object) -> None:
    """Raises InputError unless a value is True or False: a text such as "no" is true."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: got {value!r}, expected True or False")


def check_number(name: str, value: object, *, above: float | None = None, most: float | None = None) -> None:
    """Raises InputError unless a value is a finite number of more than `above` and at most `most`."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        is_within = (above is None or number > above) and (most is None or number <= most)
        if math.isfinite(number) and is_within:
            return
    bounds = [f"more than {above:g}"] if above is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    expected = "a finite number" + (f" of {' and '.join(bounds)}" if bounds else "")
    raise InputError(f"{name}: got {value!r}, expected {expected}")
