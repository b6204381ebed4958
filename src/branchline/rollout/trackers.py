"""Trackers that get the figures of a run: trackio, Weights & Biases, mlflow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from branchline.core.choices import TrackerName
from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import pip_install


class Trackers:
    """The trackers of one run, which begins in them with its first figures."""

    def __init__(self, names: Sequence[TrackerName], run_name: str, project: str = "branchline") -> None:
        """Raises InputError for an unknown one and MissingExtraError for one that is not installed."""
        self._run_name, self._project = run_name, project
        self._trackers = [_open_tracker(name) for name in names]
        self._is_started = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if not self._is_started:
            self._is_started = True
            for tracker in self._trackers:
                tracker.start(self._project, self._run_name)
        for tracker in self._trackers:
            tracker.log(values, step)

    def close(self) -> None:
        for tracker in self._trackers if self._is_started else ():
            tracker.finish()


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
