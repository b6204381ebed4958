"""Sinks: where the results of a rollout go, each session once.

A rollout writes a session to all its sinks before the session's place is given to the next one. So a sink
that is slow or full holds the rollout back, and at most as many results as there are places wait in memory.

A sink writes a session once, whatever is written again: the key is the session's id, and each of its samples
has the key `{group}_{slot}_{index}`. `contains` says what a sink has durably, which is how a resumed rollout
finds out what is missing. Ids and keys begin with the id of the run, so a sink takes several rollouts over
the same tasks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from branchline.core.errors import InputError, SessionRefusedError, SinkError
from branchline.core.option_checks import check_count
from branchline.export.columns import SampleRow, check_columns
from branchline.export.jsonl import replace_file, row_to_json
from branchline.export.row_checks import check_to_write
from branchline.loop.timeouts import finish_despite_cancel
from branchline.rollout.session_result import SessionResult, sample_key
from branchline.rollout.stats import PromptStatus, RolloutStats
from branchline.rollout.tasks import RolloutTask, group_name

TRAJECTORIES_FILE = "trajectories.jsonl"
SAMPLES_FILE = "samples.jsonl"
SAMPLES_FOLDER = "samples"
STATS_FILE = "stats.json"
_STATS_INTERVAL_S = 2.0
_MAX_INLINE_TOKENS = 10_000


class Sink(Protocol):
    """Takes the results of sessions."""

    def contains(self, session: str) -> bool:
        """Whether the sink has the session, so that it will not be lost."""
        ...

    async def write(self, result: SessionResult) -> None:
        """Writes a session that the sink does not have; waits while there is no room.

        Raises SessionRefusedError, and writes nothing of it, for a session that the sink can never carry: the
        rollout counts it and goes on. Raises SinkError or OSError if the sink failed, which ends the rollout.
        """
        ...

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        """Notes that all sessions of a task have ended."""
        ...

    async def close(self) -> None:
        """Writes what is buffered."""
        ...


class MemorySink:
    """Keeps results in memory. With `max_pending`, a writer waits until `get` has taken results."""

    def __init__(self, max_pending: int | None = None) -> None:
        if max_pending is not None:
            check_count("max_pending", max_pending)
        self.results: list[SessionResult] = []
        """Results that were not taken by `get`."""
        self._max_pending = max_pending
        self._sessions: set[str] = set()
        self._changed = asyncio.Condition()

    def contains(self, session: str) -> bool:
        return session in self._sessions

    async def write(self, result: SessionResult) -> None:
        async with self._changed:
            limit = self._max_pending
            if limit is not None:
                await self._changed.wait_for(lambda: len(self.results) < limit)
            if result.session not in self._sessions:
                self._sessions.add(result.session)
                self.results.append(result)
            self._changed.notify_all()

    async def get(self) -> SessionResult:
        """Returns the oldest result and removes it; waits for one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.results)
            result = self.results.pop(0)
            self._changed.notify_all()
            return result

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        pass

    async def close(self) -> None:
        pass


class JsonlSink:
    """A folder with `trajectories.jsonl`, a line for each session, and `samples.jsonl`, one for each sample.

    The samples of a session are written before its line: a session with a line is complete. What a killed
    process left of a last line is removed when the folder is opened again.
    """

    def __init__(self, folder: str | Path, *, samples: bool = True) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._has_samples = folder, samples
        self._trajectories, self._samples = folder / TRAJECTORIES_FILE, folder / SAMPLES_FILE
        self._sessions: set[str] = set()
        """Sessions with a line and all samples."""
        self.stats = RolloutStats()
        """The figures of all sessions in the folder; `stats.json` has a copy that is at most seconds old."""
        self._lines: set[str] = set()
        self._keys = set(self._open_samples()) if samples else set()
        for line in open_lines(self._trajectories):
            self._lines.add(line["session"])
            if not samples or self._has_all_samples(line):
                self._sessions.add(line["session"])
            self.stats.add(line)
        self._written_digests: set[str] = set()
        self._stats_written_at = 0.0
        self._lock = asyncio.Lock()

    def _open_samples(self) -> Iterator[str]:
        """Yields the keys of the samples. Raises InputError for a file with other columns than ours."""
        for number, line in enumerate(open_lines(self._samples), 1):
            check_columns(f"{self._samples}:{number}", line.keys())
            yield line["key"]

    def _has_all_samples(self, line: Mapping[str, Any]) -> bool:
        """Whether the samples of a line are in the file; a power failure or a hand may have removed them."""
        group = group_name(line.get("run", ""), line["uid"])
        count = line.get("metrics", {}).get("samples", 0)
        return all(sample_key(group, line.get("slot", 0), index) in self._keys for index in range(int(count)))

    def contains(self, session: str) -> bool:
        return session in self._sessions

    async def write(self, result: SessionResult) -> None:
        async with self._lock:
            if result.session in self._sessions:
                return
            # A thread costs more than writing a short session.
            if sum(map(len, result.samples)) <= _MAX_INLINE_TOKENS:
                self._write(result)
            else:
                # A cancelled write must have ended before the next one begins.
                await finish_despite_cancel(asyncio.to_thread(self._write, result))

    def _write(self, result: SessionResult) -> None:
        if self._has_samples:
            rows = [row for row in check_rows(result) if row.origin.key not in self._keys]
            append_lines(self._samples, [row_to_json(row, self._written_digests) for row in rows])
            self._keys.update(result.sample_keys)
        if result.session not in self._lines:
            append_lines(self._trajectories, [result.line])
            self._lines.add(result.session)
            self.stats.add(result.line)
        self._sessions.add(result.session)
        if time.monotonic() - self._stats_written_at > _STATS_INTERVAL_S:
            self._write_stats()

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        pass

    async def close(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._write_stats)

    def _write_stats(self) -> None:
        write_stats(self._folder, self.stats)
        self._stats_written_at = time.monotonic()


