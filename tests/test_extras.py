"""Each extra installs everything that its modules import."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "": ("branchline", "branchline.export.samples", "branchline.export.jsonl", "branchline.cli.main"),
    "tokenizer": ("branchline.chat.generic.codec", "branchline.doctor"),
    "renderers": ("branchline.chat.renderers_codec.codec",),
    "serve": ("branchline.gateway.server", "branchline.engines.vllm", "branchline.engines.sglang"),
    "loop": ("branchline.loop.agent_loop", "branchline.loop.tools.functions"),
    "context": ("branchline.loop.context.documents",),
    "mcp": ("branchline.loop.tools.mcp",),
    "parquet": ("branchline.export.parquet",),
    "ray": ("branchline.rollout.ray_cluster", "branchline.rollout.rollout"),
    "hf": ("branchline.engines.hf",),
    "smollm2": ("branchline.engines.smollm2", "branchline.gateway.server", "branchline.engines.hf"),
    "train": ("branchline.train.trainer", "branchline.train.episodes"),
    "demo": ("branchline.train.demo.demo", "branchline.train.demo.ablations"),
}
"""What a user of an extra imports."""
NEEDS = {"hf": "torch", "smollm2": "gguf", "train": "torch", "demo": "matplotlib", "ray": "ray"}
"""A package that not every environment of the tests has."""


def own_requirements(extra: str) -> list[str]:
    """What `pip install 'branchline[extra]'` asks for."""
    optional: list[str] = PROJECT["optional-dependencies"].get(extra, [])
    return [*PROJECT["dependencies"], *optional]


def installed_by(extra: str) -> set[str]:
    """All packages that come with an extra, with those that they require."""
    found: set[tuple[str, frozenset[str]]] = set()
    stack = [Requirement(text) for text in own_requirements(extra)]
    while stack:
        requirement = stack.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        if name == "branchline":
            stack += [Requirement(text) for part in extras for text in own_requirements(part)]
            continue
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        for child in map(Requirement, texts):
            contexts = [{"extra": part} for part in extras or {""}]
            if child.marker is None or any(child.marker.evaluate(context) for context in contexts):
                stack.append(child)
    return {name for name, _ in found}


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_installs_what_its_modules_import(extra: str, tmp_path: Path) -> None:
    needed = NEEDS.get(extra)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    for name in installed_by(extra) - {"branchline"}:
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for entry in {file.parts[0] for file in package.files or ()} - {".."}:
            with suppress(FileExistsError):
                (tmp_path / entry).symlink_to(str(package.locate_file(entry)))
    imports = "; ".join(f"import {module}" for module in MODULES[extra])
    result = subprocess.run(
        [sys.executable, "-S", "-c", imports],  # -S: without site-packages
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
