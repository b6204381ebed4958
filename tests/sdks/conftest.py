"""SDKs may connect only to the gateway: their telemetry is switched off, other connections fail the test."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

# Assertions of the harness are explained like those of tests.
pytest.register_assert_rewrite("tests.sdks.harness")

# Read when the SDKs are imported, which is after this file.
os.environ |= {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    # A list of prices is fetched at import unless this is set.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


@pytest.fixture(scope="package", autouse=True)
def close_gateways() -> Iterator[None]:
    yield
    # Imported here, because it must find the settings above.
    from tests.sdks.harness import GATEWAYS

    while GATEWAYS:
        GATEWAYS.popitem()[1].close()


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuses connections and look-ups of other machines, and fails the test afterwards."""
    refused: list[Any] = []

    def guarded(function: Any) -> Any:
        def checked(*args: Any, **options: Any) -> Any:
            # `connect` has the socket first, `getaddrinfo` the host.
            where = args[1] if isinstance(args[0], socket.socket) else args[0]
            host = where[0] if isinstance(where, tuple) else where
            if not _is_local(host):
                refused.append(where)
                raise OSError(f"{where}: outside this machine")
            return function(*args, **options)

        return checked

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded(socket.getaddrinfo))
    yield
    assert not refused


def _is_local(host: object) -> bool:
    # A path is a Unix socket; an empty host is this machine.
    if host in (None, "", "localhost") or str(host).startswith("/"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False
