"""What the README shows can be pasted: its Python runs, its commands answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from branchline.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("code", "said"), list(zip(blocks("python"), ["'trained_tokens': 0", "trained_tokens=28"], strict=True))
)
def test_python_blocks_run(code: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert said in capsys.readouterr().out


COMMANDS = [
    line.partition("#")[0]
    for block in blocks("sh")
    for line in block.splitlines()
    if line.startswith("branchline ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_succeed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_every_package_is_in_the_annotated_tree() -> None:
    rooms = {path.name for path in (ROOT / "src" / "branchline").iterdir() if path.is_dir()} - {"__pycache__"}
    missing = {room for room in rooms if f"  {room}/" not in README}
    assert not missing


def test_every_make_target_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
