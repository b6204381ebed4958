"""Prints the table: `python -m benchmarks.loop`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.loop.concurrent_loops import LoadConfig, build_report

_DEFAULTS = LoadConfig()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.loop", description=__doc__)
    parser.add_argument("--loops", type=int, default=_DEFAULTS.loops, help="concurrent loops")
    parser.add_argument("--turns", type=int, default=_DEFAULTS.turns, help="turns of each loop")
    parser.add_argument(
        "--answer-s", type=float, default=_DEFAULTS.answer_s, help="seconds per answer of the slow engine"
    )
    parser.add_argument("--repeats", type=int, default=_DEFAULTS.repeats)
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    report = build_report(LoadConfig(options.loops, options.turns, options.answer_s, options.repeats))
    report.print(console)
    elapsed_s = time.perf_counter() - start
    met, targets = sum(report.targets_met), len(report.targets_met)
    console.print(f"{met} of {targets} targets met, in {elapsed_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
