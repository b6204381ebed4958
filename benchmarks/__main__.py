"""Prints benchmark tables: all with `python -m benchmarks`, some with `python -m benchmarks merging
journal`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks import fork_causes, fork_growth, journal, memory, merge, prepare, trajectory_building
from benchmarks.measure import BenchmarkTable

TABLES: dict[str, Callable[[], BenchmarkTable]] = {
    "building": trajectory_building.table,
    "merging": merge.pairwise_table,
    "growth": merge.growth_table,
    "preparing": prepare.table,
    "memory": memory.table,
    "journal": journal.write_table,
    "replay": journal.replay_table,
    "causes": fork_causes.table,
    "exports": fork_growth.table,
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
    targets_met: list[bool] = []
    for name in names or TABLES:
        report = TABLES[name]()
        report.print(console)
        targets_met += report.targets_met
    elapsed_s = time.perf_counter() - start
    console.print(
        f"{sum(targets_met)} of {len(targets_met)} targets met, in {elapsed_s:.0f} s.", highlight=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
