"""The README is up to date: its Python runs, its commands succeed, and it lists every package."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from scripts.check_docs import read_blocks

from branchline.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PYTHON_BLOCKS = {
    name: next(block.text for block in read_blocks((ROOT / page).read_text(), ["python"]))
    for name, page in (("gateway", "README.md"), ("session", "docs/guides/sessions.md"))
}
PRINTED = {"gateway": "sampled_tokens=46, trained_tokens=46", "session": "trained_tokens=28"}


@pytest.mark.parametrize("name", PYTHON_BLOCKS)
def test_python_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON_BLOCKS[name], "README.md", "exec"), {})
    assert PRINTED[name] in capsys.readouterr().out


COMMANDS = [
    line.partition("#")[0]
    for block in read_blocks(README, ["sh"])
    for line in block.text.splitlines()
    if line.startswith("branchline ") and "serve" not in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_succeed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_output_that_the_readme_shows_is_that_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```\n\$ branchline (.*?)\n(.*?)```", README, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(ROOT)
    assert main(found[1].split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == found[2].splitlines()


def test_the_layout_lists_every_package() -> None:
    layout = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "src" / "branchline").glob("*/__init__.py")}
    missing = {package for package in packages if f"  {package}/" not in layout}
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_named_make_target_exists(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", (ROOT / document).read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_source_files_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (document.parent / target).exists(), target
    if "decisions" not in document.parts:  # records keep the names of their time
        packages = "|".join(path.parent.name for path in (ROOT / "src" / "branchline").glob("*/__init__.py"))
        for name in re.findall(rf"`((?:{packages})/[\w/]+\.py)`", text):
            assert (ROOT / "src" / "branchline" / name).is_file(), name
