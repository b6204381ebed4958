"""Records the responses of a real vLLM to VllmEngine, byte for byte, for tests without a vLLM.

    python scripts/with_vllm.py .cache/vllm python scripts/record_vllm.py

The engine connects through a proxy that records the bytes of both directions. Each exchange is two files in
tests/engines/recorded/vllm-VERSION: NAME.request (the JSON that was sent) and NAME.reply (status line,
headers and body, without the date).
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from branchline.chat.base import NewMessage
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import EngineError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import BUFFERED_FLUSH_S, SamplingParams
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
    "length": SamplingParams(max_tokens=4, temperature=0.0, stop_ids=(2,)),
    "buffered": SamplingParams(max_tokens=40, seed=1, stop_ids=(2,), flush_s=BUFFERED_FLUSH_S),
    "seeded": SamplingParams(max_tokens=8, top_p=0.9, top_k=50, seed=5, stop_ids=(2,)),
    "grammar": SamplingParams(max_tokens=32, temperature=0.0, stop_ids=(2,), grammar=GRAMMAR),
    "bad_request": SamplingParams(max_tokens=4, temperature=-1.0),
}

EngineCall = Callable[[VllmEngine], Awaitable[object]]


@dataclass
class RecordedExchange:
    """The bytes of one exchange."""

    url: str
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


@asynccontextmanager
async def recording_proxy(server: str) -> AsyncIterator[RecordedExchange]:
    """Forwards the bytes between one engine and a server, and records them."""
    target = urlsplit(server)
    tasks: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(65536):
                record += piece
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(target.hostname, target.port)
        tasks.add(asyncio.create_task(forward(reader, to_server, exchange.sent)))
        tasks.add(asyncio.create_task(forward(from_server, writer, exchange.received)))

    listener = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    exchange = RecordedExchange(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield exchange
    finally:
        listener.close()
        await asyncio.gather(*tasks)


async def record_exchange(server: str, folder: Path, name: str, call: EngineCall, model: str = "") -> None:
    """Records one exchange, over its own connection."""
    async with recording_proxy(server) as exchange:
        engine = VllmEngine(exchange.url, model=model)
        outcome = "completed"
        try:
            await call(engine)
        except EngineError as error:
            outcome = str(error).replace(urlsplit(exchange.url).netloc, "SERVER")
        finally:
            await engine.close()
    body = exchange.sent.partition(b"\r\n\r\n")[2] or b"null"
    reply = re.sub(rb"(?m)^date: .*\r\n", b"", exchange.received, count=1)
    (folder / f"{name}.request").write_bytes(body + b"\n")
    (folder / f"{name}.reply").write_bytes(reply)
    print(f"{name}: {len(reply)} bytes, {outcome[:100]}", flush=True)


def generate_call(prompt: Ids, params: SamplingParams) -> EngineCall:
    async def call(engine: VllmEngine) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    return call


def aborted_call(prompt: Ids, server: str) -> EngineCall:
    """A generation that another client aborts at the server after it has begun."""

    async def call(engine: VllmEngine) -> None:
        other_client = VllmEngine(server)
        try:
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=400, temperature=0.0)):
                await other_client.client.post_control(PAUSE_PATH)
        finally:
            await other_client.client.post_control("/resume")
            await other_client.close()

    return call


async def record_all(dev: str, plain: str, model: Path) -> None:
    question = NewMessage(Message("user", "What is the capital of France?"))
    extension = GenericCodec.open(model).extend((), [question])
    message_ids = [token for message in extension.message_tokens for token in message.ids]
    prompt = as_ids([*message_ids, *extension.generation_prompt_ids])
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
    new_version = {"new_version": "5"}
    await record_exchange(
        dev,
        folder,
        "weight_version",
        lambda engine: engine.client.post_control("/update_weight_version", new_version),
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
