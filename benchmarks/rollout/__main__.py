"""Prints the table: `python -m benchmarks.rollout`."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmarks.rollout.sessions import RolloutLoad, build_report

_DEFAULTS = RolloutLoad()


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--sessions", type=int, default=_DEFAULTS.sessions)
    parser.add_argument("--turns", type=int, default=_DEFAULTS.turns, help="turns of each session")
    parser.add_argument("--repeats", type=int, default=_DEFAULTS.repeats)
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    report = build_report(RolloutLoad(options.sessions, options.turns, repeats=options.repeats))
    report.print(console)
    console.print(f"{sum(report.targets_met)} of {len(report.targets_met)} targets met.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
