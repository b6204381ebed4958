"""Prints the table: `python -m benchmarks.loop`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.loop.crowd import Crowd, table

_FULL = Crowd()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.loop", description=__doc__)
    parser.add_argument("--loops", type=int, default=_FULL.loops, help="at once")
    parser.add_argument("--turns", type=int, default=_FULL.turns, help="of each loop")
    parser.add_argument("--answer-s", type=float, default=_FULL.answer_s, help="of the slow engine")
    parser.add_argument("--repeats", type=int, default=_FULL.repeats)
    given = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    report = table(Crowd(given.loops, given.turns, given.answer_s, given.repeats))
    report.print(console)
    took_s = time.perf_counter() - start
    met, wanted = sum(report.verdicts), len(report.verdicts)
    console.print(f"{met} of {wanted} targets met, in {took_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
