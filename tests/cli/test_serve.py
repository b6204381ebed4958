"""`branchline serve` as a person would try it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from branchline.cli.main import main


def test_it_starts_answers_and_says_how_to_be_used(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "branchline.cli", "serve", "--engine", "scripted", "--port", "0"]
    command += ["--journal", str(tmp_path / "run.journal")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(6)]
        told = "".join(lines)
        url = re.search(r"a session +(\S+)", told)
        key = re.search(r"its api key +(\S+)", told)
        assert url is not None, told
        assert key is not None, told
        answer = httpx.post(
            f"{url[1]}/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}]},
            headers={"authorization": f"Bearer {key[1]}"},
        )
        assert answer.json()["choices"][0]["message"]["content"] == "You said: hello"
        assert "curl " in told
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--engine", "vllm"], "expected --engine-url URL"),
        (["--engine", "vllm", "--engine-url", "http://h:1"], "expected --tokenizer DIR or --model DIR"),
        (["--engine", "sglang", "--engine-url", "h:1", "--tokenizer", "."], "expected http://HOST:PORT"),
        (["--engine", "openai", *2 * ["--engine-url", "http://h:1"]], "expected one; --upstream adds more"),
        (["--engine", "scripted", "--rule", "haiku"], "expected model="),
        (["--engine", "scripted", "--rule", "engine=big"], "expected one of the named ones: none"),
        (["--engine", "scripted", "--upstream", "big"], "expected NAME=URL"),
        (["--engine", "scripted", "--no-auth", "--host", "0.0.0.0"], "expected loopback"),
    ],
)
def test_what_is_missing_is_said(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    told = capsys.readouterr()
    assert problem in told.err
    assert not told.out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = capsys.readouterr().out
    assert "--engine vllm --engine-url" in told
    assert "OPENAI_BASE_URL" in told
