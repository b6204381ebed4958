"""Structure of the code: packages import in one direction, modules without cycles, names are unique."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import branchline

ROOT = Path(__file__).parent.parent
SOURCE = Path(branchline.__file__).parent
LAYERS = [
    {"core"},
    {"chat"},
    {"tree"},
    {"timelines"},
    {"export"},
    {"testing"},
    {"doctor"},
    {"engines"},
    {"runtime"},
    {"gateway", "loop"},
    {"client"},
    {"rollout"},
    {"train"},
    {"viewer"},
    {"cli"},
]
"""A package imports only from packages of earlier layers, and from itself."""
LAYER_OF = {package: index for index, packages in enumerate(LAYERS) for package in sorted(packages)}
OPTIONAL_IMPORTS = {"torch", "transformers"}
"""Packages that `make test` does not install."""
SEPARATE_ENVIRONMENTS = {"agentcore_rl_toolkit", "art", "mlflow"}
"""Packages that a make target installs for its own tests or benchmarks."""
HEAVY_IMPORTS = {"torch", "ray", "transformers", "tokenizers", "jinja2"}


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


def imports(module: str) -> set[str]:
    """The modules of branchline that a module imports anywhere: late and TYPE_CHECKING imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            base = node.module or ""
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                names.add(submodule if submodule in MODULES else base)
    return {name for name in names if name in MODULES}


GRAPH = {module: imports(module) for module in MODULES}


def reachable(start: str) -> set[str]:
    found: set[str] = set()
    stack = [start]
    while stack:
        new = GRAPH[stack.pop()] - found
        found |= new
        stack += new
    return found


def test_every_folder_is_a_known_package() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LAYER_OF)


@pytest.mark.parametrize("package", LAYER_OF)
def test_a_package_imports_only_packages_of_earlier_layers(package: str) -> None:
    forbidden = [
        f"{module} imports {target}"
        for module, targets in GRAPH.items()
        if module.split(".")[1:2] == [package]
        for target in sorted(targets)
        for other in target.split(".")[1:2]
        if other != package and LAYER_OF[other] >= LAYER_OF[package]
    ]
    assert not forbidden, "\n".join(forbidden)


def test_no_modules_import_each_other_in_a_cycle() -> None:
    below = {module: reachable(module) for module in GRAPH}
    cycles = {
        tuple(sorted(other for other in below[module] if module in below[other]))
        for module in GRAPH
        if module in below[module]
    }
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in sorted(cycles))


def test_public_class_names_are_unique() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for module, file in MODULES.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    shared = {name: modules for name, modules in owners.items() if len(modules) > 1}
    assert not shared


def test_all_and_the_type_checkers_imports_list_every_public_name() -> None:
    declared = set(branchline.__all__) - {"__version__"}
    assert len(declared) == len(branchline.__all__) - 1
    assert declared == set(branchline._MODULE_OF)
    for_checkers = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(MODULES["branchline"].read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_checkers == {name: f"branchline.{module}" for name, module in branchline._MODULE_OF.items()}
    assert declared <= set(dir(branchline))
    assert not hasattr(branchline, "nothing")


@pytest.mark.parametrize("name", branchline.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    try:
        getattr(branchline, name)
    except ImportError as error:
        if error.name not in OPTIONAL_IMPORTS:
            raise


def test_lazy_names_are_imported_on_first_use() -> None:
    code = (
        "import sys, branchline\n"
        "packages = ('gateway', 'loop', 'engines', 'runtime')\n"
        "def loaded(): return [p for p in packages if f'branchline.{p}' in sys.modules]\n"
        "before = loaded(); branchline.tool; print(before, 'loop' in loaded(), 'gateway' in loaded())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True False"


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = "import sys, branchline, branchline.cli.main; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY_IMPORTS & set(done.stdout.split())


def test_every_imported_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {canonicalize_name(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    distributions = packages_distributions()
    folders = ("src", "tests", "scripts", "benchmarks", "examples")
    undeclared = {
        f"{file.relative_to(ROOT)}: {package}"
        for file in chain(*((ROOT / folder).rglob("*.py") for folder in folders))
        for package in top_level_imports(file)
        if package not in {"branchline", *folders, *sys.stdlib_module_names, *SEPARATE_ENVIRONMENTS}
        if declared.isdisjoint(map(canonicalize_name, distributions.get(package, [package])))
    }
    assert not undeclared


def top_level_imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_files_have_less_than_500_lines() -> None:
    sizes = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    assert max(sizes.values()) < 500, max(sizes, key=lambda module: sizes[module])
