"""The guide to the loop can be pasted: its Python is one program, which runs as it says."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from branchline import LoopLimits, LoopOutput
from branchline.cli.engines import build
from branchline.cli.main import _parser
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.loop import agents
from tests.loop.tools import server

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "loop.md"
TEXT = GUIDE.read_text()
CLOCK = '"uvx", "mcp-server-time"'
ADDRESS = "http://127.0.0.1:8100"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def rows(heading: str) -> set[str]:
    """What the first column of a section's table names."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {
        name
        for line in section.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1:2][0] if line.startswith("|") else "")
    }


@pytest.fixture
def gateway() -> Iterator[str]:
    """What the guide's own command starts, in a thread: the guide has an event loop to itself."""
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if "branchline serve" in line]
    options = _parser().parse_args(shlex.split(command)[1:])
    assert f"http://{options.host}:{options.port}" == ADDRESS
    codec, fleet = build(options)
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    serving = Gateway(engine=fleet, codec=codec, config=GatewayConfig(auth=not options.no_auth))
    asyncio.run_coroutine_threadsafe(serving.start(), loop).result()
    yield serving.url
    asyncio.run_coroutine_threadsafe(serving.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_python_of_the_guide_is_one_program_that_runs(
    gateway: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.find_agent("")
    monkeypatch.setattr(agents, "_agents", dict(agents._agents))
    code = "\n".join(blocks("python"))
    assert code.count(ADDRESS) == code.count(CLOCK) == 1
    code = code.replace(ADDRESS, gateway).replace(CLOCK, f"{sys.executable!r}, {server.__file__!r}")
    scope: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, GUIDE.name, "exec"), scope)
    names, apples, pears, tomato, far, resumed = capsys.readouterr().out.splitlines()
    assert names.startswith("('price', 'sell', 'add', ")
    assert re.fullmatch(r"apples-\w+ interaction 6 1.0 \d+", apples)
    assert re.fullmatch(r"pears-\w+ stop 4 None \d+", pears)
    assert re.fullmatch(r"tomato-\w+ stop 3 1.0 \d+", tomato)
    assert far == "['Well?', 'You said: What do 3 pears cost?', 'You said: Are you sure?']"
    assert resumed == (
        "[(True, <Ending.INTERACTION: 'interaction'>, 1.0), (True, <Ending.STOP: 'stop'>, None), "
        "(True, <Ending.STOP: 'stop'>, 1.0)]"
    )


def test_the_guide_names_every_limit_and_everything_that_comes_out() -> None:
    assert rows("Limits") == set(LoopLimits.__struct_fields__)
    assert rows("What comes out") == {field.name for field in fields(LoopOutput)}
