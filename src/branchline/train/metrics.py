"""Metrics of a run, one flat dict per step. Where TRL has a name for a figure, it is used with TRL's meaning.

A figure that is not known in a step is absent: files and trackers have finite numbers only.

They are written to `metrics.jsonl` in the run folder and, on request, to trackio, Weights & Biases or mlflow.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from branchline.core.choices import TrackerName
from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import pip_install

log = logging.getLogger("branchline.train")
METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """The metrics of one run: a JSON line for each step, and trackers."""

    def __init__(
        self, run_folder: Path, trackers: Sequence[TrackerName] = (), *, project: str = "branchline"
    ) -> None:
        self.path = run_folder / METRICS_FILE
        self._project, self._name = project, run_folder.name
        self._trackers = [_open_tracker(name) for name in trackers]
        self._is_started = False

    def write(self, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of one step, except those that are not finite numbers, which are logged."""
        if strange := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            log.warning(
                "step %d: not finite and left out of the metrics: %s", metrics["step"], ", ".join(strange)
            )
        metrics = _finite(metrics)
        with self.path.open("a") as file:
            file.write(_line(metrics))
        if not self._is_started:
            self._is_started = True
            for tracker in self._trackers:
                tracker.start(self._project, self._name)
        values = {name: value for name, value in metrics.items() if name != "step"}
        for tracker in self._trackers:
            tracker.log(values, int(metrics["step"]))

    def truncate(self, step: int) -> None:
        """Removes the lines of steps after a checkpoint, which will run again."""
        if not self.path.exists():
            return
        lines = read_metrics(self.path)
        self.path.write_text("".join(_line(_finite(line)) for line in lines if line["step"] <= step))

    def close(self) -> None:
        for tracker in self._trackers if self._is_started else ():
            tracker.finish()


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


class _InitTracker:
    """trackio and wandb: `init`, `log`, `finish`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def start(self, project: str, name: str) -> None:
        self._module.init(project=project, name=name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._module.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._module.finish()


class _MlflowTracker:
    def __init__(self, module: Any) -> None:
        self._module = module

    def start(self, project: str, name: str) -> None:
        self._module.set_experiment(project)
        self._module.start_run(run_name=name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(metrics), step=step)

    def finish(self) -> None:
        self._module.end_run()


def _open_tracker(name: str) -> _InitTracker | _MlflowTracker:
    if name not in get_args(TrackerName):
        raise InputError(f"report_to: got {name!r}, expected one of {', '.join(get_args(TrackerName))}")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"report_to {name!r} needs a package: {pip_install()} {name}") from error
    return _MlflowTracker(module) if name == "mlflow" else _InitTracker(module)
