"""The `branchline` command teaches, answers with exit codes, and leaves quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import branchline
from branchline.cli import call_log, merge
from branchline.cli.main import main


def one_call(answer: str = "hi") -> str:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": answer}, "token_ids": [2]}
    body = {"messages": [{"role": "user", "content": "say"}]}
    return json.dumps({"request": body, "response": {"prompt_token_ids": [1], "choices": [choice]}}) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    path.write_text(one_call())
    return path


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def help_of(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_says_what_it_is_for_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    told = help_of(capsys, ["--help"])
    for taught in ("every sampled token", "branchline merge calls.jsonl", "tree", "--version"):
        assert taught in told


@pytest.mark.parametrize("command", ["merge", "tree"])
def test_help_of_a_command_teaches_the_format_and_the_compare_levels(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    told = help_of(capsys, [command, "--help"])
    for taught in (
        f"branchline {command} calls.jsonl",
        '"request": {"messages"',
        '"prompt_token_ids"',
        '"token_ids"',
        "text   a call continues",
        "token  a call continues",
        "(default: text)",
        "--skip-bad",
    ):
        assert taught in told


def test_the_line_that_help_shows_can_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = call_log.LOG_FORMAT_HELP.partition("{")[2].partition("  request and response")[0]
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(json.loads("{" + shown)))
    assert main(["merge", str(path), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["timelines"]
    assert (line["session"], line["agent"], line["exact"]) == ("task-7", "planner", True)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, ["--version"]) == f"branchline {branchline.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["merge"], ["merge", "x", "--compare", "letters"], ["tree", "x", "--width", "3"]],
)
def test_wrong_usage_exits_with_2_and_nothing_on_stdout(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: " in printed.err


def test_an_interrupt_exits_with_130_and_no_traceback(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge, "read_calls", interrupted)
    assert main(["merge", str(log)]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["merge"], ["merge", "--json"], ["tree"]])
def test_a_reader_that_has_left_gets_no_traceback(log: Path, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        arguments = [sys.executable, "-m", "branchline.cli.main", *command, str(log)]
        ended = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_errors_go_to_stderr_with_exit_code_2(tmp_path: Path) -> None:
    ended = run("merge", tmp_path / "nowhere.jsonl")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == f"branchline: error: {tmp_path / 'nowhere.jsonl'}: cannot be read: No such file or directory\n"
    )


def test_an_output_that_knows_only_ascii_gets_escapes(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(one_call("世界"))
    ended = run("tree", path, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert r"\u4e16\u754c" in ended.stdout


def test_no_progress_bar_where_nobody_watches(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "_WORTH_A_BAR", 1)
    ended = run("merge", log, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_progress_bar_is_shown_to_a_terminal_for_a_large_log(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_log, "_WORTH_A_BAR", 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["merge", str(log), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["calls"] == 1
    assert "reading calls.jsonl" in printed.err


def test_help_loads_neither_tokenizers_nor_jinja() -> None:
    code = (
        "import sys; from branchline.cli.main import main\n"
        "try: main(['merge', '--help'])\n"
        "except SystemExit: print({'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("set()\n")
