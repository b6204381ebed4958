"""The guide on the client runs: its programs, one after the other, against a gateway in another thread."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from branchline import AsyncClient, Client
from branchline.client.async_client import AsyncClientSession
from branchline.client.client import ClientSession
from branchline.gateway.config import GatewayConfig
from branchline.runtime.managed_session import SessionOptions
from tests.gateway.harness import agent
from tests.hang import HANG_S

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "client.md").read_text()
KEY = "ak-" + "k" * 30


def test_the_programs_of_the_guide_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready, stop, urls = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with agent("left", "right", config=GatewayConfig(admin_key=KEY)) as a:
            urls.append(a.gateway.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        monkeypatch.setenv("BRANCHLINE_ADMIN_KEY", KEY)
        program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
        assert program.count("http://127.0.0.1:8100") == 3
        exec(compile(program.replace("http://127.0.0.1:8100", urls[0]), "client.md", "exec"), {})
    finally:
        stop.set()
        thread.join()
    printed = capsys.readouterr().out
    assert printed.count(" 1 True\n") == 2
    assert "[0.5, 0.5]" in printed
    assert "PolicyView(paused=False, version=4)" in printed
    assert printed.endswith("ok\naborted\n")


def test_the_guide_names_only_methods_and_options_that_exist() -> None:
    for owner, kinds in (("client", (Client, AsyncClient)), ("session", (ClientSession, AsyncClientSession))):
        for name in set(re.findall(rf"`{owner}\.(\w+)", TEXT)):
            assert all(hasattr(kind, name) for kind in kinds), name
    (options,) = re.findall(r"`POST /sessions`: (.*?), …", TEXT)
    assert set(re.findall(r"`(\w+)`", options)) <= set(SessionOptions.__struct_fields__)


def test_both_clients_have_the_same_methods() -> None:
    for one, other in ((Client, AsyncClient), (ClientSession, AsyncClientSession)):
        assert public_names(one) == public_names(other)


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
