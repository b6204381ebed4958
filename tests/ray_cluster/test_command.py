"""`branchline run --ray auto`: it starts a Ray of its own, and a killed run is resumed. `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray")

from branchline.rollout.sinks import read_lines  # noqa: E402
from tests.ray_cluster.agents import read_notes  # noqa: E402

ROOT = Path(__file__).parents[2]


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    tasks = tmp_path / "tasks.jsonl"
    shared = {"turns": 5, "sleep_s": 0.1, "file": str(tmp_path / "notes"), "score": 1}
    rows = [{"id": str(index), "prompt": f"question {index}", **shared} for index in range(6)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "branchline.cli", "run", str(tasks), "--engine", "scripted", "--json"]
    command += ["--agent", "tests.ray_cluster.agents:converse", "--run-folder", str(tmp_path / "out")]
    command += ["--ray", "auto", "--gateways", "2", "--concurrency", "3", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )


def stop(process: subprocess.Popen[str], number: signal.Signals, file: Path, *, lines: int) -> None:
    """Sends a signal when the file has so many lines, and waits for the end."""
    deadline = time.monotonic() + 90
    while not file.exists() or len(file.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)


def test_an_interrupted_run_writes_the_sessions_that_were_running(tmp_path: Path) -> None:
    interrupted = start(tmp_path)
    stop(interrupted, signal.SIGTERM, tmp_path / "notes", lines=4)
    assert interrupted.returncode == 130
    lines = list(read_lines(tmp_path / "out" / "trajectories.jsonl"))
    assert {(line["status"], line["cause"]) for line in lines} == {("aborted", "interrupted")}
    answers = {line["session"]: line["metrics"]["answers"] for line in lines}
    for session, noted in Counter(session for session, *_ in read_notes(tmp_path / "notes")).items():
        assert answers[session] >= noted


def test_a_killed_run_is_resumed_with_the_journals_of_its_gateways(tmp_path: Path) -> None:
    killed = start(tmp_path)
    out = tmp_path / "out" / "trajectories.jsonl"
    stop(killed, signal.SIGKILL, out, lines=2)
    before = {line["session"]: line for line in read_lines(out)}
    resumed = start(tmp_path, "--resume")
    printed, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    lines = list(read_lines(out))
    by_session = {line["session"]: line for line in lines}
    assert len(by_session) == len(lines), "no session is written twice"
    assert all(by_session[session] == line for session, line in before.items())
    finished = [line for line in lines if line["status"] == "finished"]
    assert sorted(line["uid"] for line in finished) == [str(index) for index in range(6)]
    assert {line["cause"] for line in lines} <= {"", "interrupted"}
    for session, _, content, _ in read_notes(tmp_path / "notes"):
        messages = [m["content"] for one in by_session[session]["histories"] for m in one["messages"]]
        assert content in messages, "no answer that an agent received is missing"
    stats = json.loads(printed.splitlines()[-1])
    assert stats == json.loads((tmp_path / "out" / "stats.json").read_text())
    assert stats["finished"] == 6
