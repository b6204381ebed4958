"""The folder of a rollout: what it writes, and what a resumed one continues from.

    trajectories.jsonl    a line for each session
    samples.jsonl         a line for each sample; or samples/part-….parquet
    stats.json            the figures of all sessions
    journal               the calls of all sessions, for a resumed run; or journals/gateway-…, and
                          gateways.json, which names their machines
    run.json              which tasks the run is for
    logs/                 the output of commands

A folder belongs to one run: the same tasks, with the same number of sessions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from branchline.core.errors import InputError
from branchline.core.sample import Sample
from branchline.export.columns import SampleRow
from branchline.export.jsonl import read_jsonl_rows, replace_file
from branchline.rollout.sinks import (
    SAMPLES_FILE,
    SAMPLES_FOLDER,
    TRAJECTORIES_FILE,
    JsonlSink,
    ParquetSink,
    Sink,
    read_lines,
)
from branchline.rollout.stats import RolloutStats
from branchline.rollout.tasks import RolloutTask, task_digest

SampleFormat = Literal["jsonl", "parquet"]
_RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunFolder:
    """An open folder of a rollout."""

    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        tasks: Sequence[RolloutTask],
        n: int,
        *,
        resume: bool = False,
        is_ray: bool = False,
    ) -> RunFolder:
        """Opens a new folder or, with `resume`, that of the same run. Raises InputError for any other.

        `is_ray`: the journals are those of gateways in a Ray cluster.
        """
        settings = {"tasks": len(tasks), "tasks_digest": task_digest(tasks), "n": n, "ray": is_ray}
        file = path / _RUN_FILE
        if file.exists() and not resume:
            raise InputError(f"out: {path} has a run; continue it with --resume, or name another folder")
        if not file.exists() and (path / TRAJECTORIES_FILE).exists():
            raise InputError(f"out: {path} has {TRAJECTORIES_FILE} and no {_RUN_FILE}, expected a new folder")
        if file.exists():
            known = {"ray": False, **json.loads(file.read_text())}
            for name, value in settings.items():
                if known.get(name) != value:
                    raise InputError(f"{name}: got {value!r}, expected {known.get(name)!r}, as in {file}")
        else:
            path.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as opened:
                opened.write(json.dumps(settings, indent=1).encode() + b"\n")
        return cls(path)

    @property
    def journal_path(self) -> Path:
        return self.path / "journal"

    def open_sinks(self, samples: SampleFormat = "jsonl") -> tuple[list[Sink], RolloutStats]:
        """Returns the sinks of the folder, and the figures of the sessions that it has."""
        sinks: list[Sink] = []
        if samples == "parquet":
            sinks.append(ParquetSink(self.path / SAMPLES_FOLDER))
        lines = JsonlSink(self.path, samples=samples == "jsonl")
        # Last: a session with a line has its samples.
        sinks.append(lines)
        return sinks, RolloutStats.from_lines(self.read_trajectory_lines())

    def read_trajectory_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of all sessions; none if there is no file yet."""
        file = self.path / TRAJECTORIES_FILE
        return read_lines(file) if file.exists() else iter(())

    def read_samples(self) -> Iterator[Sample]:
        """Yields all samples, of whichever format."""
        return (row.sample for row in self.read_rows())

    def read_rows(self) -> Iterator[SampleRow]:
        """Yields all samples with the tasks and sessions they come from."""
        if (self.path / SAMPLES_FILE).exists():
            yield from read_jsonl_rows(self.path / SAMPLES_FILE)
        files = sorted((self.path / SAMPLES_FOLDER).glob("part-*.parquet"))
        if files:
            from branchline.export.parquet import read_parquet_rows

            for file in files:
                yield from read_parquet_rows(file)


def find_run_folder(path: Path) -> RunFolder:
    """Returns the folder of an earlier run. Raises InputError if it is none."""
    if not (path / TRAJECTORIES_FILE).is_file():
        raise InputError(f"folder: got {path}, expected the folder of a run, with {TRAJECTORIES_FILE}")
    return RunFolder(path)
