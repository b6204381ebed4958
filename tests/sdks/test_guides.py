"""The SDK guides can be pasted: their commands exist, and their Python code runs the scenario."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from branchline.cli.main import parse_options
from tests.sdks.harness import REPLIES, ThreadedGateway

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
NAMES = ["langgraph", "openai-agents"]
ADDRESS = "http://127.0.0.1:8100"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GUIDES / f"{name}.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def gateway() -> Iterator[ThreadedGateway]:
    gateway = ThreadedGateway("toy", auth=False)
    yield gateway
    gateway.close()


@pytest.mark.parametrize("name", NAMES)
def test_code_of_the_guide_runs_and_is_one_timeline(
    name: str, gateway: ThreadedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(name, "python")
    assert code.count(ADDRESS) == 1
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code.replace(ADDRESS, gateway.gateway.url), f"{name}.md", "exec"), scope)
    assert capsys.readouterr().out.startswith("1 sample: {")
    url = f"{gateway.gateway.url}/sessions/{scope['session']['id']}"
    assert httpx.get(f"{url}/samples").json()["samples"][0]["reward"] == 1.0
    (line,) = httpx.get(f"{url}/timelines").json()["timelines"]
    assert len(line["calls"]) == len(REPLIES)


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_the_guide_exist_and_use_the_port_of_the_code(name: str) -> None:
    (commands,) = blocks(name, "sh")
    serve = [line for line in commands.splitlines() if line.startswith("branchline ")]
    assert len(serve) == 1
    options = parse_options(*shlex.split(serve[0].rstrip("& "))[1:])
    assert f"http://{options.host}:{options.port}" == ADDRESS
