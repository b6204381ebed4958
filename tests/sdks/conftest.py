"""SDKs call nobody but the gateway: what they tell their makers is switched off, and what tries is caught."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

# Its checks are told as those of tests are.
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
    # Only here: what it imports must find the settings above.
    from tests.sdks.harness import GATEWAYS

    while GATEWAYS:
        GATEWAYS.popitem()[1].close()


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A connection or a look-up that leaves this machine is refused, and fails the test if nobody minds."""
    left: list[Any] = []

    def guarded(reach: Any) -> Any:
        def reach_loopback(*args: Any, **more: Any) -> Any:
            # An address stands behind the socket; a host to look up stands alone.
            where = args[1] if isinstance(args[0], socket.socket) else args[0]
            host = where[0] if isinstance(where, tuple) else where
            if not _is_here(host):
                left.append(where)
                raise OSError(f"{where}: outside this machine")
            return reach(*args, **more)

        return reach_loopback

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded(socket.getaddrinfo))
    yield
    assert not left


def _is_here(host: object) -> bool:
    # A path is a Unix socket; no host at all is this one.
    if host in (None, "", "localhost") or str(host).startswith("/"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False
