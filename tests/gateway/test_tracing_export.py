"""Spans are sent to the collector of the environment; no call waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from branchline import ToyCodec
from branchline.core.errors import InputError
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.server import Gateway
from branchline.gateway.tracing import CAPTURE_CONTENT_VARIABLE, Tracing
from tests.gateway.harness import run
from tests.gateway.otel import OtlpReceiver, SpanCollector
from tests.hang import HANG_S

SECRET = "marzipan"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


async def _run_calls(tracing: Tracing) -> float:
    """Runs ten calls of one session; returns the duration of the slowest."""
    engine = ScriptedEngine(ToyCodec(), replies("A1"))
    slowest = 0.0
    async with Gateway(
        engine=engine,
        codec=engine.codec,
        observers=[tracing.record_call],
        on_session_end=[tracing.record_session_end],
    ) as gateway:
        s = await gateway.session()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {s.api_key}"}) as http:
            for _ in range(10):
                began = time.perf_counter()
                body = {"messages": [{"role": "user", "content": SECRET}]}
                answer = await http.post(f"{s.base_url}/chat/completions", json=body)
                assert answer.status_code == 200
                slowest = max(slowest, time.perf_counter() - began)
        await s.finalize()
    return slowest


@pytest.mark.parametrize("contents", ["", "false", "true", "SPAN_ONLY"])
def test_spans_are_sent_to_the_collector_of_the_environment(
    contents: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv(CAPTURE_CONTENT_VARIABLE, contents)
    tracing = Tracing.from_environment()

    async def test() -> None:
        await _run_calls(tracing)

    run(test)
    assert tracing.close()
    assert receiver.paths == {"/v1/traces"}
    assert receiver.teams == {"blue"}
    assert sorted(span.name for span in receiver.spans) == ["chat branchline"] * 10 + ["invoke_agent"]
    assert len({span.trace_id for span in receiver.spans}) == 1
    names = {pair.key: pair.value.string_value for pair in receiver.resources[0].attributes}
    assert names["service.name"] == "branchline"
    assert (SECRET in str(receiver.spans)) == (contents in ("true", "SPAN_ONLY"))


def test_service_name_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rollouts")
    tracing = Tracing.from_environment()
    assert tracing._provider.resource.attributes["service.name"] == "rollouts"
    assert tracing.close()


def test_collector_that_never_answers_delays_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = OtlpReceiver()  # it listens but does not answer
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{silent.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(HANG_S))
    # Spans are sent in pairs, while calls are running.
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    tracing = Tracing.from_environment()

    async def test() -> None:
        assert await _run_calls(tracing) < HANG_S / 2

    run(test)
    began = time.perf_counter()
    assert not tracing.close(timeout_s=0.2)
    assert time.perf_counter() - began < HANG_S / 2
    assert not silent.spans
    with silent:  # now it answers, so that no retrying thread outlives this test
        for thread in threading.enumerate():
            if thread.name == "branchline-last-spans":
                thread.join()
    assert len(silent.spans) == 11


def test_foreign_provider_is_flushed_and_not_shut_down() -> None:
    collector = SpanCollector()
    assert collector.tracing.close()

    async def test() -> None:
        await _run_calls(collector.tracing)

    run(test)
    assert len(collector.spans) == 11


def test_span_that_fails_does_not_fail_its_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = SpanCollector()

    def fail(*_: object) -> None:
        raise RuntimeError("no more spans")

    monkeypatch.setattr("branchline.gateway.tracing.call_attributes", fail)
    monkeypatch.setattr("branchline.gateway.tracing.session_attributes", fail)

    async def test() -> None:
        await _run_calls(collector.tracing)

    run(test)
    assert caplog.text.count("a span could not be made") == 11
    assert not collector.spans


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_unsupported_otlp_protocol_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "grpc")
    with pytest.raises(InputError, match="got 'grpc', expected http/protobuf"):
        Tracing.from_environment()


def test_provider_without_sdk_spans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(InputError, match="expected the SDK's, enabled"):
        Tracing(TracerProvider(shutdown_on_exit=False))
