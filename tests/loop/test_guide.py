"""The guide to the loop: what its Python prints, and what its tables name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from scripts.check_docs import read_blocks

from branchline import (
    BranchlineError,
    HttpModel,
    LoopLimits,
    LoopOutput,
    Message,
    SessionModel,
    Task,
    run_agent,
)
from branchline.cli.engines import build_router
from branchline.cli.main import parse_options
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.server import Gateway
from branchline.loop.agents import AgentContext
from branchline.loop.state import LoopState, StopReason
from branchline.runtime.managed_session import SessionLimits, SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.hang import HANG_S
from tests.loop.harness import run

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guides" / "loop.md").read_text()


def blocks(language: str) -> list[str]:
    return [block.text for block in read_blocks(TEXT, [language])]


def command(text: str) -> list[str]:
    """The guide's only command line that contains the text."""
    (line,) = [line for block in blocks("sh") for line in block.splitlines() if text in line]
    return shlex.split(line, comments=True)


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> set[str]:
    """The names in the first column of a section's table."""
    return {
        name
        for line in section(heading).splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1:2][0] if line.startswith("|") else "")
    }


def test_the_guides_python_runs_as_one_program(tmp_path: Path) -> None:
    (tmp_path / "guide.py").write_text("\n".join(blocks("python")))
    ran = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    names, apples, pears, tomato, rewards, remote, resumed = ran.stdout.splitlines()
    assert names == "('price', 'sell', 'in_stock')"
    assert re.fullmatch(r"apples-\w+ interaction 6 1.0 \d+", apples)
    assert re.fullmatch(r"pears-\w+ stop 4 None \d+", pears)
    assert re.fullmatch(r"tomato-\w+ stop 3 1.0 \d+", tomato)
    assert rewards == (
        "[[1.0], [None], [1.0]] {'completed'} [(['turn-3'], 1.0), (['tool-sell'], 1.0), ([], 1.0)]"
    )
    assert remote == "['Sold, for 6.', 'They cost 12.', 'Yes.']"
    assert resumed == "1 ['Is a tomato a fruit?', 'It is.', 'Are you sure?', 'Yes.'] {0, 1}"


def test_the_guides_gateway_needs_no_key() -> None:
    async def test() -> None:
        options = parse_options(*command("branchline serve")[1:])
        assert f"http://{options.host}:{options.port}" in TEXT
        codec, engine = build_router(options.engines)
        config = options.gateway
        async with (
            Gateway(engine=engine, codec=codec, config=config) as gateway,
            await HttpModel.open(gateway.url) as model,
        ):
            result = await model.ask([Message("user", "What do 3 pears cost?")])
            assert result.message.content == "You said: What do 3 pears cost?"

    run(test)


@pytest.mark.parametrize(
    ("max_context", "limits", "reason", "error"),
    [
        (3, SessionLimits(), StopReason.MODEL_LENGTH, "ContextLengthError"),
        (None, SessionLimits(calls=1), StopReason.SESSION_CALLS, "out_of_calls"),
        (None, SessionLimits(tokens=1), StopReason.SESSION_TOKENS, "out_of_tokens"),
    ],
)
def test_a_custom_agent_gets_an_error_where_a_loop_stops(
    max_context: int | None, limits: SessionLimits, reason: StopReason, error: str
) -> None:
    assert f"`{reason}`" in section("Custom agents")
    assert f"`{error}`" in section("Custom agents")

    async def test() -> None:
        engine, task = ScriptedEngine(), Task((Message("user", "p"),), agent_name="tool")
        managed, _, _ = SessionStore(engine.codec).open(SessionOptions(limits=limits))
        context = AgentContext(SessionModel(managed, engine))
        await context.ask(LoopState.begin(task))
        engine.max_context = max_context
        assert (await run_agent(LoopState.begin(task), context)).stop_reason is reason
        with pytest.raises(BranchlineError) as raised:
            await context.ask(LoopState.begin(task))
        assert getattr(raised.value, "kind", type(raised.value).__name__) == error

    run(test)


def test_the_guide_lists_every_limit_and_output_field() -> None:
    assert rows("Limits") == set(LoopLimits.__struct_fields__)
    assert rows("Output") == {field.name for field in fields(LoopOutput)}
