"""A killed rollout is resumed: no finished session is repeated, written twice, or missing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pytest

from branchline import read_jsonl, read_parquet
from branchline.core.errors import InputError
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.run_folder import RunFolder
from branchline.rollout.sinks import JsonlSink, append_lines, read_lines
from branchline.rollout.stats import RolloutStats
from branchline.rollout.tasks import read_tasks
from tests.rollout.harness import ask_once, scripted_gateway
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


STOPPED = [{"id": str(index), "prompt": f"question {index}"} for index in range(4)]


async def run_until(folder: Path, finishing: Container[str], **config: Any) -> RolloutStats:
    """Resumes a run over four tasks in which only the agents of some slots end, `{uid}-{slot}`; returns the
    figures and writes what ran into `ran`."""
    never = asyncio.Event()

    async def agent(task: Mapping[str, Any], session: Any) -> float:
        with (folder / "ran").open("a") as file:
            file.write(f"{session.id}\n")
        if session.id.removeprefix("one-").partition("-r")[0] not in finishing:
            await never.wait()
        return await ask_once(task, session)

    async with scripted_gateway(journal=folder / "journal") as gateway:
        sinks, stats = RunFolder(folder, "one").open_sinks()
        (folder / "ran").write_text("")
        rollout = Rollout(
            gateway,
            agent,
            sinks=sinks,
            config=RolloutConfig(n=2, **config),
            resume=True,
            stats=stats,
            run_id="one",
        )
        return await rollout.run(STOPPED)


def finished_slots(folder: Path) -> list[str]:
    lines = read_lines(folder / "trajectories.jsonl")
    return sorted(f"{line['uid']}-{line['slot']}" for line in lines if line["status"] == "finished")


def test_sessions_that_stop_after_aborted_are_run_by_a_run_that_goes_on(tmp_path: Path) -> None:
    everything = [f"{uid}-{slot}" for uid in range(4) for slot in range(2)]
    # Tasks 1 and 3 end, one session of task 2 does, too; the others are aborted.
    first = ["1-0", "1-1", "2-0", "3-0", "3-1"]
    asyncio.run(run_until(tmp_path, first, stop_after=2))
    assert finished_slots(tmp_path) == first
    lines = (tmp_path / "trajectories.jsonl").read_bytes()
    asyncio.run(run_until(tmp_path, everything, stop_after=2))
    assert (tmp_path / "ran").read_text() == "", "there are enough tasks already"
    assert (tmp_path / "trajectories.jsonl").read_bytes() == lines
    stats = asyncio.run(run_until(tmp_path, everything))
    assert finished_slots(tmp_path) == everything
    assert sorted((tmp_path / "ran").read_text().split()) == ["one-0-0-r1", "one-0-1-r1", "one-2-1-r1"]
    assert stats.abort_reasons == {"early_stop": 3}
    asyncio.run(run_until(tmp_path, everything))
    assert (tmp_path / "ran").read_text() == ""


def test_sessions_that_oversampling_aborted_are_not_run_again(tmp_path: Path) -> None:
    everything = [f"{uid}-{slot}" for uid in range(4) for slot in range(4)]
    first = [f"{uid}-{slot}" for uid in range(4) for slot in (2, 3)]
    asyncio.run(run_until(tmp_path, first, oversample=2))
    assert finished_slots(tmp_path) == first
    asyncio.run(run_until(tmp_path, everything, oversample=2))
    assert (finished_slots(tmp_path), (tmp_path / "ran").read_text()) == (first, "")


@pytest.mark.parametrize("damage", ["half a line", "a line", "the file"])
def test_samples_that_a_file_lost_are_written_again_from_the_journal(tmp_path: Path, damage: str) -> None:
    asyncio.run(run_tasks(tmp_path, Failpoint(), resume=False))
    samples, lines = tmp_path / "samples.jsonl", (tmp_path / "trajectories.jsonl").read_bytes()
    before = {line["key"]: line["session"] for line in read_lines(samples)}
    text = samples.read_bytes()
    if damage == "half a line":
        samples.write_bytes(text[:-50])
    elif damage == "a line":
        samples.write_bytes(b"".join(text.splitlines(keepends=True)[1:]))
    else:
        samples.unlink()
    asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True))
    after = [(line["key"], line["session"]) for line in read_lines(samples)]
    assert sorted(after) == sorted(before.items())
    assert (tmp_path / "trajectories.jsonl").read_bytes() == lines, "a session has one line"


def test_samples_that_neither_a_file_nor_the_journal_has_are_refused_by_name(tmp_path: Path) -> None:
    asyncio.run(run_tasks(tmp_path, Failpoint(), resume=False))
    lines = (tmp_path / "trajectories.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").unlink()
    for file in tmp_path.glob("journal*"):
        file.unlink()
    with pytest.raises(InputError, match=r"session \w+-0-0: got a line .* and no samples in JsonlSink"):
        asyncio.run(run_tasks(tmp_path, Failpoint(), resume=True))
    assert (tmp_path / "trajectories.jsonl").read_bytes() == lines


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
