"""Servers in their own processes, so that their CPU time is measured alone.

A server prints one line of JSON when it listens, answers each line on its stdin with one line, and exits when
its stdin is closed. `cpu_s` is the CPU time of all its threads, user and system.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

_START_S, _ANSWER_S, _STOP_S = 60, 60, 20
_LINE_BYTES = 2**24
_QUIET_S, _QUIET_CPU_S = 0.1, 0.002

Command = Callable[[], Mapping[str, Any]]


class ServerProcess:
    """A running server."""

    def __init__(self, process: Process, address: dict[str, Any]) -> None:
        self._process = process
        self.url: str = address["url"]
        self.key: str = address.get("key", "")

    async def command(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        return await asyncio.wait_for(_read_line(self._process), _ANSWER_S)

    async def cpu_s(self) -> float:
        """CPU seconds so far, once the server is idle: some servers store data after they have answered."""
        spent = float("-inf")
        while True:
            now = float((await self.command("cpu"))["cpu_s"])
            if now - spent < _QUIET_CPU_S:
                return now
            spent = now
            await asyncio.sleep(_QUIET_S)


async def _read_line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a server of the benchmark exited early; its output is above")
    answer: dict[str, Any] = msgspec.json.decode(line)
    return answer


@asynccontextmanager
async def server_process(
    script: str, options: Mapping[str, Any], python: str = sys.executable
) -> AsyncIterator[ServerProcess]:
    """Runs a module of this package as a server while the block runs."""
    where = [str(Path(__file__).parent / f"{script}.py")] if python != sys.executable else []
    command = where or ["-m", f"benchmarks.gateway.{script}"]
    process = await asyncio.create_subprocess_exec(
        python, *command, msgspec.json.encode(options).decode(), stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
    )  # fmt: skip
    try:
        yield ServerProcess(process, await asyncio.wait_for(_read_line(process), _START_S))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def answer_commands(address: Mapping[str, Any], commands: Mapping[str, Command]) -> None:
    """The server's side: prints its address, then answers commands until stdin is closed."""
    all_commands: dict[str, Command] = {"cpu": lambda: {"cpu_s": time.process_time()}, **commands}
    _print_json(address)
    while line := await asyncio.to_thread(sys.stdin.readline):
        _print_json(all_commands[line.strip()]())


def _print_json(value: Mapping[str, Any]) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)
