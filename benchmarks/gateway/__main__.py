"""Prints the tables: `python -m benchmarks.gateway` for all, with names (`beside engines`) for some."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks.codec.conversations import CACHE
from benchmarks.gateway import embedded, engine_clients, load, long_conversation, rllm_comparison
from benchmarks.gateway.load import Load
from benchmarks.measure import BenchmarkTable

_FULL = Load()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("tables", nargs="*", help="beside, engines, turns, load, embedded; none: all")
    parser.add_argument("--sessions", type=int, default=_FULL.sessions, help="of load")
    parser.add_argument("--turns", type=int, default=_FULL.turns, help="of each session of load")
    parser.add_argument("--in-flight", type=int, default=_FULL.in_flight, help="of load")
    options = parser.parse_args(arguments)
    load_options = Load(options.sessions, options.turns, options.in_flight)
    tables: dict[str, Callable[[], list[BenchmarkTable]]] = {
        "beside": lambda: [rllm_comparison.table()],
        "engines": lambda: [engine_clients.table()],
        "turns": long_conversation.tables,
        "load": lambda: [load.table(load_options)],
        "embedded": embedded.tables,
    }
    unknown = [name for name in options.tables if name not in tables]
    if unknown:
        parser.error(f"got {' '.join(unknown)}, expected any of {' '.join(tables)}")
    if not (CACHE / "qwen3" / "tokenizer.json").exists():
        print(f"{CACHE}: no tokenizers, run scripts/fetch_tokenizers.py first", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    targets_met: list[bool] = []
    for name in options.tables or tables:
        for report in tables[name]():
            report.print(console)
            targets_met += report.targets_met
    duration_s = time.perf_counter() - start
    console.print(
        f"{sum(targets_met)} of {len(targets_met)} targets met, in {duration_s:.0f} s.", highlight=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
