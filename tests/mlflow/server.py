"""A real mlflow server on loopback, with a database of its own, and its client: both in their environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".cache" / "mlflow" / "bin"
"""Made by `make test-mlflow`."""
TELEMETRY_OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
}
_STARTED = "Application startup complete"


class MlflowServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def make_experiment(self, name: str) -> str:
        answer = httpx.post(f"{self.url}/api/2.0/mlflow/experiments/create", json={"name": name}, timeout=30)
        experiment: str = answer.raise_for_status().json()["experiment_id"]
        return experiment

    def traces(self, experiment: str, session: str) -> Any:
        """What mlflow's own client finds of a session."""
        command = [
            str(BIN / "python"),
            str(Path(__file__).with_name("read_traces.py")),
            self.url,
            experiment,
            session,
        ]
        environ = {**_clean_env(), **TELEMETRY_OFF}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Runs while the block does; its files lie in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**_clean_env(), **TELEMETRY_OFF},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            output = _read_until(process.stdout, _STARTED)
            assert output is not None, "mlflow server did not start"
            reader = threading.Thread(target=process.stdout.read, daemon=True)
            reader.start()
            yield MlflowServer(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(30)


def _read_until(output: IO[str], words: str) -> str | None:
    for line in output:
        if words in line:
            return line
    return None


def _clean_env() -> dict[str, str]:
    """Our environment without what names another one."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VIRTUAL_ENV"))
    }
