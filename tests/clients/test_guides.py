"""The commands of the guides are run, against a gateway that they start."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scripts.check_docs import run_page
from scripts.docs_pages import Page
from scripts.install_clients import PACKAGES

from branchline.cli.main import parse_options
from tests.cli.harness import served_gateway
from tests.clients.table import GUIDE

GUIDES = GUIDE.parent
PASTED = ("claude-code", "codex", "clients")
"""Guides whose commands need nothing but the clients."""


def blocks(guide: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)


def serving(guide: str) -> list[str]:
    """The lines that start a gateway."""
    lines = [line for block in blocks(guide) for line in block.splitlines()]
    return [line.partition("#")[0].strip("& ") for line in lines if line.startswith("branchline serve")]


@pytest.mark.parametrize("guide", sorted(path.stem for path in GUIDES.glob("*.md")))
def test_every_serve_command_of_the_guides_is_valid(guide: str) -> None:
    for line in serving(guide):
        assert parse_options(*shlex.split(line)[1:])


def test_rewards_of_the_clients_guide_arrive_in_samples(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (GUIDES / "clients.md").read_text(), re.DOTALL)
    exec(compile(program, "clients.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "reward 1.0",
        "0.25 You said: Pick a word.<end>",
        "0.75 You said: Another one.<end>",
    ]


def test_commands_of_the_clients_guide_after_an_episode_work(tmp_path: Path) -> None:
    lines = [line for block in blocks("clients") for line in block.splitlines() if "$SESSION" in line]
    with served_gateway("--no-auth") as served:
        url = served.printed(r"base_url +(\S+)").partition("/sessions/")[0]
        httpx.post(f"{url}/sessions", json={"id": "episode-1"})
        body = {"model": "any", "messages": [{"role": "user", "content": "Say hello."}]}
        httpx.post(f"{url}/sessions/episode-1/v1/chat/completions", json=body)
        script = "\n".join(["set -e", f"SESSION={url}/sessions/episode-1", *lines]).replace(
            "--silent", "--silent --fail"
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert '"state":"finalized","reason":"done"' in done.stdout
    assert re.search(r'"reward":1.0,"rewards":\[{"score":0.5,"start":0,', done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(package.executable.exists() for package in PACKAGES.values()),
    reason="needs the clients: make test-clients",
)
@pytest.mark.parametrize("guide", PASTED)
def test_code_of_the_guides_can_be_pasted(guide: str, tmp_path: Path) -> None:
    programs = [Path(sys.executable).parent, *(package.executable.parent for package in PACKAGES.values())]
    env = {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    # All is installed. `make check-docs` pastes these pages in empty environments, without the clients.
    page = Page(f"docs/guides/{guide}.md", stand_ins={"pip install": ": pip install"})
    result = run_page(page, tmp_path, scripts, env)
    printed = result.output
    assert result.code == 0, printed[-3000:]
    assert "You said: " in printed
    reports = re.findall(r'"sampled_tokens":(\d+),"trained_tokens":(\d+)', printed)
    assert reports
    assert all(sampled == trained != "0" for sampled, trained in reports)
