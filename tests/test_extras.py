"""Each extra installs everything that its modules import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from branchline.core.extras import EXTRA_OF
from tests.hang import HANG_S
from tests.test_architecture import top_level_imports

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "": ("branchline", "branchline.export.samples", "branchline.export.jsonl", "branchline.cli.main"),
    "serve": (
        "branchline.chat.generic.codec",
        "branchline.doctor",
        "branchline.engines.sglang",
        "branchline.engines.vllm",
        "branchline.gateway.server",
        "branchline.loop.agent_loop",
        "branchline.rollout.ray_cluster",
        "branchline.rollout.rollout",
        "branchline.rollout.runners",
        "branchline.rollout.transfer_queue",
    ),
    "train": (
        "branchline.engines.hf",
        "branchline.engines.smollm2",
        "branchline.train.demo.ablations",
        "branchline.train.demo.demo",
        "branchline.train.episodes",
        "branchline.train.trainer",
    ),
    "agent": (
        "branchline.loop.context.documents",
        "branchline.loop.tools.functions",
        "branchline.loop.tools.mcp",
        "docstring_parser",
        "jsonschema",
        "yaml",
    ),
    "ray": ("branchline.rollout.ray_cluster", "ray"),
    "data": ("branchline.export.parquet",),
    "images": ("branchline.chat.renderers_codec.codec", "branchline.chat.vision", "PIL.Image", "renderers"),
    "otel": ("branchline.gateway.server", "branchline.gateway.tracing"),
}
"""What a user of an extra imports."""
NEEDS = {"train": ("torch", "matplotlib"), "ray": ("ray",)}
"""Packages that not every environment of the tests has."""
TRACKERS = {"mlflow"}
"""Packages for which a user's own option asks, by their names."""


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


def environment_of(extra: str, folder: Path) -> dict[str, str]:
    """Variables of a process that has the packages of an extra and no others."""
    for name in installed_by(extra) - {"branchline"}:
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for entry in {file.parts[0] for file in package.files or ()} - {".."}:
            with suppress(FileExistsError):
                (folder / entry).symlink_to(str(package.locate_file(entry)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_installs_what_its_modules_import(extra: str, tmp_path: Path) -> None:
    for needed in NEEDS.get(extra, ()):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    imports = "; ".join(f"import {module}" for module in MODULES[extra])
    result = subprocess.run(
        [sys.executable, "-S", "-c", imports],  # -S: without site-packages
        env=environment_of(extra, tmp_path),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


AGENT = """
import json
from urllib.request import Request, urlopen

def run(task, session):
    body = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
    headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
    urlopen(Request(f"{session.base_url}/chat/completions", json.dumps(body).encode(), headers)).read()

def score(task, trajectory):
    return trajectory.answer == "You said: hello"
"""


def test_a_function_is_run_on_tasks_with_the_serve_extra_alone(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "prompt": "hello"}\n')
    agent = "--agent my_agent:run --reward my_agent:score"
    program = "import sys; from branchline.cli.main import main; sys.exit(main())"
    for command in (
        f"run tasks.jsonl {agent} --engine scripted --run-folder runs/first --json",
        "stats runs/first --json",
    ):
        done = subprocess.run(
            [
                sys.executable,
                "-S",
                "-c",
                program,
                *command.split(),
            ],
            env=environment_of("serve", tmp_path / "packages"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["reward_mean"] == 1.0


def test_every_optional_import_is_in_the_table_with_the_extra_that_declares_it() -> None:
    base = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    distributions = packages_distributions()
    imported = {name for file in (ROOT / "src").rglob("*.py") for name in top_level_imports(file)}
    optional = {
        name
        for name in imported - {"branchline", *TRACKERS, *sys.stdlib_module_names}
        if base.isdisjoint(map(canonicalize_name, distributions.get(name, [name])))
    }
    assert optional <= EXTRA_OF.keys()
    for package, extra in EXTRA_OF.items():
        names = {canonicalize_name(name) for name in distributions.get(package, [package.replace("_", "")])}
        declared = {canonicalize_name(Requirement(text).name) for text in own_requirements(extra)}
        assert names & declared, (package, extra)


def test_the_extras_are_few() -> None:
    assert {*EXTRA_OF.values(), "dev"} == set(PROJECT["optional-dependencies"])
