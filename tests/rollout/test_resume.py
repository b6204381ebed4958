"""A killed rollout is resumed: no finished session is repeated, written twice, or missing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from branchline import read_jsonl, read_parquet
from branchline.core.errors import InputError
from branchline.rollout.run_folder import RunFolder
from branchline.rollout.sinks import JsonlSink, append_lines, read_lines
from branchline.rollout.tasks import read_tasks
from tests.rollout.kill_run import POINTS, TASKS, Failpoint, N, run_tasks

ROOT = Path(__file__).parents[2]


def kill_at(folder: Path, spec: str, *arguments: str) -> None:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.rollout.kill_run", str(folder), spec, *arguments]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_rollout_continues_and_loses_and_repeats_nothing(
    tmp_path: Path, point: str, judged: bool
) -> None:
    kill_at(tmp_path, f"{point}:3", *(["judged"] if judged else []))
    before = {
        line["session"]: line
        for line in RunFolder(tmp_path).read_trajectory_lines()
        if line["status"] == "finished"
    }
    stats = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True, is_judged=judged))
    lines = list(read_lines(tmp_path / "trajectories.jsonl"))
    by_session = {line["session"]: line for line in lines}
    assert len(by_session) == len(lines), "no session is written twice"
    for session, line in before.items():
        assert by_session[session] == line, "no finished session is run again"
    finished = [line for line in lines if line["status"] == "finished"]
    slots = Counter((line["uid"], line["slot"]) for line in finished)
    assert slots == {(task["id"], slot): 1 for task in TASKS for slot in range(N)}
    assert {line["cause"] for line in lines if line["status"] != "finished"} <= {"interrupted"}
    for line in finished:
        assert line["reward"] is not None
        assert line["reward"] in ((0.25, 0.75) if judged else (float(line["uid"]),))
    if judged:
        rewards = Counter(line["reward"] for line in finished)
        assert rewards == {0.25: len(TASKS), 0.75: len(TASKS)}, "sessions are judged beside their whole group"
    for text in (tmp_path / "acknowledged").read_text().splitlines():
        session, answer = json.loads(text)
        histories = by_session[session]["histories"]
        texts = [message["content"] for history in histories for message in history["messages"]]
        assert answer in texts, "no answer that an agent received is missing"
    keys = [line["key"] for line in read_lines(tmp_path / "samples.jsonl")]
    assert sorted(keys) == sorted(f"{line['group']}_{line['slot']}_0" for line in finished)
    assert {line["run"] for line in lines} == {json.loads((tmp_path / "run.json").read_text())["run"]}
    samples = list(read_jsonl(tmp_path / "samples.jsonl"))
    rows = [row for file in sorted((tmp_path / "samples").glob("*.parquet")) for row in read_parquet(file)]
    for one in (samples, rows):
        assert sorted(sample.session for sample in one) == sorted(line["session"] for line in finished)
        assert sum(sample.trained_tokens for sample in one) == stats.delivered_tokens
    written = json.loads((tmp_path / "stats.json").read_text())
    assert written == stats.to_json()
    assert (stats.sessions, stats.finished) == (len(lines), len(finished))


def test_a_complete_run_that_is_resumed_runs_nothing(tmp_path: Path) -> None:
    first = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=False))
    lines = (tmp_path / "trajectories.jsonl").read_bytes()
    again = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True))
    assert (tmp_path / "trajectories.jsonl").read_bytes() == lines
    assert again.to_json() == first.to_json()


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    tasks = read_tasks(TASKS)
    RunFolder.create(tmp_path, tasks, 2)
    RunFolder.create(tmp_path, tasks, 2, resume=True)
    with pytest.raises(InputError, match="has a run; continue it with --resume"):
        RunFolder.create(tmp_path, tasks, 2)
    with pytest.raises(InputError, match="n: this run has 2, got 3; expected those of"):
        RunFolder.create(tmp_path, tasks, 3, resume=True)
    with pytest.raises(InputError, match="tasks: this run has 4, got 3"):
        RunFolder.create(tmp_path, tasks[:3], 2, resume=True)
    changed = [*TASKS[:3], {"id": "3", "prompt": "another"}]
    with pytest.raises(InputError, match="tasks_digest"):
        RunFolder.create(tmp_path, read_tasks(changed), 2, resume=True)


def test_a_torn_last_line_is_removed_and_written_again(tmp_path: Path) -> None:
    asyncio.run(run_tasks(tmp_path, Failpoint(), resume=False))
    for name in ("trajectories.jsonl", "samples.jsonl"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-10])
    stats = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True))
    lines = list(read_lines(tmp_path / "trajectories.jsonl"))
    assert len({line["session"] for line in lines}) == len(lines) == stats.finished == 8
    assert len(list(read_jsonl(tmp_path / "samples.jsonl"))) == 8


def test_a_line_that_is_no_object_is_an_error_with_its_place(tmp_path: Path) -> None:
    append_lines(tmp_path / "trajectories.jsonl", [{"session": "a", "status": "finished", "uid": "a"}])
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write("what\n")
    with pytest.raises(InputError, match=r"trajectories.jsonl:2: got b'what\\n', expected a JSON object"):
        JsonlSink(tmp_path)


def test_a_written_session_is_not_run_again_although_its_journal_is_gone(tmp_path: Path) -> None:
    first = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=False))
    before = [(tmp_path / name).read_bytes() for name in ("trajectories.jsonl", "acknowledged")]
    for file in tmp_path.glob("journal*"):
        file.unlink()
    again = asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True))
    after = [(tmp_path / name).read_bytes() for name in ("trajectories.jsonl", "acknowledged")]
    assert after == before
    assert again.to_json() == first.to_json()
