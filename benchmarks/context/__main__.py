"""Prints the table: `python -m benchmarks.context`."""

from __future__ import annotations

import sys
import time

from rich.console import Console

from benchmarks.codec.conversations import CACHE
from benchmarks.context.deletion import table


def main() -> int:
    if not (CACHE / "qwen3" / "tokenizer.json").exists():
        print(f"{CACHE}: no tokenizers, run scripts/fetch_tokenizers.py first", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    report = table()
    report.print(console)
    elapsed_s = time.perf_counter() - start
    met, targets = sum(report.targets_met), len(report.targets_met)
    console.print(f"{met} of {targets} targets met, in {elapsed_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
