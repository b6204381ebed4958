"""Measurement and tables for all benchmarks.

Times are CPU times of this process, the best of several repeats, because benchmarks run on shared machines;
the sides of a ratio alternate within one run. A figure with a target shows whether it is met.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass
class BenchmarkTable:
    """One table with its targets and notes."""

    title: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    targets_met: list[bool] = field(default_factory=list)

    def add_row(self, *cells: object) -> None:
        self.rows.append(tuple(str(cell) for cell in cells))

    def target_cell(self, description: str, is_met: bool) -> str:
        """Records whether a target is met and returns its cell."""
        self.targets_met.append(is_met)
        return f"{'✓' if is_met else '✗'} {description}"

    def print(self, console: Console) -> None:
        table = Table(box=box.SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold")
        for index, column in enumerate(self.columns):
            is_text = index == 0 or column == "target"
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
        for cells in self.rows:
            table.add_row(*(_styled_cell(cell) for cell in cells))
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", style="dim", highlight=False, markup=False)
        console.print()


def _styled_cell(cell: str) -> Text:
    return Text(cell, style={"✓": "green", "✗": "red"}.get(cell[:1], ""))


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables garbage collection, as timeit does: its cost depends on other objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_s(run: Callable[[], object]) -> float:
    """Returns the CPU seconds of one run; its result is freed after the measurement."""
    with _gc_disabled():
        start = time.process_time()
        result = run()
        spent = time.process_time() - start
        del result
        return spent


def best_cpu_s(*sides: Callable[[], object], repeats: int = 5) -> list[float]:
    """Returns the best CPU seconds of each side; the sides alternate, so that all run under equal load."""
    best = [float("inf")] * len(sides)
    for _ in range(repeats):
        for index, side in enumerate(sides):
            best[index] = min(best[index], cpu_s(side))
    return best


def wall_s(run: Callable[[], object]) -> tuple[float, float]:
    """Returns wall-clock and CPU seconds, for work that waits for a disk."""
    with _gc_disabled():
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cpu


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which a share of all values lies.

    >>> percentile([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
