"""One hostile tenant in its own process: sends what shall not delay others, until it is killed.

python -m tests.faults.attacker KIND URL KEY CONTROL_URL CONTROL_KEY
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx

MEBIBYTE = 2**20


ATTACKS = (
    "huge_header",
    "silent_connections",
    "slow_bodies",
    "many_tools",
    "allowed_tools",
    "count_tokens",
    "allowed_count_tokens",
    "many_values",
    "allowed_values",
    "many_calls",
    "many_short_calls",
    "read_samples",
    "read_timelines",
)


class Attacker:
    """Everything that a holder of one session's keys, or of none, can send."""

    def __init__(self, url: str, key: str, control_url: str, control_key: str) -> None:
        self.url = url
        self.key = key
        self.control_url = control_url
        self.control_key = control_key
        self.address = urlsplit(url)
        self.results: Counter[str] = Counter()
        self.http = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))

    async def repeat(self, count: int, act: Callable[[], Awaitable[object]]) -> None:
        """Does the same in several tasks, again and again."""
        print("ready", flush=True)  # its bodies are made

        async def forever() -> None:
            while True:
                try:
                    self.results[str(await act())] += 1
                except (OSError, httpx.HTTPError, asyncio.IncompleteReadError) as error:
                    self.results[type(error).__name__] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*[forever() for _ in range(count)])

    async def post(self, endpoint: str, body: bytes) -> int:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        return (await self.http.post(f"{self.url}/{endpoint}", content=body, headers=headers)).status_code

    # -- without a key -------------------------------------------------------------------------------

    async def huge_header(self) -> None:
        async def act() -> str:
            reader, writer = await self._connect(b"GET /healthz HTTP/1.1\r\nx: ")
            try:
                for _ in range(128):
                    writer.write(b"a" * MEBIBYTE)
                    await writer.drain()
                return (await reader.read(12)).decode()
            finally:
                writer.transport.abort()

        await self.repeat(8, act)

    async def silent_connections(self) -> None:
        async def act() -> str:
            reader, writer = await self._connect(
                random.choice([b"", b"POST / HT", b"GET / HTTP/1.1\r\nx: y"])
            )
            try:
                return (await reader.read(12)).decode()
            finally:
                writer.transport.abort()

        await self.repeat(400, act)

    async def slow_bodies(self) -> None:
        async def act() -> str:
            head = (
                f"POST {self.address.path}/chat/completions HTTP/1.1\r\nauthorization: Bearer {self.key}\r\n"
            )
            reader, writer = await self._connect(f"{head}content-length: 60000000\r\n\r\n".encode())
            try:
                for _ in range(1000):
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.05)
                return (await reader.read(12)).decode()
            finally:
                writer.transport.abort()

        await self.repeat(200, act)

    async def _connect(self, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.address.hostname, self.address.port)
        writer.write(sent)
        return reader, writer

    # -- with the key of one session -----------------------------------------------------------------

    async def many_tools(self) -> None:
        body = chat_body("hi", [tool(index) for index in range(200_000)])
        await self.repeat(4, lambda: self.post("chat/completions", body))

    async def allowed_tools(self) -> None:
        async def act() -> int:
            return await self.post("chat/completions", chat_body("hi", [tool(index) for index in range(900)]))

        await self.repeat(8, act)

    async def count_tokens(self) -> None:
        body = chat_body(random_text(8_000_000))
        await self.repeat(8, lambda: self.post("messages/count_tokens", body))

    async def allowed_count_tokens(self) -> None:
        await self.repeat(8, lambda: self.post("messages/count_tokens", chat_body(random_text(1_000_000))))

    async def many_values(self) -> None:
        body = b'{"messages":[{"role":"user","content":[' + b"[]," * 20_000_000 + b"[]]}]}"
        await self.repeat(4, lambda: self.post("chat/completions", body))

    async def allowed_values(self) -> None:
        part = b'{"type":"text","text":"a"},'
        body = b'{"messages":[{"role":"user","content":[' + part * 80_000 + part[:-1] + b"]}]}"
        await self.repeat(4, lambda: self.post("chat/completions", body))

    async def many_calls(self) -> None:
        async def act() -> int:
            return await self.post("chat/completions", chat_body(random_text(40_000)))

        await self.repeat(32, act)

    async def many_short_calls(self) -> None:
        """Each is so short that it would be prepared in the event loop if it were the only one."""

        async def act() -> int:
            return await self.post("chat/completions", chat_body(random_text(9_900)))

        await self.repeat(32, act)

    async def read_samples(self) -> None:
        await self.repeat(8, lambda: self.read("samples"))

    async def read_timelines(self) -> None:
        await self.repeat(8, lambda: self.read("timelines"))

    async def read(self, view: str) -> int:
        headers = {"authorization": f"Bearer {self.control_key}"}
        return (await self.http.get(f"{self.control_url}/{view}", headers=headers)).status_code


def chat_body(text: str, tools: list[dict[str, object]] | None = None) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, **({"tools": tools} if tools else {})}).encode()


def tool(index: int) -> dict[str, object]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    name = f"tool_{index}_{random.randrange(10**6)}"
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


_SPACES = str.maketrans("0f", "  ")


def random_text(length: int) -> str:
    """Words that hardly repeat, so that no cache has them."""
    return random.randbytes(length // 2).hex().translate(_SPACES)


async def main(kind: str, url: str, key: str, control_url: str, control_key: str) -> None:
    attacker = Attacker(url, key, control_url, control_key)
    attack = asyncio.create_task(getattr(attacker, kind)())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps(attacker.results), flush=True)
    attack.cancel()


if __name__ == "__main__":
    os.nice(10)  # it stands for another machine, and shall not take the gateway's processor
    asyncio.run(main(*sys.argv[1:]))
