"""Fetches real chat templates from packages on PyPI into .cache/templates, once.

    python scripts/fetch_templates.py

The sources of llama-cpp-python (llama.cpp's collection) and the wheels of TRL and axolotl carry about 180
templates of some 70 model families. Only files that end in `.jinja` are read; nothing of the packages is
executed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TEMPLATES_DIR = Path(__file__).resolve().parent.parent / ".cache" / "templates"
PACKAGES = {
    "llama_cpp": "llama-cpp-python==0.3.36",
    "trl": "trl==1.16.0",
    "axolotl": "axolotl==0.19.0",
}
"""The folder of each collection, and the package that carries it."""
_FROM_SOURCE = {"llama_cpp"}
"""Collections that only the source distribution carries."""


def fetch(name: str) -> None:
    """Fetches one collection, completely or not at all."""
    target = TEMPLATES_DIR / name
    if target.is_dir():
        return
    requirement = PACKAGES[name]
    print(f"fetching {requirement}", flush=True)
    options = ["--no-binary", ":all:"] if name in _FROM_SOURCE else ["--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, requirement]
        subprocess.run([*command, "--dest", folder], check=True)
        (archive,) = Path(folder).iterdir()
        partial = target.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        for path, data in _templates_in(archive):
            (partial / PurePosixPath(path).name).write_bytes(data)
        partial.rename(target)


def _templates_in(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for path in wheel.namelist():
                if path.endswith(".jinja"):
                    yield path, wheel.read(path)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name.endswith(".jinja") else None
            if source is not None:
                yield member.name, source.read()


def main() -> int:
    for name in PACKAGES:
        fetch(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
