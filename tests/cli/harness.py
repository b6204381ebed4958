"""Log lines for the commands that read a log, and a served gateway in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

LogLine = dict[str, Any]


def raw_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def log_line(
    messages: Sequence[dict[str, Any]],
    answer: str | dict[str, Any],
    prompt: Sequence[int] | None = None,
    ids: Sequence[float] | None = None,
    *,
    logprobs: bool = True,
    tools: Sequence[dict[str, Any]] = (),
    finish_reason: str = "stop",
    **names: str,
) -> LogLine:
    message = raw_message("assistant", answer) if isinstance(answer, str) else answer
    choice: dict[str, Any] = {"message": message, "finish_reason": finish_reason}
    response: dict[str, Any] = {"choices": [choice]}
    if prompt is not None:
        response["prompt_token_ids"] = list(prompt)
    if ids is not None:
        choice["token_ids"] = list(ids)
        if logprobs:
            choice["logprobs"] = {"content": [{"logprob": -0.5} for _ in ids]}
    return {"request": {"messages": list(messages), "tools": list(tools)}, "response": response, **names}


@dataclass
class ServedGateway:
    """A `branchline serve` process and the addresses and keys it printed."""

    process: subprocess.Popen[str]
    banner: str

    def printed(self, pattern: str) -> str:
        match = re.search(pattern, self.banner)
        assert match is not None, self.banner
        return match[1]

    def chat(self, text: str, **fields: object) -> httpx.Response:
        return httpx.post(
            self.printed(r"base_url +(\S+)") + "/chat/completions",
            json={"model": "toy", "messages": [raw_message("user", text)], **fields},
            headers={"authorization": "Bearer " + self.printed(r"api_key +(\S+)")},
        )


@contextmanager
def served_gateway(*options: str, **environment: str) -> Iterator[ServedGateway]:
    """A scripted gateway in its own process, killed at the end unless it has stopped by itself."""
    command = [sys.executable, "-m", "branchline.cli", "serve", "--engine", "scripted", "--port", "0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        try:
            yield ServedGateway(process, "".join(process.stdout.readline() for _ in range(8)))
        finally:
            process.kill()
