"""Samples in the files of a run: with the task and session that they are from, in one schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from branchline.cli.main import main
from branchline.core.errors import InputError
from branchline.export.columns import FILE_COLUMNS, SampleOrigin
from branchline.export.jsonl import read_jsonl_rows
from branchline.export.parquet import PARQUET_SCHEMA, read_parquet_rows
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.run_folder import RunFolder, find_run_folder
from branchline.rollout.session_result import SessionResult
from branchline.rollout.sinks import JsonlSink, MemorySink, ParquetSink, Sink
from branchline.rollout.tasks import read_tasks
from tests.export.compare import assert_equal_samples
from tests.rollout.harness import ask, run, scripted_gateway

TASKS = [{"id": "a", "prompt": "q", "agent_name": "coder"}, {"id": "b", "prompt": "r", "agent_name": "coder"}]


async def coder(task: Mapping[str, Any], session: Any) -> dict[str, Any]:
    """Asks in two conversations."""
    await ask(session, str(task["prompt"]))
    await ask(session, "another conversation")
    return {"score": 1.0, "note": "ü 😀"}


def run_into(sinks: list[Sink], **config: Any) -> MemorySink:
    memory = MemorySink()

    async def test() -> None:
        async with scripted_gateway() as gateway:
            rollout = Rollout(
                gateway, {"coder": coder}, sinks=[*sinks, memory], config=RolloutConfig(**config)
            )
            await rollout.run(TASKS)

    run(test)
    return memory


def test_folders_of_sinks_and_runs_may_be_texts(tmp_path: Path) -> None:
    path = str(tmp_path / "text")
    memory = run_into([JsonlSink(path), ParquetSink(f"{path}/samples")])
    keys = {key for result in memory.results for key in result.sample_keys}
    for folder in (RunFolder(path), find_run_folder(path)):
        assert len(list(folder.read_trajectory_lines())) == len(memory.results)
    assert {row.origin.key for row in read_jsonl_rows(f"{path}/samples.jsonl")} == keys
    files = Path(path, "samples").glob("*.parquet")
    assert {row.origin.key for file in files for row in read_parquet_rows(file)} == keys
    created = RunFolder.create(f"{path}/other", read_tasks(TASKS), 1)
    assert (created.path, created.journal_path.name) == (Path(path, "other"), "journal")


@pytest.mark.parametrize("samples", ["jsonl", "parquet"])
def test_files_of_a_run_say_where_each_sample_is_from(tmp_path: Path, samples: Any) -> None:
    folder = RunFolder(tmp_path / "run", samples=samples)
    sinks, _ = folder.open_sinks()
    results = {result.session: result for result in run_into(sinks, n=2).results}
    expected = {
        key: (sample, SampleOrigin(key, job.task.uid, job.task.group, "coder", job.slot, job.attempt))
        for result in results.values()
        for job in (result.job,)
        for key, sample in zip(result.sample_keys, result.samples, strict=True)
    }
    assert len(expected) == 8
    rows = {row.origin.key: row for row in folder.read_rows()}
    assert set(rows) == set(expected)
    # The same after `branchline export`, in either format.
    for format in ("parquet", "jsonl"):
        target = tmp_path / f"export.{format}"
        assert main(["export", str(folder.path), "--to", format, "--output", str(target)]) == 0
        read = read_parquet_rows if format == "parquet" else read_jsonl_rows
        assert {row.origin.key for row in read(target)} == set(expected)
        rows |= {f"{format} {row.origin.key}": row for row in read(target)}
    for key, row in rows.items():
        sample, origin = expected[str(key).rpartition(" ")[2]]
        assert row.origin == origin
        assert_equal_samples(row.sample, sample)
    schema = pq.read_schema(tmp_path / "export.parquet")
    assert schema == PARQUET_SCHEMA


def test_all_parts_of_a_folder_have_one_schema(tmp_path: Path) -> None:
    run_into([ParquetSink(tmp_path, rows_per_file=3)], n=3)
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) > 1
    assert all(pq.read_schema(file) == PARQUET_SCHEMA for file in files)
    table = pq.read_table(tmp_path)
    assert len(set(table["key"].to_pylist())) == table.num_rows == 12


def test_a_folder_with_files_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    run_into([ParquetSink(tmp_path)])
    (file,) = tmp_path.glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["key", "uid"]), file)
    with pytest.raises(
        InputError, match=r"part-00000.parquet: got no column key, uid, expected the columns of"
    ):
        ParquetSink(tmp_path)
    pq.write_table(table.append_column("more", table["key"]), file)
    with pytest.raises(InputError, match=r"part-00000.parquet: got another column, more, expected"):
        ParquetSink(tmp_path)
    other = table.set_column(table.schema.get_field_index("slot"), "slot", table["slot"].cast("int32"))
    pq.write_table(other, file)
    with pytest.raises(InputError, match=r"part-00000.parquet: slot: got int32, expected int64: continue in"):
        ParquetSink(tmp_path)
    file.write_text("text")
    with pytest.raises(InputError, match="expected Parquet"):
        ParquetSink(tmp_path)


def test_a_file_of_lines_with_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    run_into([JsonlSink(tmp_path)])
    file = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [list(line) for line in lines] == [[one.name for one in FILE_COLUMNS]] * len(lines)
    JsonlSink(tmp_path)
    del lines[1]["slot"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        InputError, match=r"samples.jsonl:2: got no column slot, expected the columns of this"
    ):
        JsonlSink(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_session_that_a_file_cannot_hold_is_refused_and_the_others_are_written(
    tmp_path: Path, kind: str
) -> None:
    """A single bad row in a buffer would end the run, with all sessions that were buffered beside it."""

    class Spoiled:
        """Passes sessions on, one of them with half an emoji."""

        def __init__(self, sink: Sink) -> None:
            self.sink = sink
            self.close, self.end_prompt, self.contains = sink.close, sink.end_prompt, sink.contains

        async def write(self, result: SessionResult) -> None:
            if result.job.task.uid == "a":
                samples = [replace(one, agent="\ud83d") for one in result.trajectory.samples]
                trajectory = replace(result.trajectory, samples=tuple(samples))
                result = replace(result, trajectory=trajectory)
            await self.sink.write(result)

    async def test() -> None:
        sink: Sink = JsonlSink(tmp_path) if kind == "jsonl" else ParquetSink(tmp_path)
        async with scripted_gateway() as gateway:
            stats = await Rollout(gateway, {"coder": coder}, sinks=[Spoiled(sink)]).run(TASKS)
        assert dict(stats.refused) == {"Spoiled: not a row of a file": 1}
        read = (
            read_jsonl_rows(tmp_path / "samples.jsonl")
            if kind == "jsonl"
            else read_parquet_rows(tmp_path / "part-00000.parquet")
        )
        assert [row.origin.uid for row in read] == ["b", "b"]

    run(test)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_sizes_that_are_no_count_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match=r"rows_per_file: got .*, expected a whole number of 1 or more"):
        ParquetSink(tmp_path, rows_per_file=value)
    with pytest.raises(InputError, match=r"max_pending: got .*, expected a whole number of 1 or more"):
        MemorySink(max_pending=value)
