"""The options and texts of `branchline stats`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.options.command import Command
from branchline.core.option_fields import option


@dataclass(frozen=True)
class StatsOptions:
    """A run."""

    run_folder: Path = option(positional=True, metavar="DIR")
    """The folder of the run."""
    json: bool = option(False, basic=True)
    """Print one JSON object, as in stats.json."""


_DESCRIPTION = """\
Prints the figures of a run: sessions by status, why sessions failed, tokens sampled and delivered, forks.
They are computed from trajectories.jsonl, so the run may still be writing it. If several runs wrote to the
folder, they are sums over all of them, and each task of each run is counted.
"""
COMMAND = Command("stats", StatsOptions, "branchline.cli.stats:run", _DESCRIPTION)
