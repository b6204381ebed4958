"""One call on the clock, and what it returned: prompts are compared after they were timed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypeVar

from benchmarks.measure import cpu_s

Value = TypeVar("Value")


def timed(run: Callable[[], Value]) -> tuple[float, Value]:
    """CPU seconds of one run, and its result."""
    results: list[Value] = []
    spent = cpu_s(lambda: results.append(run()))
    return spent, results[0]


def median_cpu_s(run: Callable[[], object], repeats: int = 5) -> float:
    return median(cpu_s(run) for _ in range(repeats))
