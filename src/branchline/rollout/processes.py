"""Shell commands as processes of their own: with all their children, they end when they are cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from branchline.loop.timeouts import finish_despite_cancel

_TAIL_CHARS = 400
_MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""How much of the end of an output is read back."""
_TERMINATE_S = 2.0
"""How long a cancelled command may take to end by itself."""


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    exit_code: int
    """Negative: the number of the signal that ended it."""
    output: bytes
    """The end of stdout; of stdout and stderr together if they were not kept apart."""
    stderr: bytes = b""
    """The end of stderr, if it was kept apart."""
    is_cut: bool = False
    """Whether `output` has not all of it."""

    @property
    def tail(self) -> str:
        """The last 400 characters of the output."""
        return _text_tail(self.output)

    @property
    def stderr_tail(self) -> str:
        """The last 400 characters of stderr."""
        return _text_tail(self.stderr)


async def run_command(
    command: str,
    environment: Mapping[str, str],
    *,
    stdin: bytes = b"",
    log_file: Path | None = None,
    separate_stderr: bool = False,
) -> CommandResult:
    """Runs a command in a shell until it ends; stdout goes to `log_file`, and stderr too, unless it is kept
    apart.

    No process of its process group remains, however this ends: when the command has ended, its background
    processes are killed, and if the caller is cancelled, the command is terminated first.
    """
    with (
        tempfile.TemporaryFile() as source,
        _open_log(log_file) as log,
        _open_log(None) if separate_stderr else nullcontext(log) as errors,
    ):
        source.write(stdin)
        source.seek(0)
        process = await asyncio.create_subprocess_shell(
            command, stdin=source, stdout=log, stderr=errors, env=dict(environment), start_new_session=True
        )
        try:
            exit_code = await process.wait()
        except asyncio.CancelledError:
            await finish_despite_cancel(_terminate(process))
            raise
        finally:
            _signal_group(process.pid, signal.SIGKILL)
        output, is_cut = _read_end(log)
        stderr = _read_end(errors)[0] if separate_stderr else b""
        return CommandResult(exit_code, output, stderr, is_cut)


def _read_end(file: IO[bytes]) -> tuple[bytes, bool]:
    """Returns the end of a file, and whether there is more before it."""
    if not file.seekable():
        return b"", False
    start = max(0, file.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES)
    file.seek(start)
    return file.read(_MAX_OUTPUT_BYTES), start > 0


def _text_tail(output: bytes) -> str:
    # A character has at most four bytes.
    return output.rstrip()[-4 * _TAIL_CHARS :].decode(errors="replace").strip()[-_TAIL_CHARS:]


def _open_log(log_file: Path | None) -> IO[bytes]:
    if log_file is None:
        return tempfile.TemporaryFile()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    return log_file.open("w+b")


async def _terminate(process: asyncio.subprocess.Process) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _TERMINATE_S)
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Sends a signal to all processes of the command; its process group has the id of its shell."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
