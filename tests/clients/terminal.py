"""A client in a terminal of its own: what it shows is taken and forgotten, and it is ended with the block."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.clients.programs import kill_group

_SIZE = (40, 120)


@asynccontextmanager
async def terminal(
    program: Path, arguments: Sequence[str], env: Mapping[str, str], workspace: Path
) -> AsyncIterator[None]:
    """Runs a program in a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        cwd=workspace,
        env={**env, "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    loop = asyncio.get_running_loop()
    # An unread terminal would fill its buffer and block the program.
    loop.add_reader(master, _read_output, master)
    try:
        yield
    finally:
        kill_group(process.pid)
        await process.wait()
        loop.remove_reader(master)
        os.close(master)


def _read_output(master: int) -> None:
    with suppress(OSError):
        os.read(master, 1 << 16)
