"""`branchline serve` as a person would try it."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from branchline.cli import serve
from branchline.cli.engines import build_router
from branchline.cli.main import main
from branchline.engines.replicas import Replicas
from branchline.engines.upstream_chat import UpstreamChat


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
        (["--engine", "scripted", "--default-max-tokens", "0"], "default_max_tokens: got 0, expected 1"),
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
    assert "4096 where the engine does not say" in " ".join(told.split())


# -- keys --------------------------------------------------------------------------------------------

KEYS = {
    "OPENAI_API_KEY": "sk-openai",
    "BRANCHLINE_ENGINE_KEY": "ek",
    "BRANCHLINE_UPSTREAM_KEY_BIG_ONE": "uk-big",
    "BRANCHLINE_UPSTREAM_KEY_OURS": "",
}


def _keys(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], **given: object) -> dict[str, str]:
    """The key that each server of a command line would be sent, where only these are in the environment."""
    for name, value in KEYS.items():
        monkeypatch.delenv(name, raising=False)
        if name in names:
            monkeypatch.setenv(name, value)
    plain = {"tokenizer": None, "model": None, "tool_parser": None, "reasoning_parser": None, "rule": []}
    _, fleet = build_router(argparse.Namespace(**{**plain, "engine_url": [], "upstream": [], **given}))
    main = (
        fleet.default_engine.engines[0]
        if isinstance(fleet.default_engine, Replicas)
        else fleet.default_engine
    )
    clients = {"main": getattr(main, "client", None)}
    for name in fleet.engine_names[1:]:
        upstream = fleet._named_engines[name]
        assert isinstance(upstream, UpstreamChat)
        clients[name] = upstream.client
    return {
        name: ((re.search(r"(?i)authorization: Bearer (\S+)", client._headers) or ["", ""])[1])
        for name, client in clients.items()
        if client is not None
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_key_of_openai_is_not_sent_to_servers_of_ones_own(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchline.cli.engines._codec", lambda options: None)
    server = {"engine": engine, "engine_url": ["http://h:1"], "tokenizer": Path()}
    assert _keys(monkeypatch, ("OPENAI_API_KEY",), **server) == {"main": ""}
    assert _keys(monkeypatch, ("OPENAI_API_KEY", "BRANCHLINE_ENGINE_KEY"), **server) == {"main": "ek"}


def test_each_upstream_gets_the_key_that_is_meant_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    upstreams = ["big-one=https://a/v1", "ours=http://b/v1", "other=https://c/v1"]
    found = _keys(monkeypatch, tuple(KEYS), engine="scripted", upstream=upstreams)
    assert found == {"big-one": "uk-big", "ours": "", "other": "sk-openai"}
    openai = {"engine": "openai", "engine_url": ["https://a/v1"]}
    assert _keys(monkeypatch, ("OPENAI_API_KEY",), **openai) == {"main": "sk-openai"}
    assert _keys(monkeypatch, tuple(KEYS), **openai) == {"main": "ek"}


# -- a server of its own -----------------------------------------------------------------------------


@contextmanager
def _serving(*more: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and what it says of itself."""
    command = [sys.executable, "-m", "branchline.cli", "serve", "--engine", "scripted", "--port", "0", *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as server:
        assert server.stdout is not None
        try:
            yield server, "".join(server.stdout.readline() for _ in range(6))
        finally:
            server.kill()


def test_the_admin_key_may_come_from_the_environment() -> None:
    with _serving(BRANCHLINE_ADMIN_KEY="ak-mine") as (server, told):
        assert "admin key      ak-mine" in told
        url = re.search(r" on (http://\S+)", told)
        assert url is not None
        assert httpx.get(f"{url[1]}/sessions", headers={"authorization": "Bearer ak-mine"}).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_answers_whose_length_nobody_limits_have_the_limit_it_was_started_with() -> None:
    with _serving("--default-max-tokens", "3") as (_, told):
        url, key = re.search(r"a session +(\S+)", told), re.search(r"its api key +(\S+)", told)
        assert url is not None
        assert key is not None
        answer = httpx.post(
            f"{url[1]}/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}]},
            headers={"authorization": f"Bearer {key[1]}"},
        ).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


def test_the_address_it_prints_is_the_public_one() -> None:
    with _serving("--public-url", "https://bl.example") as (_, told):
        assert "a session      https://bl.example/sessions/" in told


@pytest.mark.parametrize(("drain_s", "signals"), [("1000", 2), ("0.1", 1)])
def test_a_request_that_never_ends_does_not_keep_it_from_stopping(drain_s: str, signals: int) -> None:
    with _serving("--drain-s", drain_s, BRANCHLINE_ADMIN_KEY="ak") as (server, told):
        url = re.search(r" on http://(\S+):(\d+)", told)
        assert url is not None
        assert server.stderr is not None
        with socket.create_connection((url[1], int(url[2])), 20) as client:
            head = (
                "POST /sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ak\r\nexpect: 100-continue\r\n"
            )
            client.sendall(f"{head}content-length: 9\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(1000)  # it waits for the body now
            server.send_signal(signal.SIGTERM)
            while "letting running calls end" not in server.stderr.readline():
                assert server.poll() is None
            if signals > 1:
                server.send_signal(signal.SIGTERM)
            assert b" 503 " in client.recv(1000)
        assert server.wait(20) == 0
        assert "Traceback" not in server.stderr.read()


def test_the_model_that_comes_by_default_does_not_talk_for_ever() -> None:
    def asked(**given: object) -> int | None:
        options = {"engine": "hf", "model": None, "default_max_tokens": None, **given}
        return serve._default_max_tokens(Namespace(**options))

    assert asked() == 512
    assert asked(default_max_tokens=7) == 7
    assert asked(model="folder") is None
    assert asked(engine="vllm") is None
