"""Installs the command-line agents that `make test-clients` runs, from npm into .cache/clients, once.

    python scripts/install_clients.py             # all of them
    python scripts/install_clients.py codex       # some

Each has its own folder and a pinned version: how a client edits its history changes between versions, and the
table in docs/guides/clients.md describes these.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CLIENTS_DIR = Path(__file__).resolve().parent.parent / ".cache" / "clients"


@dataclass(frozen=True)
class ClientPackage:
    """The npm package of one client."""

    name: str
    package: str
    version: str
    command: str

    @property
    def folder(self) -> Path:
        return CLIENTS_DIR / f"{self.name}-{self.version}"

    @property
    def executable(self) -> Path:
        return self.folder / "node_modules" / ".bin" / self.command


PACKAGES = {
    package.name: package
    for package in (
        ClientPackage("claude-code", "@anthropic-ai/claude-code", "2.1.197", "claude"),
        ClientPackage("codex", "@openai/codex", "0.166.0", "codex"),
        ClientPackage("qwen-code", "@qwen-code/qwen-code", "0.15.10", "qwen"),
        ClientPackage("opencode", "opencode-ai", "1.18.33", "opencode"),
        ClientPackage("pi", "@mariozechner/pi-coding-agent", "0.73.1", "pi"),
    )
}


def install(package: ClientPackage, npm: str) -> None:
    """Installs one client, completely or not at all."""
    if package.executable.exists():
        return
    print(f"installing {package.package}@{package.version}", flush=True)
    partial = CLIENTS_DIR / f"{package.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "package.json").write_text('{"private": true}\n')
    requirement = f"{package.package}@{package.version}"
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", requirement], cwd=partial, check=True
    )
    shutil.rmtree(package.folder, ignore_errors=True)
    partial.rename(package.folder)


def main(names: list[str]) -> int:
    npm = shutil.which("npm")
    if npm is None:
        print("npm is missing: it installs these clients", file=sys.stderr)
        return 1
    unknown = set(names) - set(PACKAGES)
    if unknown:
        expected = ", ".join(PACKAGES)
        print(f"unknown: {', '.join(sorted(unknown))}; expected some of {expected}", file=sys.stderr)
        return 2
    for name in names or PACKAGES:
        install(PACKAGES[name], npm)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
