"""What clients are told: without the right key nothing, and no agent where engines and files are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from branchline import ToyCodec
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineInputError,
    JournalError,
)
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.asgi import to_agent_error_info, to_error_info
from tests.gateway.harness import agent, run


@pytest.mark.parametrize("path", ["", "/tree", "/v1/models", "/v1/session"])
@pytest.mark.parametrize("key", ["", "sk-bl-wrong"])
def test_unknown_and_forbidden_sessions_are_answered_alike(path: str, key: str) -> None:
    async def test() -> None:
        async with agent("x", id="mine") as a:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answers = [
                await a.http.get(f"{a.gateway.url}/sessions/{name}{path}", headers=headers)
                for name in ("mine", "none")
            ]
            assert [answer.status_code for answer in answers] == [403 if key else 401] * 2
            assert answers[0].text.replace("mine", "none") == answers[1].text
            unknown = await a.http.get(f"{a.gateway.url}/sessions/none{path}", headers=a.admin_headers)
            assert unknown.status_code == 404

    run(test)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (EngineError("10.0.0.7:8000: cannot connect: refused"), "the engine: cannot connect: refused"),
        (EngineError("http://gpu-7:8000/v1: not JSON: b'x'"), "the engine: not JSON: b'x'"),
        (EngineError("vllm@gpu-7.lan:8000: closed"), "the engine: closed"),
        (EngineError("vllm@[fd00::7]:8000: closed"), "the engine: closed"),
        (
            EngineError("gpu-7:8000/v1/completions: no response within 5 s"),
            "the engine: no response within 5 s",
        ),
        (EngineError("replicas: no usable replica: vllm@gpu-7:80: closed"), "the engine: closed"),
        (EngineError("vllm@gpu-7:8000: status 500: see /var/log/x.log"), "status 500: see (path)"),
        (EngineError("model '/data/models/q': bad file"), "model '(path)': bad file"),
        (EngineBusyError("vllm@gpu-7:8000: status 429: queue is full"), "status 429: queue is full"),
        (EngineInputError("vllm@gpu-7:8000: status 400: top_k: see https://d.io/x"), "see https://d.io/x"),
        (EngineInputError("images: got 1: vllm@gpu-7:8000 takes no images"), "the engine takes no images"),
        (ContextLengthError.for_prompt(17, 10), "prompt is too long: 17 tokens > 10 maximum."),
        (
            JournalError("/data/run.journal: the journal could not be written: disk I/O"),
            "could not be written",
        ),
    ],
)
def test_errors_for_agents_have_the_reason_and_no_addresses(error: BranchlineError, shown: str) -> None:
    info = to_agent_error_info(error)
    assert shown in info.message
    for secret in ("10.0.0.7", "gpu-7", "fd00", "/var", "/data"):
        assert secret not in info.message
    full = to_error_info(error)
    assert (info.status, info.code, info.headers) == (full.status, full.code, full.headers)
    assert full.message == str(error)


class FailingEngine(ScriptedEngine):
    """Fails as a server does that cannot be reached; `after` the first chunk or before it."""

    after = False

    async def generate(self, *args: object, **options: object) -> object:  # type: ignore[override]
        async for chunk in super().generate(*args, **options):  # type: ignore[arg-type]
            if self.after:
                yield chunk
            raise EngineError("vllm@gpu-7.lan:8000: connection lost")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_does_not_learn_the_address_of_a_failing_engine_but_the_log_has_it(
    after: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = FailingEngine(ToyCodec(), chunk_size=1)
        engine.after = after
        async with agent(engine=engine) as a:
            response = await a.ask("p", stream=stream)
            assert "connection lost" in response.text
            assert "gpu-7" not in response.text
            request_id = response.headers["x-request-id"]
        (record,) = [one for one in caplog.records if "gpu-7.lan:8000" in one.getMessage()]
        assert request_id in record.getMessage()

    with caplog.at_level(logging.WARNING):
        run(test)


def test_the_list_of_models_has_no_addresses() -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec())
        engine.name = "vllm@gpu-7.lan:8000"
        async with agent(engine=engine) as a:
            models = await a.http.get(f"{a.session.base_url}/models", headers=a.api_headers)
            assert [model["id"] for model in models.json()["data"]] == ["vllm", "branchline"]

    run(test)


def test_a_file_path_in_the_error_of_a_failed_journal_is_not_shown(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j") as a:
            journal = a.session.managed.journal
            assert journal is not None
            journal.failure = JournalError(f"{tmp_path}/j: the journal could not be written: disk full")
            response = await a.ask("p")
            assert response.status_code == 503
            assert "can only be read" in response.text
            assert str(tmp_path) not in response.text
            journal.failure = None

    run(test)
