"""`branchline run`, `stats` and `export`: folders, exit codes, signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from branchline import read_jsonl, read_parquet
from branchline.cli.main import main
from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]
FORKER = """
import httpx

async def run(task, session):
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as http:
        for text in ("one", "two"):
            messages = [{"role": "user", "content": "same"}, {"role": "user", "content": text}]
            body = {"model": "m", "messages": messages}
            await http.post(f"{session.base_url}/chat/completions", json=body)
"""
AGENT = """
import httpx, os, asyncio

async def run(task, session):
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as http:
        messages = [{"role": "user", "content": task["prompt"]}]
        await http.post(f"{session.base_url}/chat/completions", json={"model": "m", "messages": messages})
    if task.get("waits") and not os.path.exists("release"):
        open("started", "w").close()
        await asyncio.Event().wait()
    if task.get("fails"):
        raise ValueError("as asked")

def score(task, trajectory):
    return {"score": float(trajectory.answer.endswith(task["prompt"])), "length": len(trajectory.answer)}
"""
FAILING = """
import clerk


async def run(task, session):
    await clerk.run({"prompt": "hello"}, session)
    look_up(task)
def look_up(row):
    return row["answer"]


def score(task, trajectory):
    return 1 / 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("clerk", "failing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "clerk.py").write_text(AGENT)
    rows = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two", "fails": True}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def session_name(session: str) -> str:
    """A session's id without that of the run."""
    return session.partition("-")[2]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_tasks(*arguments: str) -> int:
    return main(["run", "tasks.jsonl", "--engine", "scripted", "--run-folder", "out", *arguments])


def test_a_run_writes_trajectories_samples_and_stats(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tasks("--agent", "clerk:run", "--reward", "clerk:score", "--n", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    stats = json.loads((folder / "out/stats.json").read_text())
    assert printed == stats
    assert {name: stats[name] for name in ("sessions", "finished", "failed", "aborted", "forks")} == {
        "sessions": 4,
        "finished": 2,
        "failed": 2,
        "aborted": 0,
        "forks": 0,
    }
    assert stats["failure_reasons"] == {"runner_error: ValueError: as asked (clerk.py:12 in run)": 2}
    assert stats["sampled_tokens"] == 2 * stats["delivered_tokens"] > 0
    assert stats["dropped_tokens"] == {"failed": stats["delivered_tokens"]}
    lines = [json.loads(line) for line in (folder / "out/trajectories.jsonl").read_text().splitlines()]
    names = {"task", "agent_name", "session", "status", "reward", "histories", "metrics"}
    for line in lines:
        assert names <= set(line)
        assert line["histories"][0]["messages"][-1]["content"] == f"You said: {line['task']['prompt']}"
    assert {session_name(line["session"]): line["status"] for line in lines} == {
        "a-0": "finished",
        "a-1": "finished",
        "b-0": "failed",
        "b-1": "failed",
    }
    samples = list(read_jsonl(folder / "out/samples.jsonl"))
    found = {(session_name(sample.session), sample.reward) for sample in samples}
    assert found == {("a-0", 1.0), ("a-1", 1.0)}
    assert main(["stats", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == stats
    assert main(["stats", "out"]) == 0
    text = capsys.readouterr().out
    assert "4: 2 finished, 2 failed, 0 aborted" in text
    assert main(["export", "out", "--to", "parquet", "--output", "x.parquet"]) == 0
    assert sorted(session_name(row.session) for row in read_parquet("x.parquet")) == ["a-0", "a-1"]
    assert json.loads(next(read_parquet("x.parquet")).reward_extras) == {"length": 13}
    assert main(["export", "out", "--to", "messages"]) == 0
    rows = [json.loads(line) for line in (folder / "out/export.jsonl").read_text().splitlines()]
    assert sorted((session_name(row["session"]), len(row["messages"]), row["reward"]) for row in rows) == [
        ("a-0", 2, 1.0),
        ("a-1", 2, 1.0),
    ]
    assert main(["export", "out", "--to", "jsonl"]) == 0
    assert len(list(read_jsonl(folder / "out/export.jsonl"))) == 2


@pytest.mark.parametrize(
    ("rewarded", "shown"),
    [
        ("[1, 0, 1]", "0.6667 (mean of finished sessions)"),
        ('[1, {"score": 1, "turn": 1}, 0]', "0.5000 (mean of the 2 finished sessions that have one)"),
        ("[None, None, None]", "no finished session has one"),
    ],
)
def test_the_mean_reward_says_of_how_many_sessions_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], rewarded: str, shown: str
) -> None:
    agent = f"async def rewarded(*a):\n    await run(*a)\n    return {rewarded}[int(a[0]['id'])]\n"
    (folder / "clerk.py").write_text(f"{AGENT}\n{agent}")
    rows = [{"id": str(index), "prompt": "one"} for index in range(3)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_tasks("--agent", "clerk:rewarded") == 0
    assert f"reward  {shown}" in re.sub("reward +", "reward  ", capsys.readouterr().out)


def test_a_verifier_that_hangs_fails_its_session_after_its_time_limit(folder: Path) -> None:
    verifier = ["--reward-command", "sleep 60", "--reward-timeout-s", "0.2"]
    assert run_tasks("--agent", "clerk:run", *verifier, "--limit", "1") == 1
    line = json.loads((folder / "out/trajectories.jsonl").read_text())
    assert (line["cause"], line["error"]) == ("reward_error", "TimeoutError: timed out after 0.2 s")


def test_the_options_of_a_run_are_kept_and_can_be_used_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--agent", "clerk:run", "--limit", "1", "--n", "2"]
    assert run_tasks(*run) == 0
    kept = (folder / "out/config.yaml").read_text()
    assert run_tasks(*run, "--resume", "--concurrency", "3") == 0
    assert (folder / "out/config.yaml").read_text() == kept, "a resumed run leaves it as it is"
    capsys.readouterr()
    assert main(["run", "--config", "out/config.yaml", "--run-folder", "again"]) == 0
    assert len((folder / "again/trajectories.jsonl").read_text().splitlines()) == 2
    assert (folder / "again/config.yaml").read_text() == kept.replace("run_folder: out", "run_folder: again")


def test_without_a_name_the_folder_is_that_of_the_command_and_the_time(folder: Path) -> None:
    assert main(["run", "tasks.jsonl", "--engine", "scripted", "--agent", "clerk:run", "--limit", "1"]) == 0
    (found,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"run-\d{8}-\d{6}", found.name)


def test_calls_and_forks_of_a_run_are_logged_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "forker.py").write_text(FORKER)
    run = ["run", "tasks.jsonl", "--engine", "scripted", "--agent", "forker:run", "--limit", "1"]
    assert (
        main([*run, "--run-folder", "a", "--log-level", "info", "--log-format", "json", "--explain-forks"])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines]
    assert messages.count("call") == 2
    assert sum(message.startswith("fork in session") for message in messages) == 1
    assert main([*run, "--run-folder", "b"]) == 0
    assert not re.search("call|session [a-z]", capsys.readouterr().err)


def test_a_session_without_a_reward_fails_where_one_is_required(folder: Path) -> None:
    assert run_tasks("--agent", "clerk:run", "--limit", "1") == 0
    arguments = ["--agent", "clerk:run", "--limit", "1", "--require-reward", "--run-folder", "other"]
    assert main(["run", "tasks.jsonl", "--engine", "scripted", *arguments]) == 1
    reasons = json.loads((folder / "other/stats.json").read_text())["failure_reasons"]
    assert reasons == {"no_reward: the agent returned no reward and posted none": 1}


def test_trackers_get_the_figures_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    verbs = {
        verb: lambda *given, verb=verb, **named: calls.append((verb, given, named))
        for verb in ("init", "log", "finish")
    }
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(**verbs))  # type: ignore[arg-type]
    assert run_tasks("--agent", "clerk:run", "--reward", "clerk:score", "--report-to", "trackio") == 0
    assert [verb for verb, _, _ in calls] == ["init", "log", "finish"]
    assert calls[0][2] == {"project": "branchline", "name": "out"}
    _, (figures,), step = calls[1]
    assert step == {"step": 2}
    assert figures["finished"] == figures["failed"] == figures["reward_mean"] == 1.0
    assert all(isinstance(value, float) for value in figures.values())


def test_a_tracker_that_is_missing_is_refused_and_one_that_fails_does_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    assert run_tasks("--agent", "clerk:run", "--report-to", "wandb") == 2
    assert "report_to 'wandb' needs a package" in capsys.readouterr().err
    assert not (folder / "out").exists()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # type: ignore[arg-type]
    assert run_tasks("--agent", "clerk:run", "--report-to", "wandb") == 0
    assert "report_to: no further figures are sent: AttributeError: " in capsys.readouterr().err


def test_progress_is_a_plain_line_where_there_is_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tasks("--agent", "clerk:run", "--reward", "clerk:score", "--json") == 0
    error = capsys.readouterr().err
    line = re.search(r"^sessions 2/2, \d+:\d\d, 1 failed, 0 aborted, \d+ tokens, reward 1.000$", error, re.M)
    assert line, error
    assert "\x1b" not in error
    assert run_tasks("--agent", "clerk:run", "--reward", "clerk:score", "--resume") == 0
    assert "sessions 2/2, " in capsys.readouterr().err


def test_samples_may_be_parquet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tasks("--agent", "clerk:run", "--sample-format", "parquet") == 0
    rows = read_parquet(folder / "out/samples/part-00000.parquet")
    assert [session_name(row.session) for row in rows] == ["a-0"]
    assert not (folder / "out/samples.jsonl").exists()
    assert main(["export", "out", "--to", "jsonl"]) == 0
    assert "wrote 1 sample to out/export.jsonl" in capsys.readouterr().out


def test_a_run_of_which_nothing_finished_says_so_by_its_exit_code(folder: Path) -> None:
    assert run_tasks("--command", "exit 3", "--limit", "1") == 1
    line = json.loads((folder / "out/trajectories.jsonl").read_text())
    assert (line["status"], line["cause"]) == ("failed", "exit_code")


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("echo 0.25", [], ("finished", 0.25)),
        ("true", [], ("failed", None)),
        ("exit 1", [], ("failed", None)),
        ("exit 1", ["--reward-exit-code"], ("finished", 0.0)),
        ("echo 0.25", ["--reward-exit-code"], ("finished", 1.0)),
        ("exit 2", ["--reward-exit-code"], ("failed", None)),
    ],
)
def test_a_verifier_prints_the_reward_or_its_exit_status_is_one_on_request(
    folder: Path, command: str, options: list[str], expected: tuple[str, float | None]
) -> None:
    run_tasks("--agent", "clerk:run", "--reward-command", command, *options, "--limit", "1")
    line = json.loads((folder / "out/trajectories.jsonl").read_text())
    assert (line["status"], line["reward"]) == expected
    assert line["cause"] == ("" if expected[1] is not None else "reward_error")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "agent: got none, expected --agent MODULE:FUNCTION, --command or --agent-url"),
        (["--agent", "clerk:run", "--command", "true"], "got several, expected one"),
        (["--agent", "x=clerk:run", "--agent", "x=clerk:run"], "--agent: got 'x' twice"),
        (["--agent", "x=clerk:run"], None),
        (["--agent", "nothing:run"], "--agent: got 'nothing:run', which cannot be loaded"),
        (["--agent", "clerk:score"], None),
        (["--agent", "clerk:run", "--reward", "clerk:nothing"], "reward: got 'clerk:nothing'"),
        (
            ["--agent", "clerk:run", "--reward", "clerk:score", "--reward-command", "x"],
            "expected one of them",
        ),
        (
            ["--agent", "clerk:run", "--reward-exit-code"],
            "--reward-exit-code: expected it with",
        ),
        (["--agent", "clerk:run", "--judge-url", "http://h/v1"], "--judge-model: got none"),
        (
            ["--agent", "clerk:run", "--judge-model", "m"],
            "--judge-model: got 'm', expected it with",
        ),
        (["--agent", "clerk:run", "--retry", "sadness=1"], "--retry: got sadness=1"),
        (["--agent", "clerk:run", "--n", "0"], "n: got 0, expected a whole number of 1 or more"),
    ],
)
def test_bad_options_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str | None
) -> None:
    code = run_tasks(*arguments)
    if problem is None:
        assert code in (0, 1)
    else:
        assert code == 2
        assert problem in capsys.readouterr().err
        assert not (folder / "out").exists()


