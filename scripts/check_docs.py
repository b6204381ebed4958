"""Runs the pages of the docs as pasted: every block, in order, in an environment of the page's own.

    python scripts/check_docs.py [--light] [PAGE …]

A page begins with an empty environment, and gets what its own `pip install` lines install, nothing else. pip
is offered the wheel of this checkout, so `pip install 'branchline[serve]'` does what it will do for a user of
a release. README.md runs in a copy of the checkout, every other page in an empty folder.

- Blocks of `sh` run in one shell, those of `python` in one interpreter.
- A Python block whose first line is `# NAME.py` is saved under that name, and not run.
- A line `branchline serve` that does not end in `&` is served until it answers, then stopped.
- The port 8100 is replaced by a free one.

`scripts/docs_pages.py` lists the pages, with what stands in for a GPU, a hub or a server, and what is left
out.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.docs_pages import PAGES, Page  # noqa: E402

TIMEOUT_S = 900
_SERVED = re.compile(r"^((?:\S+/)?branchline serve\b[^&\n]*)$", re.MULTILINE)
_SHELL = """\
set -Eeo pipefail
trap 'echo "check-docs: failed in the block at line $BLOCK" >&2' ERR
curl() { command curl --fail-with-body "$@"; }
serve_a_while() {
  "$@" & local pid=$!
  until command curl --silent --output /dev/null http://127.0.0.1:$PORT/healthz; do
    kill -0 $pid
    sleep 0.2
  done
  kill -TERM $pid
  wait $pid || true
}
run_python() {
  if [ -z "${PY_PID:-}" ]; then coproc PY { exec python -u "$SCRIPTS/run_blocks.py"; }; fi
  echo "$1" >&"${PY[1]}"
  local status
  read -r status <&"${PY[0]}"
  [ "$status" = 0 ]
}
"""
_RUN_BLOCKS = '''\
"""Runs the files that it is told, in one scope; answers 0 for each that succeeds."""
import os, sys, traceback

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
scope = {"__name__": "__main__"}
while path := sys.stdin.readline().strip():
    status = 0
    try:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), scope)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    print(status, file=answers, flush=True)
'''


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int
    """Of its first line in the page."""


@dataclass(frozen=True)
class PageResult:
    """What became of a page."""

    code: int
    output: str
    seconds: float
    skipped: tuple[str, ...] = ()
    """The blocks that were left out, each with the reason."""


def read_blocks(text: str, languages: Sequence[str] = ("sh", "python")) -> list[Block]:
    """The blocks of a page, in order.

    >>> read_blocks("text\\n```sh\\nls\\n```\\n")
    [Block(language='sh', text='ls\\n', line=3)]
    """
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if found[1] in languages
    ]


def chosen_blocks(page: Page, text: str) -> tuple[list[Block], list[str]]:
    """The blocks that run, with stand-ins, and what was left out. Raises ValueError if the list is stale."""
    unused = {*page.stand_ins, *page.left_out}
    blocks, skipped = [], []
    for block in read_blocks(text):
        reasons = [reason for part, reason in page.left_out.items() if part in block.text]
        unused -= {part for part in unused if part in block.text}
        if reasons:
            skipped.append(f"line {block.line}: {reasons[0]}")
            continue
        content = block.text
        for part, stand_in in page.stand_ins.items():
            content = content.replace(part, stand_in)
        blocks.append(Block(block.language, content, block.line))
    if unused:
        raise ValueError(f"{page.path}: got {sorted(unused)}, expected texts of its blocks")
    return blocks, skipped


def shell_script(blocks: Sequence[Block], folder: Path, port: int) -> str:
    """One script that runs the blocks; Python blocks are files in the folder."""
    (folder / "run_blocks.py").write_text(_RUN_BLOCKS)
    parts = [_SHELL]
    for block in blocks:
        text = block.text.replace("8100", str(port))
        parts.append(f"BLOCK={block.line}")
        if block.language == "sh":
            text = text.replace("branchline serve", f"branchline serve --port {port}")
            parts.append(_SERVED.sub(r"serve_a_while \1", text))
        elif named := re.match(r"# (\w+\.py)\n", text):
            parts.append(f"cat > {named[1]} <<'END OF FILE'\n{text}END OF FILE")
        else:
            file = folder / f"line{block.line}.py"
            file.write_text(text)
            parts.append(f"run_python {file}")
    return "\n".join(parts) + "\n"


def run_page(page: Page, folder: Path, scripts: Path, env: Mapping[str, str]) -> PageResult:
    """Runs a page in a folder, with the variables of its environment."""
    blocks, skipped = chosen_blocks(page, (ROOT / page.path).read_text())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    script = shell_script(blocks, scripts, port)
    started = time.monotonic()
    log = scripts / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**env, "SCRIPTS": str(scripts), "PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with suppress(ProcessLookupError):  # servers that the page started are in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return PageResult(code, log.read_text(errors="replace"), time.monotonic() - started, tuple(skipped))


def check_page(page: Page, wheel: Path) -> PageResult:
    """Runs a page in a new environment to which pip offers the wheel."""
    with tempfile.TemporaryDirectory(prefix="check-docs-") as name:
        home = Path(name)
        folder, scripts, environment = home / "work", home / "scripts", home / "environment"
        folder.mkdir()
        scripts.mkdir()
        if page.path == "README.md":
            copy_checkout(folder)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (scripts / "constraints.txt").write_text(f"branchline=={wheel.name.split('-')[1]}\ntorch==2.13.0\n")
        keep = ("PATH", "LANG", "PIP_", "SSL_", "HTTP", "NO_PROXY", "REQUESTS_", "CURL_")
        env = {key: value for key, value in os.environ.items() if key.upper().startswith(keep)}
        env |= {
            "PATH": os.pathsep.join([str(environment / "bin"), os.environ["PATH"]]),
            "VIRTUAL_ENV": str(environment),
            "CHECKOUT_PYTHON": sys.executable,
            "HOME": str(home),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
            "PIP_CONSTRAINT": str(scripts / "constraints.txt"),
            "PIP_FIND_LINKS": f"{wheel.parent} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),
            "PIP_QUIET": "2",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "TERM": "dumb",
        }
        if (config := Path.home() / ".config" / "pip" / "pip.conf").is_file():
            env["PIP_CONFIG_FILE"] = str(config)
        return run_page(page, folder, scripts, env)


def copy_checkout(folder: Path) -> None:
    """Copies what git has or would add: the page may write into its checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = b"\0".join(
        name for name in listing.stdout.split(b"\0") if name and (ROOT / name.decode()).is_file()
    )
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=files, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True,
    )
    (wheel,) = folder.glob("branchline-*.whl")
    return wheel


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the pages; prints what failed, what stood in for what, and what was left out."""
    parser = argparse.ArgumentParser(description="Run the pages of the docs as pasted.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="paths; default: all")
    parser.add_argument("--light", action="store_true", help="without pages that install torch or ray")
    options = parser.parse_args(argv)
    known = {page.path: page for page in PAGES}
    if unknown := [path for path in options.pages if path not in known]:
        parser.error(f"PAGE: got {unknown[0]}, expected one of {', '.join(known)}")
    pages = [known[path] for path in options.pages or known if not (options.light and known[path].heavy)]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="check-docs-wheel-") as name:
        wheel = build_wheel(Path(name))
        for page in pages:
            result = check_page(page, wheel)
            failed += result.code != 0
            print(f"{'FAILED' if result.code else 'ok    '} {page.path}  {result.seconds:.0f} s", flush=True)
            for part, stand_in in page.stand_ins.items():
                print(f"         stand-in: {stand_in!r} for {part!r}")
            for left_out in result.skipped:
                print(f"         left out: {left_out}")
            if result.code:
                print(result.output[-4000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