class ParquetSink:
    """A folder of Parquet files, each with the samples of some sessions.

    Rows are buffered until a file has `rows_per_file` of them. A file is written completely or not at all,
    with all samples of its sessions. After a kill, the buffered sessions are missing here and are written
    again by a resumed rollout, from the journal.
    """

    def __init__(self, folder: str | Path, *, rows_per_file: int = 1000) -> None:
        # Imported late: it needs a package of the `parquet` extra.
        from branchline.export.parquet import open_part, write_parquet

        check_count("rows_per_file", rows_per_file)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rows_per_file, self._write_parquet = folder, rows_per_file, write_parquet
        files = sorted(folder.glob("part-*.parquet"))
        self._sessions = {session for file in files for session in open_part(file)}
        self._next_part = 1 + max((int(file.stem.removeprefix("part-")) for file in files), default=-1)
        self._buffer: dict[str, list[SampleRow]] = {}
        self._lock = asyncio.Lock()

    def contains(self, session: str) -> bool:
        return session in self._sessions

    async def write(self, result: SessionResult) -> None:
        async with self._lock:
            if not result.samples or result.session in self._sessions:
                self._sessions.add(result.session)
                return
            self._buffer[result.session] = check_rows(result)
            if sum(map(len, self._buffer.values())) >= self._rows_per_file:
                await self._flush()

    async def _flush(self) -> None:
        sessions, rows = list(self._buffer), [row for rows in self._buffer.values() for row in rows]
        # Another sink may have written to the folder since this one was opened.
        while (path := self._folder / f"part-{self._next_part:05}.parquet").exists():
            self._next_part += 1
        await finish_despite_cancel(asyncio.to_thread(self._write_parquet, rows, path))
        self._next_part += 1
        self._sessions.update(sessions)
        self._buffer.clear()

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        pass

    async def close(self) -> None:
        async with self._lock:
            if self._buffer:
                await self._flush()


def check_rows(result: SessionResult) -> list[SampleRow]:
    """The rows of a session. Raises SessionRefusedError if one of them would not be read back equal."""
    try:
        return [check_to_write(row) for row in result.rows]
    except InputError as error:
        raise SessionRefusedError(result.session, "not a row of a file", str(error)) from error


def write_stats(folder: Path, stats: RolloutStats) -> None:
    """Writes `stats.json`, completely or not at all."""
    with replace_file(folder / STATS_FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(stats.to_json()), indent=1) + b"\n")


def open_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file that this process will append to. An incomplete last line, which a
    killed process may have left, is removed. Raises InputError for any other line that is no object."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)
                return
            end += len(line)
            yield parse_line(path, number, line)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file that another process may be writing."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path}:{number}: got {line[:80]!r}, expected a JSON object")
    return value


def append_lines(path: Path, lines: list[Mapping[str, Any]] | list[dict[str, Any]]) -> None:
    """Appends objects in one write, so that a killed process leaves at most one incomplete line. A write that
    fails, as on a full disk, leaves the file as it was."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    if not data:
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.fstat(file).st_size
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError as error:
        os.ftruncate(file, size)
        raise SinkError(f"{path}: cannot be written: {error}") from error
    finally:
        os.close(file)
