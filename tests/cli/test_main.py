"""The `branchline` command: help texts, exit codes, and errors on stderr only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import branchline
from branchline import __version__
from branchline.cli import call_log, merge
from branchline.cli.log_options import LOG_FORMAT_HELP
from branchline.cli.main import main
from tests.cli.harness import log_line, raw_message


def write_log(path: Path, answer: str = "hi") -> Path:
    path.write_text(json.dumps(log_line([raw_message("user", "say")], answer, [1], [2])) + "\n")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "calls.jsonl")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def help_text(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "branchline", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"branchline {__version__}\n", "")


def test_help_states_the_purpose_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, ["--help"])
    for expected in ("every sampled\ntoken", "branchline merge calls.jsonl", "tree", "--version"):
        assert expected in text


@pytest.mark.parametrize("command", ["merge", "tree"])
def test_help_of_a_log_command_describes_the_format_and_what_is_merged(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = help_text(capsys, [command, "--help"])
    for expected in (
        f"branchline {command} calls.jsonl",
        '"request": {"messages"',
        '"prompt_token_ids"',
        '"token_ids"',
        "By default a call continues an answer if",
        "--repair        other ids",
        "(default: text)",
        "--skip-bad",
    ):
        assert expected in text


def test_the_log_line_shown_in_help_can_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = LOG_FORMAT_HELP.partition("{")[2].partition("  request and response")[0]
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(json.loads("{" + example)))
    assert main(["merge", str(path), "--json"]) == 0
    (timeline,) = json.loads(capsys.readouterr().out)["timelines"]
    assert (timeline["session"], timeline["agent"], timeline["exact"]) == ("task-7", "planner", True)


def test_version_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_text(capsys, ["--version"]) == f"branchline {branchline.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["unknown"], ["merge"], ["merge", "x", "--compare", "bytes"], ["tree", "x", "--width", "3"]],
)
def test_wrong_usage_exits_with_2_and_an_empty_stdout(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: " in printed.err


def test_an_interrupt_exits_with_130_and_without_a_traceback(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(merge, "load_call_log", interrupt)
    assert main(["merge", str(log)]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["merge"], ["merge", "--json"], ["tree"]])
def test_a_closed_pipe_exits_with_141_and_without_a_traceback(log: Path, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        arguments = [sys.executable, "-m", "branchline.cli", *command, str(log)]
        done = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_errors_go_to_stderr_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    done = run("merge", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"branchline: error: {path}: cannot be read: No such file or directory\n"


def test_an_ascii_stdout_gets_escaped_characters(tmp_path: Path) -> None:
    done = run("tree", write_log(tmp_path / "calls.jsonl", "世界"), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"\u4e16\u754c" in done.stdout


def test_a_large_log_shows_a_progress_bar_on_a_terminal(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_log, "_PROGRESS_BAR_BYTES", 1)
    assert main(["merge", str(log), "--json"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["merge", str(log), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["calls"] == 1
    assert "reading calls.jsonl" in printed.err


def test_help_imports_neither_tokenizers_nor_jinja() -> None:
    code = (
        "import sys; from branchline.cli.main import main\n"
        "main(['merge', '--help']); print({'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
