"""Metrics of a run, one flat dict per step. Where TRL has a name for a figure, it is used with TRL's meaning.

A figure that is not known in a step is absent: files and trackers have finite numbers only.

They are written to `metrics.jsonl` in the run folder and, on request, to trackio, Weights & Biases or mlflow.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from branchline.core.choices import TrackerName
from branchline.rollout.trackers import Trackers

log = logging.getLogger("branchline.train")
METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """The metrics of one run: a JSON line for each step, and trackers."""

    def __init__(
        self, run_folder: Path, trackers: Sequence[TrackerName] = (), *, project: str = "branchline"
    ) -> None:
        self.path = run_folder / METRICS_FILE
        self._trackers = Trackers(trackers, run_folder.name, project)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of one step, except those that are not finite numbers, which are logged."""
        if strange := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            log.warning(
                "step %d: not finite and left out of the metrics: %s", metrics["step"], ", ".join(strange)
            )
        metrics = _finite(metrics)
        with self.path.open("a") as file:
            file.write(_line(metrics))
        values = {name: value for name, value in metrics.items() if name != "step"}
        self._trackers.log(values, int(metrics["step"]))

    def truncate(self, step: int) -> None:
        """Removes the lines of steps after a checkpoint, which will run again."""
        if not self.path.exists():
            return
        lines = read_metrics(self.path)
        self.path.write_text("".join(_line(_finite(line)) for line in lines if line["step"] <= step))

    def close(self) -> None:
        self._trackers.close()


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Returns the metrics of each step of a run; a torn last line is left out."""
    if not path.exists():
        return []
    lines: list[dict[str, float]] = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
