"""Prints the tables: `python -m benchmarks` for all, `python -m benchmarks merging journal` for some."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks import building, journaling, judging, memory, merging, preparing
from benchmarks.measure import Report

TABLES: dict[str, Callable[[], Report]] = {
    "building": building.table,
    "merging": merging.against_pairs,
    "growth": merging.growth,
    "preparing": preparing.table,
    "memory": memory.table,
    "journal": journaling.writing,
    "replay": journaling.replaying,
    "causes": judging.table,
}


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"benchmarks: got {' '.join(unknown)}, expected any of {' '.join(TABLES)}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    verdicts: list[bool] = []
    for name in names or TABLES:
        report = TABLES[name]()
        report.print(console)
        verdicts += report.verdicts
    took_s = time.perf_counter() - start
    console.print(f"{sum(verdicts)} of {len(verdicts)} targets met, in {took_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
