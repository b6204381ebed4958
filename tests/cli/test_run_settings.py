"""A resumed run has the settings that it began with; a contradiction is refused by name."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from branchline.cli.agents import AgentOptions
from branchline.cli.commands.run import RunOptions
from branchline.cli.engine_options import EngineOptions
from branchline.cli.main import main
from branchline.cli.run_settings import describe_run

AGENT = """
import httpx

async def run(task, session):
    body = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
    headers = {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient() as http:
        response = await http.post(session.base_url + "/chat/completions", json=body, headers=headers)
    response.raise_for_status()

other = run

def score(task, trajectory):
    return 1.0

def other_score(task, trajectory):
    return 0.5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "teller", raising=False)
    (tmp_path / "teller.py").write_text(AGENT)
    (tmp_path / "rubric.txt").write_text("- Be kind.\n")
    rows = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run_tasks(*arguments: str, agent: str = "teller:run") -> int:
    return main(
        ["run", "tasks.jsonl", "--engine", "scripted", "--run-folder", "out", "--agent", agent, *arguments]
    )


def written(folder: Path) -> dict[str, bytes]:
    paths = [path for path in (folder / "out").rglob("*") if path.is_file() and "journal" not in path.name]
    return {str(path): path.read_bytes() for path in paths}


REWARD = ("--reward", "teller:score")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (("--sample-format", "parquet"), (), "samples: this run has 'parquet', got 'jsonl'"),
        ((), ("--sample-format", "parquet"), "samples: this run has 'jsonl', got 'parquet'"),
        ((), ("--agent", "x=teller:other"), "agents: this run has {'': 'teller:run'}, got {'': 'teller:run'"),
        ((), REWARD, "reward: this run has None, got 'teller:score'"),
        (REWARD, (), "reward: this run has 'teller:score', got None"),
        (REWARD, ("--reward", "teller:other_score"), "reward: this run has 'teller:score', got 'teller:oth"),
        (("--reward-command", "echo 1"), ("--reward-command", "echo 0"), "this run has {'command': 'echo 1'"),
        (
            ("--reward-command", "true; echo 1"),
            ("--reward-command", "true; echo 1", "--reward-exit-code"),
            "'exit_code': False}, got {'command': 'true; echo 1', 'exit_code': True}",
        ),
        ((), ("--judge-url", "http://h/v1", "--judge-model", "m"), "judge: this run has None, got {'model'"),
        ((), ("--n", "2"), "n: this run has 1, got 2"),
        ((), ("--limit", "1"), "tasks: this run has 2, got 1"),
        ((), ("--oversample", "1"), "oversample: this run has 0, got 1"),
        ((), ("--max-staleness", "1"), "max_staleness: this run has None, got 1"),
        ((), ("--agent-reward",), "agent_reward: this run has False, got True"),
        (
            (),
            ("--session-options", '{"sampling": {"temperature": 0}}'),
            "session_options: this run has {}, got {'sampling': {'temperature': 0}}",
        ),
        ((), ("--default-max-tokens", "9"), "default_max_tokens: this run has None, got 9"),
        ((), ("--require-reward",), "require_reward: this run has False, got True"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_by_name_and_changes_nothing(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    before: tuple[str, ...],
    after: tuple[str, ...],
    problem: str,
) -> None:
    assert run_tasks(*before) == 0
    files = written(folder)
    assert run_tasks(*after, "--resume") == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "expected those of out/run.json, or another folder" in error
    assert written(folder) == files
    assert run_tasks(*before, "--resume") == 0, "the settings that it began with still continue it"


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "m"), ("tokenizer", "a"), ("tool_parser", "hermes"), ("reasoning_parser", "x"), ("codec", "x"),
     ("family", "qwen3"), ("stop_id", ["7"]), ("no_stop_id", ["7"]), ("allow_special_tokens", True),
     ("default_chat_template_kwargs", {"a": 1}), ("rule", ["train=no"])],
)  # fmt: skip
def test_a_run_with_another_engine_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
) -> None:
    assert run_tasks() == 0
    file = folder / "out/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert run_tasks("--resume") == 2
    assert f"{name}: this run has {value!r}, got" in capsys.readouterr().err


def test_the_address_of_an_engine_is_no_setting() -> None:
    engines = [EngineOptions("vllm", engine_url=(url,)) for url in ("http://a", "http://b")]
    described = [
        describe_run(RunOptions(agents=AgentOptions("t"), engines=each), {}, None, None, None)
        for each in engines
    ]
    assert described[0] == described[1]


def test_all_contradictions_are_named_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tasks() == 0
    assert run_tasks(*REWARD, "--sample-format", "parquet", "--resume", agent="teller:other") == 2
    error = capsys.readouterr().err
    for name in ("samples", "agents", "reward"):
        assert f"{name}: this run has" in error


def test_the_command_and_the_address_of_an_agent_are_settings(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "tasks.jsonl", "--engine", "scripted", "--run-folder", "out"]
    assert main([*arguments, "--command", "true"]) == 1
    assert main([*arguments, "--command", "false", "--resume"]) == 2
    assert "got {'': {'command': 'false'}}" in capsys.readouterr().err
    assert main([*arguments, "--agent-url", "http://h:1/run", "--resume"]) == 2
    assert "got {'': {'url': 'http://h:1/run'}}" in capsys.readouterr().err


def test_the_rubric_of_a_judge_is_a_setting_and_its_address_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ("--judge-model", "m", "--judge-url")
    assert run_tasks(*judge, "http://127.0.0.1:9/v1") == 1
    assert run_tasks(*judge, "http://127.0.0.1:10/v1", "--resume") == 1
    assert run_tasks(*judge, "http://127.0.0.1:9/v1", "--judge-rubric", "rubric.txt", "--resume") == 2
    assert "judge: this run has {'model': 'm', 'rubric':" in capsys.readouterr().err


def test_what_makes_a_run_faster_may_change(folder: Path) -> None:
    assert run_tasks() == 0
    files = written(folder)
    changed = (
        *("--concurrency", "2", "--timeout-s", "9", "--retry", "connection=3", "--reward-workers", "2"),
        *("--stop-after", "2", "--max-in-flight", "5", "--json"),
    )
    assert run_tasks(*changed, "--resume") == 0
    assert written(folder) == files


@pytest.mark.parametrize("samples", ["jsonl", "parquet"])
def test_a_run_of_an_older_version_continues_with_one_sentence(
    folder: Path, samples: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tasks("--sample-format", samples) == 0
    file = folder / "out/run.json"
    settings = json.loads(file.read_text())
    older = {name: settings[name] for name in ("tasks", "tasks_digest", "n", "ray", "run")}
    file.write_text(json.dumps(older))
    other = {"jsonl": "parquet", "parquet": "jsonl"}[samples]
    assert run_tasks("--sample-format", other, "--resume") == 2
    assert f"samples: this run has '{samples}', got '{other}'" in capsys.readouterr().err, "by its files"
    with caplog.at_level(logging.WARNING):
        assert run_tasks("--sample-format", samples, "--resume") == 0
    (sentence,) = [one.message for one in caplog.records if "run.json" in one.message]
    assert "does not say what the run had as agents, reward, judge" in sentence
    assert json.loads(file.read_text()) == settings, "from now on it does"
    assert run_tasks("--sample-format", samples, *REWARD, "--resume") == 2


def test_a_file_without_settings_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tasks() == 0
    for text in ("", "[]", "{"):
        (folder / "out/run.json").write_text(text)
        assert run_tasks("--resume") == 2
        assert "expected the settings of a run" in capsys.readouterr().err
