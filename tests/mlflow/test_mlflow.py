"""A session in a real mlflow server: sent over OTLP, read back with mlflow's own client."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from branchline.gateway.tracing import CAPTURE_CONTENT_VARIABLE, Tracing
from tests.gateway.harness import Agent, run
from tests.mlflow.server import MlflowServer, mlflow_server

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOK = Message("assistant", "", tool_calls=(ToolCall("look", '{"at": 1}'),))
TIMEOUT_S = 60.0
"""mlflow takes its time over the first spans it is sent."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


def _tracing(
    server: MlflowServer, experiment: str, monkeypatch: pytest.MonkeyPatch, contents: str
) -> Tracing:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", f"x-mlflow-experiment-id={experiment}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", str(int(TIMEOUT_S)))
    monkeypatch.setenv(CAPTURE_CONTENT_VARIABLE, contents)
    return Tracing.from_environment()


async def _episode(tracing: Tracing, session: str, journal: Path | None = None) -> list[tuple[int, int]]:
    """Runs a session with calls of all kinds; returns the usage that its clients received."""
    engine = ScriptedEngine(ToyCodec(), replies(LOOK, "a door", EngineError("the engine is down"), "bye"))
    usage: list[tuple[int, int]] = []

    def note(answer: Any) -> None:
        usage.append((answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]))

    async with (
        Gateway(
            engine=engine,
            codec=engine.codec,
            journal=journal,
            observers=[tracing.record_call],
            on_session_end=[tracing.record_session_end],
        ) as gateway,
        httpx.AsyncClient(timeout=20) as http,
    ):
        a = Agent(gateway, await gateway.session(id=session, agent="walker", group="g7"), http, engine)
        first = (await a.ask("what is there?", tools=TOOLS)).json()
        note(first)
        called = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "wood, a handle"}
        events = await a.stream(
            "what is there?", called, result, tools=TOOLS, stream_options={"include_usage": True}
        )
        note(events[-1])
        assert (await a.ask("and now?")).status_code == 502
        assert (await a.ask("and now?", temperature="hot")).status_code == 400
        note((await a.ask("and now?", max_tokens=2)).json())
        if journal is None:
            await a.session.reward(1.0)
            await a.session.finalize()
    return usage


def _summary(found: Any) -> None:
    sdk, exporter = version("opentelemetry-sdk"), version("opentelemetry-exporter-otlp-proto-http")
    print(f"\nmlflow {found['version']}, opentelemetry-sdk {sdk}, otlp-proto-http {exporter}")
    for trace in found["traces"]:
        print(f"{trace['id']} session={trace['session']} {trace['state']} usage={trace['usage']}")
        for span in trace["spans"]:
            used = span["attributes"].get("mlflow.chat.tokenUsage")
            print(f"  {span['type']:<10} {span['name']:<20} {span['status']:<5} {used or ''}")


def test_session_is_one_trace_with_its_tokens(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = server.make_experiment("whole")
    tracing = _tracing(server, experiment, monkeypatch, "false")
    usage: list[tuple[int, int]] = []

    async def test() -> None:
        usage.extend(await _episode(tracing, "episode-1"))

    run(test)
    assert tracing.close(TIMEOUT_S)
    found = server.traces(experiment, "episode-1")
    _summary(found)
    (trace,) = found["traces"]
    assert trace["state"] == "OK"
    prompt, sampled = (sum(counts) for counts in zip(*usage, strict=True))
    assert trace["usage"] == {
        "input_tokens": prompt,
        "output_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
    root, *calls = sorted(trace["spans"], key=lambda span: span["start"])
    assert (root["parent"], root["name"], root["type"]) == (None, "invoke_agent walker", "AGENT")
    assert root["attributes"]["branchline.session.reward"] == 1.0
    assert {span["parent"] for span in calls} == {root["id"]}
    assert [(span["name"], span["type"], span["status"]) for span in calls] == [
        ("chat toy", "CHAT_MODEL", "UNSET"),
        ("chat toy", "CHAT_MODEL", "UNSET"),
        ("chat toy", "CHAT_MODEL", "ERROR"),
        ("chat", "CHAT_MODEL", "ERROR"),
        ("chat toy", "CHAT_MODEL", "UNSET"),
    ]
    tool, streamed, failed, refused, last = (span["attributes"] for span in calls)
    usage = [
        (one["gen_ai.usage.input_tokens"], one["gen_ai.usage.output_tokens"])
        for one in (tool, streamed, last)
    ]
    assert usage == usage
    assert tool["mlflow.chat.tokenUsage"] == dict(
        zip(("input_tokens", "output_tokens", "total_tokens"), (*usage[0], sum(usage[0])), strict=True)
    )
    assert tool["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert streamed["gen_ai.request.stream"] is True
    assert streamed["branchline.reused_tokens"] > 0
    assert last["gen_ai.response.finish_reasons"] == ["length"]
    assert (failed["error.type"], refused["error.type"]) == ("EngineError", "MessageError")
    assert calls[0]["events"] == [f"branchline.{name}" for name in ("prepare", "queue", "generate", "commit")]
    assert all(span["inputs"] is None and span["outputs"] is None for span in calls)
    assert "handle" not in str(found)


def test_messages_are_shown_with_contents(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = server.make_experiment("contents")
    tracing = _tracing(server, experiment, monkeypatch, "true")

    async def test() -> None:
        await _episode(tracing, "episode-2")

    run(test)
    assert tracing.close(TIMEOUT_S)
    (trace,) = server.traces(experiment, "episode-2")["traces"]
    _, first, second, *_ = sorted(trace["spans"], key=lambda span: span["start"])
    assert first["inputs"] == [{"role": "user", "parts": [{"type": "text", "content": "what is there?"}]}]
    (called,) = first["outputs"][0]["parts"]
    assert (called["name"], called["arguments"]) == ("look", {"at": 1})
    assert second["inputs"][2]["parts"][0]["response"] == "wood, a handle"
    assert second["outputs"][0]["parts"] == [{"type": "text", "content": "a door"}]


def test_open_session_is_a_trace_in_progress(
    server: MlflowServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = server.make_experiment("in progress")
    tracing = _tracing(server, experiment, monkeypatch, "false")
    usage: list[tuple[int, int]] = []

    async def test() -> None:
        usage.extend(await _episode(tracing, "episode-3", tmp_path / "run.journal"))

    run(test)
    assert tracing.close(TIMEOUT_S)
    (trace,) = server.traces(experiment, "episode-3")["traces"]
    assert (trace["state"], len(trace["spans"])) == ("IN_PROGRESS", 5)
    assert trace["usage"]["total_tokens"] == sum(map(sum, usage))
