"""The codec and the engines that `branchline serve` builds: models by folder, by name, or from the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.cli.engine_options import EngineName, EngineOptions
from branchline.cli.engines import build_router
from branchline.cli.main import main, parse_options
from branchline.core.errors import EngineError, InputError
from branchline.engines.client import ServerConfig
from branchline.engines.http import HttpEngine
from branchline.engines.replicas import Replicas
from tests.chat.harness import save_byte_level
from tests.core.fake_hub import fake_hub, use_cache
from tests.engines.fake_servers import FakeServer, FakeSglang, FakeVllm
from tests.hang import HANG_S

NAME = "acme/tiny-chat"
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}<|start|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_byte_level(tmp_path / "tiny-chat", chat_template=TEMPLATE, eos_token="<|end|>")


@contextmanager
def model_server(engine: str, name: str | None) -> Iterator[str]:
    """The address of a server, in a thread of its own, that reports this model."""
    server: FakeServer = FakeVllm() if engine == "vllm" else FakeSglang()
    server.json_by_path = {
        "/v1/models": {"data": [{"id": "policy", "root": name, "max_model_len": 64}]},
        "/get_model_info": {"model_path": "/weights", "tokenizer_path": name},
    }
    started, urls = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server:
            urls.append(server.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(HANG_S)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def build_codec(engine: EngineName, *urls: str, **options: Any) -> GenericCodec:
    codec, router = build_router(EngineOptions(engine=engine, engine_url=urls, **options))
    asyncio.run(router.close())
    assert isinstance(codec, GenericCodec)
    return codec


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_a_tokenizer_the_one_that_the_server_reports_is_used(
    engine: EngineName,
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with model_server(engine, str(tokenizer)) as url:
        assert build_codec(engine, url).tokenizer.path == tokenizer
    assert f"using the tokenizer of {tokenizer}" in capsys.readouterr().err
    with (
        model_server(engine, NAME) as url,
        model_server(engine, NAME) as replica,
        fake_hub(monkeypatch, tmp_path / "cache", {NAME: tokenizer}) as hub,
    ):
        codec = build_codec(engine, url, replica)
        assert (codec.name, codec.tokenizer.path) == ("generic:tiny-chat", hub.snapshot(NAME))


def test_a_given_tokenizer_is_used_without_a_question_to_the_server(tokenizer: Path) -> None:
    for options in ({"tokenizer": str(tokenizer)}, {"model": str(tokenizer)}):
        assert build_codec("vllm", "http://127.0.0.1:9", **options).tokenizer.path == tokenizer


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["/models/elsewhere", NAME, f"{NAME}:Q4_K_M"])
def test_a_reported_model_that_is_not_here_is_an_error_that_names_the_option(
    engine: EngineName, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    expected = f"--engine {engine}: expected --tokenizer DIR or NAME; the model .* is not here: {name}: not a"
    with model_server(engine, name) as url, pytest.raises(InputError, match=expected):
        build_codec(engine, url)


def test_servers_that_report_different_models_are_an_error(tokenizer: Path) -> None:
    with (
        model_server("vllm", str(tokenizer)) as one,
        model_server("vllm", "acme/other") as other,
        pytest.raises(InputError, match=r"expected --tokenizer DIR or NAME; its servers report several"),
    ):
        build_codec("vllm", one, other)


def test_a_server_that_reports_no_model_or_does_not_answer_is_an_error() -> None:
    with model_server("vllm", None) as url, pytest.raises(EngineError, match="expected the root of a model"):
        build_codec("vllm", url)
    with pytest.raises(EngineError):
        build_codec("vllm", url)


def test_every_command_takes_a_name(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path(__file__).parent.parent.parent / "examples" / "three_words.jsonl"
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: tokenizer}):
        printed = {}
        for model in (str(tokenizer), NAME):
            codes = [
                main([command, "--tokenizer", model, *arguments])
                for command, arguments in {
                    "doctor": ["--json"],
                    "merge": [str(log), "--skip-bad"],
                    "tree": [str(log), "--skip-bad"],
                }.items()
            ]
            printed[model] = (codes, capsys.readouterr().out)
    assert printed[NAME] == printed[str(tokenizer)]
    assert main(["doctor", "--tokenizer", "acme/unknown"]) == 2
    error = capsys.readouterr().err
    assert "acme/unknown: not a directory" in error
    assert "hf download acme/unknown" in error


def test_limits_of_the_embedded_engine_are_options(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-hf")
    from tests.engines.tiny_model import tiny_model

    save_byte_level(tmp_path, chat_template="{{ messages }}")
    tiny_model().save_pretrained(tmp_path)
    arguments = ["serve", "--engine", "hf", "--model", str(tmp_path), "--device", "cpu"]
    limits = ["--max-batch", "3", "--batch-gib", "0.5", "--cache-gib", "0.25", "--prefill-tokens", "64"]
    options = parse_options(*arguments, *limits, "--threads", "2", "--dtype", "bfloat16")
    _, router = build_router(options.engines)
    engine: Any = router.default_engine
    found = engine._scheduler.limits
    assert (found.max_batch, found.batch_bytes, found.cache_bytes) == (3, 2**29, 2**28)
    assert (found.prefill_tokens, found.threads) == (64, 2)
    assert str(engine._model.dtype) == "torch.bfloat16"
    asyncio.run(engine.close())


def test_timeouts_of_engines_are_options(tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def timeouts(*arguments: str) -> set[tuple[float, float]]:
        url = ("--engine-url", "http://127.0.0.1:2", "--tokenizer", str(tokenizer))
        _, router = build_router(parse_options("serve", "--engine", "vllm", *url, *arguments).engines)
        assert isinstance(router.default_engine, Replicas)
        assert router._create_replica is not None
        engines = [*router.default_engine.engines, router._create_replica("http://127.0.0.1:3")]
        configs = [engine.client.config for engine in engines if isinstance(engine, HttpEngine)]
        assert len(configs) == 2
        return {(config.first_token_timeout_s, config.token_timeout_s) for config in configs}

    assert timeouts() == {(600, 60)}
    assert timeouts("--first-token-timeout-s", "30", "--token-timeout-s", "1.5") == {(30, 1.5)}
    with pytest.raises(InputError, match=r"^token_timeout_s: got 0\.0, expected seconds, more than 0"):
        timeouts("--token-timeout-s", "0")
    assert main(["serve", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("first_token_timeout_s", "token_timeout_s"):
        _, _, description = shown.partition(f"--{name.replace('_', '-')} S ")
        assert f"(default: {getattr(ServerConfig, name):g})" in description.partition(" --")[0]