def test_an_unknown_agent_name_is_refused_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tasks.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y", "agent_name": "poet"}\n')
    assert run_tasks("--agent", "clerk:run") == 2
    assert "tasks[1].agent_name: got 'poet', expected one of" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_folder_of_another_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tasks("--agent", "clerk:run") == 0
    assert run_tasks("--agent", "clerk:run") == 2
    assert "has a run; continue it with --resume" in capsys.readouterr().err
    assert run_tasks("--agent", "clerk:run", "--resume") == 0
    assert main(["stats", "nowhere"]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err


def test_an_interrupted_run_writes_what_it_has_and_is_resumed(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text(
        '{"id": "a", "prompt": "one"}\n{"id": "w", "prompt": "x", "waits": 1}\n'
    )
    command = [sys.executable, "-m", "branchline.cli", "run", "tasks.jsonl", "--agent", "clerk:run"]
    process = subprocess.Popen(
        [*command, "--engine", "scripted", "--run-folder", "out"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HANG_S
    while not (folder / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, error
    assert "continue with: branchline run … --run-folder out --resume" in error
    lines = [json.loads(line) for line in (folder / "out/trajectories.jsonl").read_text().splitlines()]
    statuses = {session_name(line["session"]): (line["status"], line["cause"]) for line in lines}
    assert statuses["w-0"] == ("aborted", "interrupted")
    (folder / "release").touch()
    assert run_tasks("--agent", "clerk:run", "--resume") == 0
    stats = json.loads((folder / "out/stats.json").read_text())
    assert (stats["finished"], stats["prompts"]["finished"]) == (2, 2)
    lines = [json.loads(line) for line in (folder / "out/trajectories.jsonl").read_text().splitlines()]
    finished = [session_name(line["session"]) for line in lines if line["status"] == "finished"]
    assert finished.count("a-0") <= 1
    assert "w-0-r1" in finished


def test_the_help_names_variables_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "train", "stats", "export"):
        assert main([command, "--help-all"]) == 0
    text = capsys.readouterr().out
    for name in (
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "BRANCHLINE_TASK",
        "trajectories.jsonl",
        "--agent-reward",
    ):
        assert name in text


def test_a_failed_session_names_the_users_line_and_its_log(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "failing.py").write_text(FAILING)
    assert run_tasks("--agent", "failing:run", "--concurrency", "1") == 1
    error = capsys.readouterr().err
    lines = read_lines(folder / "out/trajectories.jsonl")
    for line in lines:
        log = Path("out/logs", f"{line['session']}.log")
        reason = "KeyError: 'answer' (failing.py:9 in look_up)"
        assert line["error"] == reason
        assert f"session {line['session']} failed: runner_error: {reason}; log: {log}\n" in error
        text = log.read_text()
        assert "Traceback" in text
        assert "in run\n" in text
        assert 'return row["answer"]' in text
    assert "Traceback" not in error


def test_a_failed_reward_names_the_users_line_and_its_log(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "failing.py").write_text(FAILING)
    assert run_tasks("--agent", "clerk:run", "--reward", "failing:score") == 1
    error = capsys.readouterr().err
    lines = read_lines(folder / "out/trajectories.jsonl")
    (line,) = [line for line in lines if line["cause"] == "reward_error"]
    assert line["error"] == "ZeroDivisionError: division by zero (failing.py:13 in score)"
    assert f"{line['error']}; log: out/logs/{line['session']}.log\n" in error
    assert "return 1 / 0" in (folder / f"out/logs/{line['session']}.log").read_text()


def test_the_log_of_a_failed_command_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tasks("--command", "echo oh; exit 3") == 1
    (line, *_) = read_lines(folder / "out/trajectories.jsonl")
    log = f"out/logs/{line['session']}.log"
    assert f"exit_code: exit code 3 / oh; log: {log}\n" in capsys.readouterr().err
    assert (folder / log).read_text() == "oh\n"
