"""The house rules that a machine can check: data flows one way, and every public name is declared."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import branchline

SOURCE = Path(branchline.__file__).parent
PACKAGES = [
    "core",
    "chat",
    "tree",
    "timelines",
    "export",
    "testing",
    "doctor",
    "engines",
    "gateway",
    "loop",
    "rollout",
    "train",
    "viewer",
    "cli",
]
HEAVY_IMPORTS = {"torch", "ray", "transformers", "tokenizers", "jinja2"}
FILES = sorted(SOURCE.rglob("*.py"))


def imports_of(file: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_package_imports_only_packages_to_its_left(file: Path) -> None:
    parts = file.relative_to(SOURCE).parts
    if len(parts) == 1:
        return
    here = PACKAGES.index(parts[0])
    for name in imports_of(file):
        path = name.split(".")
        if path[0] == "branchline" and len(path) > 1:
            assert PACKAGES.index(path[1]) <= here, f"{parts[0]} may not import {path[1]}"


def test_every_folder_is_a_known_package() -> None:
    found = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found <= set(PACKAGES)


def test_all_public_names_are_declared() -> None:
    public = {
        name
        for name, value in vars(branchline).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    declared = set(branchline.__all__)
    assert public <= declared
    assert len(declared) == len(branchline.__all__)
    assert all(hasattr(branchline, name) for name in declared), "those that are read late, too"
    assert declared <= set(dir(branchline))
    assert not hasattr(branchline, "nothing")


def test_the_loop_is_imported_on_first_use() -> None:
    code = (
        "import sys, branchline; before = {m for m in sys.modules if m.startswith('branchline.')}; "
        "branchline.tool; print(*sorted(m for m in before if '.loop' in m or '.gateway' in m)); "
        "print('branchline.loop.tools.functions' in sys.modules, 'branchline.gateway' in sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.splitlines() == ["", "True False"]


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = (
        "import sys, branchline, branchline.cli.main; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY_IMPORTS & set(loaded.stdout.split())


def test_files_stay_below_500_lines() -> None:
    sizes = {file: len(file.read_text().splitlines()) for file in FILES}
    assert max(sizes.values()) < 500, max(sizes, key=lambda file: sizes[file])
