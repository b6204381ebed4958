"""What `branchline serve` tells of itself: logs by its options, traces by OpenTelemetry's variables."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from branchline.cli.observability import is_exporter_configured
from tests.gateway.otel import OtlpReceiver


def _serve(*options: str, **environ: str) -> tuple[list[dict[str, Any]], str]:
    """One call to a served gateway, which is then interrupted; its log lines, and what it printed."""
    command = [sys.executable, "-m", "branchline.cli", "serve", "--engine", "scripted", "--port", "0"]
    with subprocess.Popen(
        [*command, "--log-format", "json", *options],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        told = "".join(server.stdout.readline() for _ in range(6))
        url, key = (re.search(pattern, told) for pattern in (r"a session +(\S+)", r"its api key +(\S+)"))
        assert url is not None, told
        assert key is not None, told
        body = {"model": "toy", "messages": [{"role": "user", "content": "marzipan"}]}
        headers = {"authorization": f"Bearer {key[1]}"}
        assert httpx.post(f"{url[1]}/chat/completions", json=body, headers=headers).status_code == 200
        server.send_signal(signal.SIGINT)
        _, logged = server.communicate(timeout=30)
        assert server.returncode == 0, logged
    return [json.loads(line) for line in logged.splitlines()], told + logged


def test_a_served_gateway_logs_each_call_and_says_what_was_said_only_when_asked() -> None:
    lines, told = _serve()
    assert [line["message"] for line in lines] == ["session opened", "call", "letting running calls end"]
    assert "marzipan" not in told
    (line, *_), told = _serve("--log-level", "info", "--log-contents")
    assert line["session"] in told
    assert "You said: marzipan" in told


def test_a_level_above_leaves_out_calls_that_went_well() -> None:
    assert _serve("--log-level", "warning")[0] == []


def test_spans_arrive_before_a_served_gateway_has_stopped() -> None:
    with OtlpReceiver() as receiver:
        lines, _ = _serve(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        session = lines[0]["session"]
        assert sorted(span.name for span in receiver.spans) == ["chat toy", "invoke_agent"]
        assert session in str(receiver.spans)
        assert "marzipan" not in str(receiver.spans)


def test_a_collector_that_is_gone_is_said_and_stops_nothing() -> None:
    lines, _ = _serve(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert any(line["logger"].startswith("opentelemetry.") for line in lines)


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
def test_traces_are_made_where_an_exporter_is_configured(environ: dict[str, str], configured: bool) -> None:
    assert is_exporter_configured(environ) == configured


CONFIGURE_CODE = """
import sys
if {hidden}:
    sys.modules["opentelemetry.sdk"] = None
from branchline.cli.main import _parser
from branchline.cli.observability import watch
import branchline.gateway.server
watching = watch(_parser().parse_args(["serve"]))
print(watching.tracing is not None, "opentelemetry" in sys.modules)
watching.close()
"""


@pytest.mark.parametrize(
    ("endpoint", "hidden", "found"),
    [
        ("", False, "False False"),
        ("http://127.0.0.1:9", False, "True True"),
        ("http://h", True, "False True"),
    ],
)
def test_opentelemetry_is_loaded_only_where_it_is_needed(endpoint: str, hidden: bool, found: str) -> None:
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    code = CONFIGURE_CODE.format(hidden=hidden)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == found, done.stderr
    assert ("pip install 'branchline[otel]'" in done.stderr) == hidden
