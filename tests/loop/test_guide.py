"""The guide to the loop can be pasted: its Python is one program, which runs as it stands and says what the
guide says, where nothing is installed but what the guide installs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from branchline import (
    AgentContext,
    BranchlineError,
    HttpModel,
    LoopLimits,
    LoopOutput,
    LoopState,
    Message,
    SessionModel,
    Task,
    run_agent,
)
from branchline.cli.engines import build_router
from branchline.cli.main import build_parser
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.loop.state import StopReason
from branchline.runtime.managed_session import SessionLimits, SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.loop.harness import run

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guides" / "loop.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Python reads it when it starts.
LEAVES_OUT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def command(words: str) -> list[str]:
    """The guide's only command line with these words."""
    (line,) = [line for block in blocks("sh") for line in block.splitlines() if words in line]
    return shlex.split(line, comments=True)


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> set[str]:
    """What the first column of a section's table names."""
    return {
        name
        for line in section(heading).splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1:2][0] if line.startswith("|") else "")
    }


def needed(requirement: Requirement, known: set[tuple[str, str]]) -> Iterator[str]:
    """What an installer would bring along, by name."""
    name = canonicalize_name(requirement.name)
    for extra in ("", *requirement.extras):
        if (name, extra) in known:
            continue
        known.add((name, extra))
        yield name
        if name == "branchline":
            wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
        else:
            try:
                wanted = requires(name) or []
            except PackageNotFoundError:  # of another system or Python
                wanted = []
        for further in map(Requirement, wanted):
            if further.marker is None or further.marker.evaluate({"extra": extra}):
                yield from needed(further, known)


def absent() -> set[str]:
    """The modules that are here and would not be where only the guide's own line was run."""
    installed = set(needed(Requirement(command("pip install")[2]), set()))
    return {
        module
        for module, owners in packages_distributions().items()
        if installed.isdisjoint(map(canonicalize_name, owners))
    }


def test_the_python_of_the_guide_is_one_program_that_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "guide.py").write_text("\n".join(blocks("python")))
    left_out = absent()
    assert {"pytest", "httpx"} <= left_out
    (tmp_path / "sitecustomize.py").write_text(LEAVES_OUT.format(absent=left_out))
    ran = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    names, apples, pears, tomato, far, resumed = ran.stdout.splitlines()
    assert names == "('price', 'sell', 'in_stock')"
    assert re.fullmatch(r"apples-\w+ interaction 6 1.0 \d+", apples)
    assert re.fullmatch(r"pears-\w+ stop 4 None \d+", pears)
    assert re.fullmatch(r"tomato-\w+ stop 3 1.0 \d+", tomato)
    assert far == "['Sold, for 6.', 'They cost 12.', 'Yes.']"
    assert resumed == "1 ['Is a tomato a fruit?', 'It is.', 'Are you sure?', 'Yes.'] {0, 1}"


def test_the_gateway_that_the_guide_starts_is_where_it_says_and_wants_no_key() -> None:
    async def test() -> None:
        options = build_parser().parse_args(command("branchline serve")[1:])
        assert f"http://{options.host}:{options.port}" in TEXT
        codec, fleet = build_router(options)
        config = GatewayConfig(auth=not options.no_auth)
        async with (
            Gateway(engine=fleet, codec=codec, config=config) as gateway,
            await HttpModel.open(gateway.url) as model,
        ):
            reply = await model.ask([Message("user", "What do 3 pears cost?")])
            assert reply.message.content == "You said: What do 3 pears cost?"

    run(test)


@pytest.mark.parametrize(
    ("room", "limits", "ending", "error"),
    [
        (3, SessionLimits(), StopReason.MODEL_LENGTH, "ContextLengthError"),
        (None, SessionLimits(calls=1), StopReason.SESSION_CALLS, "out_of_calls"),
        (None, SessionLimits(tokens=1), StopReason.SESSION_TOKENS, "out_of_tokens"),
    ],
)
def test_an_agent_of_ones_own_is_told_by_an_error_what_ends_a_loop(
    room: int | None, limits: SessionLimits, ending: StopReason, error: str
) -> None:
    assert f"`{ending}`" in section("An agent of your own")
    assert f"`{error}`" in section("An agent of your own")

    async def test() -> None:
        engine, task = ScriptedEngine(), Task((Message("user", "p"),), agent_name="tool")
        live, _, _ = SessionStore(engine.codec).open(SessionOptions(limits=limits))
        setting = AgentContext(SessionModel(live, engine))
        await setting.ask(LoopState.begin(task))
        engine.max_context = room
        assert (await run_agent(LoopState.begin(task), setting)).stop_reason is ending
        with pytest.raises(BranchlineError) as raised:
            await setting.ask(LoopState.begin(task))
        assert getattr(raised.value, "kind", type(raised.value).__name__) == error

    run(test)


def test_the_guide_names_every_limit_and_everything_that_comes_out() -> None:
    assert rows("Limits") == set(LoopLimits.__struct_fields__)
    assert rows("What comes out") == {field.name for field in fields(LoopOutput)}
