"""Prints the tables: `python -m benchmarks.codec` for all, with names (`turns parts`) for some."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks.codec import breakdown, first_prompts, templates, turns
from benchmarks.codec.conversations import CACHE
from benchmarks.measure import BenchmarkTable

TABLES: dict[str, Callable[[], BenchmarkTable]] = {
    "turns": turns.table,
    "forks": first_prompts.forks,
    "sessions": first_prompts.sessions,
    "parts": breakdown.table,
    "templates": templates.table,
}


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"benchmarks: got {' '.join(unknown)}, expected any of {' '.join(TABLES)}", file=sys.stderr)
        return 2
    if not (CACHE / "qwen3" / "tokenizer.json").exists():
        print(f"{CACHE}: no tokenizers, run scripts/fetch_tokenizers.py first", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    verdicts: list[bool] = []
    for name in names or TABLES:
        report = TABLES[name]()
        report.print(console)
        verdicts += report.targets_met
    took_s = time.perf_counter() - start
    console.print(f"{sum(verdicts)} of {len(verdicts)} targets met, in {took_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
