"""A gateway in its own process, with the codec of a real tokenizer and a scripted engine.

    python -m tests.faults.gateway_process FOLDER

prints its URL and admin key as one JSON line and serves until it is killed; FOLDER keeps the journal. The
engine answers every prompt with a text that depends on the prompt, so that an exchange of answers is seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from branchline.chat.base import Codec
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.toy import ToyCodec
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.process import run_server
from branchline.gateway.server import Gateway

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"


@dataclass(frozen=True)
class GatewayProcess:
    """A running process."""

    process: subprocess.Popen[str]
    url: str
    admin_key: str

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"}

    @property
    def rss_mib(self) -> float:
        """The memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def open_codec() -> Codec:
    return GenericCodec.open(TOKENIZER) if TOKENIZER.exists() else ToyCodec.chatml()


def reply_text(prompt_ids: Ids) -> str:
    """The answer to a prompt."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes(), digest_size=12).hexdigest()


@contextmanager
def gateway_process(folder: Path) -> Iterator[GatewayProcess]:
    command = [sys.executable, "-m", "tests.faults.gateway_process", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the gateway did not start: exit status {process.wait()}"
            yield GatewayProcess(process, **json.loads(line))
        finally:
            process.kill()


async def serve(folder: Path) -> None:
    codec = open_codec()
    engine = ScriptedEngine(codec, lambda request: Message("assistant", reply_text(request.prompt_ids)))
    async with Gateway(engine=engine, codec=codec, journal=folder / "journal") as gateway:
        print(json.dumps({"url": gateway.url, "admin_key": gateway.admin_key}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_server(serve(Path(sys.argv[1])))
