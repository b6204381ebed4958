"""Clients whose connections misbehave: half requests, resets, answers that are not read, garbage.

In the process of a test, or in one of its own, in which COUNT connections misbehave at a time until a line
arrives on its standard input; it prints what it did as one JSON line:

    python -m tests.faults.misbehaving URL SESSION_URL KEY TIMEOUT_S COUNT KIND …
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.faults.attacker import chat_body

KINDS = (
    "half_head",
    "half_body",
    "slow_head",
    "closed_at_time_out",
    "reset_in_stream",
    "reset_before_answer",
    "never_reads",
    "garbage",
    "silent",
)
_RESET = struct.pack("ii", 1, 0)
"""Linger for no time: a close resets the connection."""
_PATIENCE_S = 30.0
"""How long a client waits for the server to act; more than any time-out under test."""


@dataclass
class MisbehavingClients:
    """Opens connections that misbehave, one session's model calls among them."""

    url: str
    session_url: str
    key: str
    timeout_s: float
    """The time-outs of the server."""
    counts: Counter[str] = field(default_factory=Counter)
    """Connections by kind."""
    statuses: Counter[str] = field(default_factory=Counter)
    """What the server answered those that waited for an answer, by kind."""

    async def misbehave(self, kind: str) -> None:
        """Opens one connection of a kind, and closes it at its end."""
        self.counts[kind] += 1
        with suppress(OSError):
            await getattr(self, "_" + kind)()

    async def forever(self, kinds: list[str]) -> None:
        """Misbehaves again and again."""
        while True:
            await self.misbehave(random.choice(kinds))

    # -- the kinds -----------------------------------------------------------------------------------

    async def _half_head(self) -> None:
        await self._answer_to("half_head", random.choice([b"G", b"GET / HT", b"GET / HTTP/1.1\r\nx: y\r\n"]))

    async def _half_body(self) -> None:
        await self._answer_to("half_body", self._call(stream=False)[:-5])

    async def _silent(self) -> None:
        await self._answer_to("silent", b"")

    async def _garbage(self) -> None:
        sent = random.randbytes(random.randint(1, 2000))
        await self._answer_to("garbage", random.choice([sent, b"GET / HTTP/1.1\r\n" + sent]))

    async def _slow_head(self) -> None:
        """A byte at a time, for longer than the time-out."""
        with await self._connect(b"GET / HTTP/1.1\r\nx: ") as client:
            loop = asyncio.get_running_loop()
            for _ in range(int(4 * self.timeout_s / 0.1) + 10):
                await loop.sock_sendall(client, b"y")
                await asyncio.sleep(0.1)

    async def _closed_at_time_out(self) -> None:
        """Half a request, closed or reset while its time-out is handled: within the second of the check."""
        half = random.choice([b"GET / HTTP/1.1\r\nx: y\r\n", self._call(stream=False)[:-5]])
        with await self._connect(half) as client:
            await asyncio.sleep(self.timeout_s + random.uniform(-0.1, 1.2))
            _close(client, is_reset=random.random() < 0.5)

    async def _reset_in_stream(self) -> None:
        with await self._connect(self._call(stream=True)) as client:
            await asyncio.get_running_loop().sock_recv(client, random.choice([1, 200, 600]))
            _close(client, is_reset=True)

    async def _reset_before_answer(self) -> None:
        with await self._connect(self._call(stream=random.random() < 0.5)) as client:
            if random.random() < 0.5:
                await asyncio.sleep(random.random() * 0.01)
            _close(client, is_reset=random.random() < 0.5)

    async def _never_reads(self) -> None:
        """Asks for more than the kernel keeps, and reads none of it until the server gives up."""
        request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
        with await self._connect(200 * request, receive_bytes=4096) as client:
            outcome = "closed"
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    while True:  # until a send fails, because the server has closed the connection
                        await asyncio.sleep(0.2)
                        await asyncio.get_running_loop().sock_sendall(client, request)
            except TimeoutError:
                outcome = "nothing"
            except OSError:
                pass
            self.statuses[f"never_reads {outcome}"] += 1

    # -- connections ---------------------------------------------------------------------------------

    def _call(self, *, stream: bool) -> bytes:
        body = json.loads(chat_body(f"{random.random()} please"))
        data = json.dumps({**body, "stream": stream}).encode()
        path = urlsplit(self.session_url).path
        head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def _answer_to(self, kind: str, sent: bytes) -> None:
        """Waits until the server answers what was sent, or closes the connection."""
        with await self._connect(sent) as client:
            received = b""
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    received = await asyncio.get_running_loop().sock_recv(client, 100)
                status = received[9:12].decode("latin-1") or "closed"
            except TimeoutError:
                status = "nothing"
            self.statuses[f"{kind} {status}"] += 1

    async def _connect(self, sent: bytes, receive_bytes: int | None = None) -> socket.socket:
        address, loop = urlsplit(self.url), asyncio.get_running_loop()
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        try:
            await loop.sock_connect(client, (address.hostname, address.port))
            await loop.sock_sendall(client, sent)
        except BaseException:
            client.close()
            raise
        return client


def _close(client: socket.socket, *, is_reset: bool) -> None:
    if is_reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    client.close()


async def main(url: str, session_url: str, key: str, timeout_s: str, count: str, *kinds: str) -> None:
    clients = MisbehavingClients(url, session_url, key, float(timeout_s))
    running = [asyncio.create_task(clients.forever(list(kinds))) for _ in range(int(count))]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    print(json.dumps({"counts": clients.counts, "statuses": clients.statuses}), flush=True)


if __name__ == "__main__":
    os.nice(10)  # it stands for another machine, and shall not take the gateway's processor
    asyncio.run(main(*sys.argv[1:]))
