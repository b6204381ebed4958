"""Which extra a missing package comes with, and what its user can type to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from branchline.core import extras
from branchline.core.errors import MissingExtraError
from branchline.core.extras import EXTRA_OF, install_line, pip_install, requires_extra
from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", EXTRA_OF)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError) as raised, requires_extra():
        __import__(f"{package}.part")
    assert str(raised.value) == f"{package} is not installed: {install_line(EXTRA_OF[package])}"
    assert raised.value.name == package


def test_a_package_of_no_extra_keeps_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="httptoolz") as raised, requires_extra():
        __import__("httptoolz")
    assert not isinstance(raised.value, MissingExtraError)


def test_in_a_checkout_the_line_names_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_line("serve").endswith("pip install -e '.[serve]'")
    monkeypatch.chdir(tmp_path)
    assert install_line("serve").endswith(f"pip install -e '{ROOT}[serve]'")


def test_elsewhere_the_line_names_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "__file__", "/x/lib/python3.11/site-packages/branchline/core/extras.py")
    assert install_line("serve").endswith("pip install 'branchline[serve]'")


def test_pip_is_that_of_the_running_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "env" / "bin", tmp_path / "other" / "bin"
    for folder in (here, elsewhere):
        folder.mkdir(parents=True)
        for name in ("pip", "python"):
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    monkeypatch.setenv("PATH", str(here))
    assert pip_install() == "pip install"
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (elsewhere, here))))
    assert pip_install() == f"{here}/python -m pip install"
    monkeypatch.chdir(tmp_path)
    assert pip_install() == "env/bin/python -m pip install"
    monkeypatch.setattr(extras, "find_spec", lambda name: None)  # an environment that uv made
    assert pip_install() == "uv pip install --python env/bin/python"


@pytest.mark.parametrize(
    ("statement", "package"),
    [
        ("from branchline import Gateway", "starlette"),
        ("from branchline import VllmEngine", "httptools"),
        ("from branchline import HfEngine", "torch"),
        ("from branchline import Trainer", "transformers"),
        ("from branchline import write_parquet", "pyarrow"),
        ("import branchline.engines.hf", "torch"),
        ("import branchline.loop.tools.mcp", "mcp"),
    ],
)
def test_a_class_whose_package_is_missing_says_which_extra_has_it(statement: str, package: str) -> None:
    if package == "transformers":
        pytest.importorskip("torch")  # it is imported first
    code = f"import sys; sys.modules[{package!r}] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = f"{package} is not installed: {install_line(EXTRA_OF[package])}"
    assert done.stderr.splitlines()[-1] == f"branchline.core.errors.MissingExtraError: {expected}"


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("serve --engine scripted", "starlette"),
        ("serve --engine scripted", "uvicorn"),
        ("serve --engine scripted", "prometheus_client"),
        ("serve --engine vllm --engine-url http://127.0.0.1:9", "httptools"),
        ("demo", "openai"),
        ("demo", "torch"),
        ("doctor --tokenizer tests", "tokenizers"),
        ("train examples/rollout/records.jsonl --agent a:b --run-folder {folder}", "torch"),
        ("merge examples/three_words.jsonl --samples {folder}.parquet", "pyarrow"),
    ],
)
def test_a_command_whose_package_is_missing_says_which_extra_has_it(
    command: str, package: str, tmp_path: Path
) -> None:
    if (command, package) == ("demo", "openai"):
        pytest.importorskip("torch")  # it is imported first
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from branchline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.format(folder=tmp_path / "x").split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    expected = f"{package} is not installed: {install_line(EXTRA_OF[package])}"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"branchline: error: {expected}"]
