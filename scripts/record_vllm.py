"""Records what a real vLLM answers to our adapter, byte for byte, for tests that have no vLLM.

    python scripts/with_vllm.py .cache/vllm python scripts/record_vllm.py

The adapter speaks to the server through a relay that keeps the bytes of both directions. Each exchange is
two files in tests/engines/recorded/vllm-VERSION: NAME.request (the JSON that was sent) and NAME.reply (status
line, headers and body as they came, less the date).
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import EngineError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import SamplingParams
from branchline.engines.vllm import VllmEngine

RECORDINGS_DIR = Path(__file__).resolve().parent.parent / "tests" / "engines" / "recorded"
PAUSE_PATH = "/pause?mode=abort&clear_cache=true"
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
GENERATIONS = {
    "stop": SamplingParams(max_tokens=16, temperature=0.0, stop_ids=(2,)),
    "stop_id": SamplingParams(max_tokens=16, temperature=0.0, stop_ids=(2, 314)),
    "stop_text": SamplingParams(max_tokens=16, temperature=0.0, stop_ids=(2,), stop=(" France",)),
    "length": SamplingParams(max_tokens=4, temperature=0.0, stop_ids=(2,)),
    "whole": SamplingParams(max_tokens=40, seed=1, stop_ids=(2,), buffered=True),
    "seeded": SamplingParams(max_tokens=8, top_p=0.9, top_k=50, seed=5, stop_ids=(2,)),
    "grammar": SamplingParams(max_tokens=32, temperature=0.0, stop_ids=(2,), grammar=GRAMMAR),
    "bad_request": SamplingParams(max_tokens=4, temperature=-1.0),
}

EngineCall = Callable[[VllmEngine], Awaitable[object]]


@dataclass
class RecordedExchange:
    """The bytes of one exchange."""

    url: str
    sent: bytes = b""
    came: bytes = b""


@asynccontextmanager
async def recording_proxy(server: str) -> AsyncIterator[RecordedExchange]:
    """Listens for one engine and hands its bytes on to a server, and the server's to it."""
    there = urlsplit(server)
    tasks: set[asyncio.Task[None]] = set()

    async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: str) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(65536):
                setattr(tape, side, getattr(tape, side) + piece)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(there.hostname, there.port)
        tasks.add(asyncio.create_task(hand_on(reader, to_server, "sent")))
        tasks.add(asyncio.create_task(hand_on(from_server, writer, "came")))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    tape = RecordedExchange(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield tape
    finally:
        listener.close()
        await asyncio.gather(*tasks)


async def record_exchange(server: str, folder: Path, name: str, ask: EngineCall, model: str = "") -> None:
    """One exchange, over a connection of its own."""
    async with recording_proxy(server) as tape:
        engine = VllmEngine(tape.url, model=model)
        outcome = "answered"
        try:
            await ask(engine)
        except EngineError as error:
            outcome = str(error).replace(urlsplit(tape.url).netloc, "SERVER")
        finally:
            await engine.close()
    body = tape.sent.partition(b"\r\n\r\n")[2] or b"null"
    reply = re.sub(rb"(?m)^date: .*\r\n", b"", tape.came, count=1)
    (folder / f"{name}.request").write_bytes(body + b"\n")
    (folder / f"{name}.reply").write_bytes(reply)
    print(f"{name}: {len(reply)} bytes, {outcome[:100]}", flush=True)


def generate_call(prompt: Ids, params: SamplingParams) -> EngineCall:
    async def ask(engine: VllmEngine) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    return ask


def aborted_call(prompt: Ids, server: str) -> EngineCall:
    """A generation that somebody else ends at the server, after it has begun."""

    async def ask(engine: VllmEngine) -> None:
        stranger = VllmEngine(server)
        try:
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=400, temperature=0.0)):
                await stranger.client.post_control(PAUSE_PATH)
        finally:
            await stranger.client.post_control("/resume")
            await stranger.close()

    return ask


async def record_all(dev: str, plain: str, model: Path) -> None:
    asked = GenericCodec.open(model).extend(
        (), [NewMessage(Message("user", "What is the capital of France?"))]
    )
    prompt = as_ids(
        [*(token for piece in asked.message_tokens for token in piece.ids), *asked.generation_prompt_ids]
    )
    probe = VllmEngine(dev)
    version = (await probe.client.get_json("/version"))["version"]
    await probe.close()
    folder = RECORDINGS_DIR / f"vllm-{version}"
    folder.mkdir(parents=True, exist_ok=True)

    for name, path in (("health", "/health"), ("models", "/v1/models"), ("version", "/version")):
        await record_exchange(dev, folder, name, lambda engine, path=path: engine.client.get_json(path))  # type: ignore[misc]
    for name, params in GENERATIONS.items():
        await record_exchange(dev, folder, name, generate_call(prompt, params), model.name)
    greedy = GENERATIONS["stop"]
    await record_exchange(dev, folder, "too_long", generate_call(as_ids([5] * 600), greedy), model.name)
    await record_exchange(dev, folder, "unknown_model", generate_call(prompt, greedy), "nope")
    await record_exchange(dev, folder, "aborted", aborted_call(prompt, dev), model.name)
    await record_exchange(dev, folder, "pause", lambda engine: engine.client.post_control(PAUSE_PATH))
    await record_exchange(dev, folder, "resume", lambda engine: engine.client.post_control("/resume"))
    told = {"new_version": "5"}
    await record_exchange(
        dev,
        folder,
        "weight_version",
        lambda engine: engine.client.post_control("/update_weight_version", told),
    )
    await record_exchange(
        plain, folder, "pause_absent", lambda engine: engine.client.post_control(PAUSE_PATH)
    )


def main() -> int:
    urls, model = os.environ.get("BRANCHLINE_VLLM_URLS", "").split(), os.environ.get("BRANCHLINE_VLLM_MODEL")
    if len(urls) != 2 or not model:
        print(__doc__, file=sys.stderr)
        return 2
    asyncio.run(record_all(urls[0], urls[1], Path(model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
