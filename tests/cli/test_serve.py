"""`branchline serve`: options, keys, and a served gateway in its own process."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.cli.engine_options import EngineOptions, default_max_tokens
from branchline.cli.engines import build_router
from branchline.cli.main import main, parse_options
from branchline.core.message import Message
from branchline.engines.replicas import Replicas
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.config import GatewayConfig
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS
from tests.chat.harmony import save_harmony
from tests.chat.harness import save_byte_level
from tests.cli.harness import served_gateway
from tests.hang import HANG_S


def test_it_starts_prints_how_to_use_it_and_answers(tmp_path: Path) -> None:
    with served_gateway("--journal", str(tmp_path / "run.journal")) as gateway:
        assert "curl " in gateway.banner
        answer = gateway.chat("hello").json()
        assert answer["choices"][0]["message"]["content"] == "You said: hello"
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(HANG_S) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--engine", "vllm"], "expected --engine-url URL"),
        (["--engine", "sglang", "--engine-url", "h:1", "--tokenizer", "."], "expected http://HOST:PORT"),
        (["--engine", "openai", *2 * ["--engine-url", "http://h:1"]], "expected one; --upstream adds more"),
        (
            ["--engine", "vllm", "--engine-url", "http://h:1", "--tokenizer", ".", "--codec", "renderers"],
            "--codec renderers: expected --family NAME, one of deepseek_r1",
        ),
        (
            [
                *("--engine", "vllm", "--engine-url", "http://h:1", "--tokenizer", "."),
                *("--codec", "renderers", "--family", "qwen3", "--stop-id", "7"),
            ],
            "--stop-id, --no-stop-id: got ['7'], expected none with --codec renderers",
        ),
        (
            ["--engine", "vllm", "--engine-url", "http://h:1", "--tokenizer", ".", "--family", "qwen3"],
            "--family: got 'qwen3', expected it with --codec renderers only",
        ),
        (["--engine", "scripted", "--rule", "haiku"], "expected model="),
        (["--engine", "scripted", "--rule", "engine=big"], "expected one of the named ones: none"),
        (["--engine", "scripted", "--upstream", "big"], "expected NAME=URL"),
        (["--engine", "scripted", "--no-auth", "--host", "0.0.0.0"], "expected loopback"),
        (["--engine", "scripted", "--default-max-tokens", "0"], "--default-max-tokens: got 0, expected 1"),
    ],
)
def test_missing_and_malformed_options_are_errors(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert not printed.out


def test_stop_ids_are_set_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save_harmony(tmp_path))
    arguments = ["serve", "--engine", "vllm", "--engine-url", "http://h:1", "--tokenizer", path]
    changes = ["--stop-id", "<|end|>", "--stop-id", "7", "--no-stop-id", "<|call|>"]
    options = parse_options(*arguments, *changes)
    codec, _ = build_router(options.engines)
    names = {codec.token_bytes(token).decode() for token in codec.stop_ids - {7}}
    assert 7 in codec.stop_ids
    assert names == {"<|return|>", "<|endoftext|>", "<|end|>"}
    assert main([*arguments, "--stop-id", "<|eot|>"]) == 2
    assert "stop_ids: got '<|eot|>', expected an id from 0 to " in capsys.readouterr().err


def test_default_template_arguments_are_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--default-chat-template-kwargs"
    arguments = ["serve", "--engine", "vllm", "--engine-url", "http://h:1", "--tokenizer"]
    arguments.append(str(save_harmony(tmp_path)))
    options = parse_options(*arguments, option, '{"reasoning_effort": "high"}')
    codec, _ = build_router(options.engines)
    assert isinstance(codec, GenericCodec)
    assert codec.default_chat_template_kwargs == {"reasoning_effort": "high"}
    assert main([*arguments, "--codec", "renderers", "--family", "qwen3", option, '{"a": 1}']) == 2
    assert f"{option}: got {{'a': 1}}, expected none with --codec renderers" in capsys.readouterr().err
    for text in ("{", "[1]", "high"):
        assert main([*arguments, option, text]) == 2
        assert f"{option}: got {text!r}, expected a JSON object" in capsys.readouterr().err


def test_help_shows_examples_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "--engine vllm --engine-url" in text
    assert "OPENAI_BASE_URL" in text
    fallback = f"It is {FALLBACK_MAX_TOKENS} if the engine does not report its context length, and 512"
    assert fallback in " ".join(text.split())


# -- keys --------------------------------------------------------------------------------------------

KEYS = {
    "OPENAI_API_KEY": "sk-openai",
    "BRANCHLINE_ENGINE_KEY": "ek",
    "BRANCHLINE_UPSTREAM_KEY_BIG_ONE": "uk-big",
    "BRANCHLINE_UPSTREAM_KEY_OURS": "",
}


def _sent_keys(monkeypatch: pytest.MonkeyPatch, variables: tuple[str, ...], **options: Any) -> dict[str, str]:
    """The key that each server would receive if only these variables were set."""
    for name, value in KEYS.items():
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, value)
    _, router = build_router(EngineOptions(**options))
    engine = router.default_engine
    clients = {"main": getattr(engine.engines[0] if isinstance(engine, Replicas) else engine, "client", None)}
    for name in router.engine_names[1:]:
        upstream = router._named_engines[name]
        assert isinstance(upstream, UpstreamChat)
        clients[name] = upstream.client
    return {
        name: ((re.search(r"(?i)authorization: Bearer (\S+)", client._headers) or ["", ""])[1])
        for name, client in clients.items()
        if client is not None
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_openai_key_is_not_sent_to_engine_servers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchline.cli.engines._load_codec", lambda options, tokenizer: None)
    server = {"engine": engine, "engine_url": ["http://h:1"], "tokenizer": Path()}
    assert _sent_keys(monkeypatch, ("OPENAI_API_KEY",), **server) == {"main": ""}
    assert _sent_keys(monkeypatch, ("OPENAI_API_KEY", "BRANCHLINE_ENGINE_KEY"), **server) == {"main": "ek"}


def test_each_upstream_gets_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    upstreams = ["big-one=https://a/v1", "ours=http://b/v1", "other=https://c/v1"]
    keys = _sent_keys(monkeypatch, tuple(KEYS), engine="scripted", upstream=upstreams)
    assert keys == {"big-one": "uk-big", "ours": "", "other": "sk-openai"}
    openai = {"engine": "openai", "engine_url": ["https://a/v1"]}
    assert _sent_keys(monkeypatch, ("OPENAI_API_KEY",), **openai) == {"main": "sk-openai"}
    assert _sent_keys(monkeypatch, tuple(KEYS), **openai) == {"main": "ek"}


# -- a served gateway --------------------------------------------------------------------------------


def test_the_admin_key_may_come_from_the_environment() -> None:
    with served_gateway(BRANCHLINE_ADMIN_KEY="ak-mine") as gateway:
        assert "admin key      as given" in gateway.banner
        assert "ak-mine" not in gateway.banner
        url = gateway.printed(r" on (http://\S+)")
        assert httpx.get(f"{url}/sessions", headers={"authorization": "Bearer ak-mine"}).status_code == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(HANG_S) == 0


def test_limits_are_options() -> None:
    options = ["--max-tools", "1", "--max-header-bytes", "300", "--header-timeout-s", "0.05"]
    with served_gateway(*options) as gateway:
        url, headers = gateway.printed(r"base_url +(\S+)"), {"x": "y" * 300}
        assert httpx.get(url, headers=headers).status_code == 431
        address = url.removeprefix("http://").partition("/")[0].split(":")
        with socket.create_connection((address[0], int(address[1])), 20) as silent:
            assert silent.recv(12) == b"HTTP/1.1 408"


def test_a_limit_that_cannot_be_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine", "scripted", "--max-tools", "0"]) == 2
    assert "--max-tools: got 0, expected more than 0" in capsys.readouterr().err


def test_default_max_tokens_limits_answers_without_a_limit() -> None:
    with served_gateway("--default-max-tokens", "3") as gateway:
        answer = gateway.chat("hello").json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


def test_unknown_fields_are_ignored_only_with_the_option() -> None:
    with served_gateway("--ignore-unknown-fields") as gateway:
        assert gateway.chat("hello", temprature=0.3).status_code == 200
    with served_gateway() as gateway:
        refused = gateway.chat("hello", temprature=0.3)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temprature")


def test_the_printed_base_url_is_the_public_one() -> None:
    with served_gateway("--public-url", "https://bl.example") as gateway:
        assert "base_url       https://bl.example/sessions/" in gateway.banner


@pytest.mark.parametrize(("drain_s", "signals"), [("1000", 2), ("0.1", 1)])
def test_an_unfinished_request_does_not_prevent_stopping(drain_s: str, signals: int) -> None:
    with served_gateway("--drain-s", drain_s, BRANCHLINE_ADMIN_KEY="ak") as gateway:
        server = gateway.process
        assert server.stderr is not None
        host, port = gateway.printed(r" on http://(\S+)").split(":")
        with socket.create_connection((host, int(port)), 20) as client:
            head = (
                "POST /sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ak\r\nexpect: 100-continue\r\n"
            )
            client.sendall(f"{head}content-length: 9\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(1000)  # now it waits for the body
            server.send_signal(signal.SIGTERM)
            while "waiting for running calls" not in server.stderr.readline():
                assert server.poll() is None
            if signals > 1:
                server.send_signal(signal.SIGTERM)
            assert b" 503 " in client.recv(1000)
        assert server.wait(HANG_S) == 0
        assert "Traceback" not in server.stderr.read()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 512), ({"default_max_tokens": 7}, 7), ({"model": "folder"}, None), ({"engine": "vllm"}, None)],
)
def test_only_the_built_in_model_has_a_default_limit(options: dict[str, Any], expected: int | None) -> None:
    config = GatewayConfig(default_max_tokens=options.pop("default_max_tokens", None))
    assert default_max_tokens(EngineOptions(**options), config) == expected


@pytest.mark.parametrize("flags", [[], ["--allow-special-tokens"]])
def test_text_becomes_a_control_token_only_on_request(tmp_path: Path, flags: list[str]) -> None:
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    save_byte_level(tmp_path, chat_template=template)
    arguments = ["serve", "--engine", "vllm", "--engine-url", "http://127.0.0.1:1"]
    options = parse_options(*arguments, "--tokenizer", str(tmp_path), *flags)
    codec, _ = build_router(options.engines)
    ids = codec.extend(
        (), [NewMessage(Message("user", "<|end|>"))], tools=(), chat_template_kwargs={}, history="template"
    ).ids.tolist()
    end = codec.encode("<|end|>").tolist()[0]
    assert ids.count(end) == (2 if flags else 1)


@pytest.mark.parametrize("given_key", ["", "ak-mine"])
def test_output_says_how_to_open_a_session_for_each_episode(given_key: str) -> None:
    environment = {"BRANCHLINE_ADMIN_KEY": given_key} if given_key else {}
    with served_gateway(**environment) as gateway:
        assert "a session is one episode: one task, one reward" in gateway.banner
        assert re.search(r"curl -X POST http://127.0.0.1:\d+/sessions -H", gateway.banner)
        assert ("$BRANCHLINE_ADMIN_KEY" in gateway.banner) == bool(given_key)
        assert "ak-mine" not in gateway.banner
