"""Logs of `branchline serve` follow its options, traces follow OpenTelemetry's variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from branchline.cli.observability import is_exporter_configured
from branchline.core.extras import install_line
from tests.cli.harness import served_gateway
from tests.gateway.otel import OtlpReceiver
from tests.hang import HANG_S


def _serve_one_call(*options: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Serves one call, then interrupts the gateway; returns its log records and all that it printed."""
    with served_gateway("--log-format", "json", *options, **environment) as gateway:
        assert gateway.chat("marzipan").status_code == 200
        gateway.process.send_signal(signal.SIGINT)
        _, log = gateway.process.communicate(timeout=HANG_S)
        assert gateway.process.returncode == 0, log
    return [json.loads(line) for line in log.splitlines()], gateway.banner + log


def test_every_call_is_logged_and_message_texts_only_on_request() -> None:
    records, output = _serve_one_call()
    assert [record["message"] for record in records] == [
        "session opened",
        "call",
        "waiting for running calls",
    ]
    assert "marzipan" not in output
    (record, *_), output = _serve_one_call("--log-level", "info", "--log-contents")
    assert record["session"] in output
    assert "You said: marzipan" in output


def test_level_warning_leaves_out_successful_calls() -> None:
    assert _serve_one_call("--log-level", "warning")[0] == []


def test_spans_are_sent_before_the_gateway_stops() -> None:
    with OtlpReceiver() as receiver:
        records, _ = _serve_one_call(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        session = records[0]["session"]
        assert sorted(span.name for span in receiver.spans) == ["chat toy", "invoke_agent"]
        assert session in str(receiver.spans)
        assert "marzipan" not in str(receiver.spans)


def test_an_unreachable_collector_is_logged_and_stops_nothing() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    records, _ = _serve_one_call(**environment)
    assert any(record["logger"].startswith("opentelemetry.") for record in records)


@pytest.mark.parametrize(
    ("environ", "configured"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_traces_are_made_if_an_exporter_is_configured(environ: dict[str, str], configured: bool) -> None:
    assert is_exporter_configured(environ) == configured


CONFIGURE_CODE = """
import sys
if {hidden}:
    sys.modules["opentelemetry.sdk"] = None
from branchline.cli.main import parse_options
from branchline.cli.observability import configure_observability
import branchline.gateway.server
observability = configure_observability(parse_options("serve").logs)
print(observability.tracing is not None, "opentelemetry" in sys.modules)
observability.close()
"""


@pytest.mark.parametrize(
    ("endpoint", "hidden", "printed"),
    [
        ("", False, "False False"),
        ("http://127.0.0.1:9", False, "True True"),
        ("http://h", True, "False True"),
    ],
)
def test_opentelemetry_is_imported_only_if_needed(endpoint: str, hidden: bool, printed: str) -> None:
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    code = CONFIGURE_CODE.format(hidden=hidden)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == printed, done.stderr
    assert (install_line("otel") in done.stderr) == hidden
