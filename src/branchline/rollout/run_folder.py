"""The folder of a rollout: what it writes, and what a resumed one continues from.

    trajectories.jsonl    a line for each session
    samples.jsonl         a line for each sample; or samples/part-….parquet
    stats.json            the figures of all sessions
    journal               the calls of all sessions, for a resumed run; or journals/gateway-…, and
                          gateways.json, which names their machines
    run.json              what the run is: its id, tasks, agents, reward, model, …
    config.yaml           the options that `branchline run` began it with
    logs/                 the output of commands, and the tracebacks of what failed, a file for each session

A folder belongs to one run. It is resumed with the same settings only: with another agent, reward or model
its sessions could not be compared with each other, with another format its samples would be written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from branchline.core.errors import InputError
from branchline.core.sample import Sample
from branchline.core.suggestions import near_path
from branchline.export.columns import SampleRow
from branchline.export.jsonl import read_jsonl_rows
from branchline.rollout.run_settings import RUN_FILE, keep_settings
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
from branchline.rollout.tasks import RolloutTask, new_run_id, task_digest

SampleFormat = Literal["jsonl", "parquet"]
LOGS_FOLDER = "logs"


class RunFolder:
    """An open folder of a rollout."""

    def __init__(self, path: str | Path, run_id: str = "", samples: SampleFormat = "jsonl") -> None:
        self.path = Path(path)
        self.run_id = run_id
        """The part of session ids that tells apart several rollouts; empty for a run of an older version."""
        self.samples: SampleFormat = samples

    @classmethod
    def create(
        cls,
        path: str | Path,
        tasks: Sequence[RolloutTask],
        n: int,
        *,
        resume: bool = False,
        is_ray: bool = False,
        samples: SampleFormat = "jsonl",
        settings: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Opens a new folder or, with `resume`, that of the same run.

        `is_ray`: the journals are those of gateways in a Ray cluster. `settings` say what else the run is:
        its agents, its reward, its model; JSON values. Raises InputError for a folder of any other run, with
        each setting that differs.
        """
        path = Path(path)
        file = path / RUN_FILE
        if file.exists() and not resume:
            raise InputError(
                f"run_folder: got {path}, which has a run; continue it with --resume, or name another folder"
            )
        if not file.exists() and (path / TRAJECTORIES_FILE).exists():
            raise InputError(
                f"run_folder: {path} has {TRAJECTORIES_FILE} and no {RUN_FILE}, expected a new folder"
            )
        run: dict[str, Any] = {
            "tasks": len(tasks),
            "tasks_digest": task_digest(tasks),
            "n": n,
            "ray": is_ray,
            "samples": samples,
            **(settings or {}),
        }
        is_new = not file.exists()
        if is_new:
            path.mkdir(parents=True, exist_ok=True)
            run = {"run": new_run_id(), **run}
        # What runs of older versions were, and did not say.
        older = {"run": "", "ray": False, **_written_samples(path)}
        return cls(path, keep_settings(file, run, resume=not is_new, older=older)["run"], samples)

    @property
    def journal_path(self) -> Path:
        return self.path / "journal"

    @property
    def log_folder(self) -> Path:
        return self.path / LOGS_FOLDER

    def open_sinks(self) -> tuple[list[Sink], RolloutStats]:
        """Returns the sinks of the folder, and the figures of the sessions of its run that it has."""
        sinks: list[Sink] = []
        if self.samples == "parquet":
            sinks.append(ParquetSink(self.path / SAMPLES_FOLDER))
        lines = JsonlSink(self.path, samples=self.samples == "jsonl")
        # Last: a session with a line has its samples.
        sinks.append(lines)
        lines_of_run = (line for line in self.read_trajectory_lines() if line.get("run", "") == self.run_id)
        return sinks, RolloutStats.from_lines(lines_of_run)

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


def _written_samples(path: Path) -> dict[str, SampleFormat]:
    """Returns the format of a run by what it has written; empty if that is nothing."""
    if (path / SAMPLES_FILE).exists():
        return {"samples": "jsonl"}
    return {"samples": "parquet"} if any((path / SAMPLES_FOLDER).glob("part-*.parquet")) else {}


def check_run_folder(path: Path, *, resume: bool) -> None:
    """Raises InputError for a path at which no folder can be, and, with `resume`, for one that is no run."""
    first = next(part for part in (path, *path.parents) if part.exists() or part == part.parent)
    if first.exists() and not first.is_dir():
        raise InputError(f"run_folder: got {path}, expected a folder: {first} is a file")
    if resume and not (path / RUN_FILE).is_file():
        raise InputError(
            f"run_folder: got {path}, expected with --resume the folder of a run, with {RUN_FILE}"
            f"{_near_run(path, RUN_FILE)}"
        )


def _near_run(path: Path, file: str) -> str:
    """`; did you mean …?` with the folder of a run: that of a file in one, the latest in a folder of runs, or
    one whose name is like that of a missing folder."""
    if path.is_file() and (path.parent / file).is_file():
        found: Path | None = path.parent
    elif path.is_dir():
        runs = [part.parent for part in path.glob(f"*/{file}")]
        found = max(runs, key=lambda run: (run / file).stat().st_mtime, default=None)
    else:
        near = near_path(path)
        found = near if near is not None and (near / file).is_file() else None
    return f"; did you mean {found}?" if found is not None else ""


def find_run_folder(path: str | Path) -> RunFolder:
    """Returns the folder of an earlier run. Raises InputError if it is none."""
    path = Path(path)
    if not (path / TRAJECTORIES_FILE).is_file():
        raise InputError(
            f"run_folder: got {path}, expected the folder of a run, with {TRAJECTORIES_FILE}"
            f"{_near_run(path, TRAJECTORIES_FILE)}"
        )
    return RunFolder(path)
