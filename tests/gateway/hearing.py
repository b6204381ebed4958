"""A vLLM server that says a token when a test tells it to, and clients that read what becomes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.chat.toy import STOP
from branchline.engines.base import Chunk, Tokens
from branchline.engines.vllm import VllmEngine
from branchline.gateway import answers, telling
from branchline.gateway.answers import Choice, Said
from branchline.gateway.listening import Direct
from tests.engines.fake import FakeVllm
from tests.gateway.protocols.every import events_in, request
from tests.gateway.running import Agent, agent

Words = tuple[list[int], str | None] | None
"""Ids, and how the answer ends with them if it does; None: the stream just ends."""


class Mouth(FakeVllm):
    """Says what it is told to, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[asyncio.Queue[Words]] = []

    def say(self, ids: Iterable[int], finish: str | None = None, *, of: int = -1) -> None:
        """One event of a request."""
        self.requests[of].put_nowait((list(ids), finish))

    def end(self) -> None:
        """The stream of the last request ends, and not well."""
        self.requests[-1].put_nowait(None)

    async def tokens(
        self, prompt: list[int], limit: int, stop_ids: list[int], interval: int | None = None
    ) -> AsyncGenerator[tuple[list[int], list[float], str | None], None]:
        told: asyncio.Queue[Words] = asyncio.Queue()
        self.requests.append(told)
        place = len(prompt)
        while (words := await told.get()) is not None:
            ids, finish = words
            yield ids, [logprob_at(place + index) for index in range(len(ids))], finish
            place += len(ids)
            if finish is not None:
                return


def logprob_at(place: int) -> float:
    """Of the id at this place of prompt and output."""
    return -(place + 1) / 8


@dataclass
class Heard:
    """What went which way."""

    direct: list[bytes] = field(default_factory=list)
    """What was written by whoever received it."""
    heard: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.heard) + len(self.taken)


def watch(monkeypatch: pytest.MonkeyPatch, *, by_task: bool = False) -> Heard:
    """Notes each token's way, on a clock by which no two come close; or leaves it only the task's."""
    noted = Heard()
    write, hear, take = Direct.write, Choice.hear, Choice.take
    ticks = itertools.count(1.0)

    def noted_write(self: Direct, data: bytes) -> None:
        noted.direct.append(data)
        write(self, data)

    def noted_hear(self: Choice, tokens: Tokens) -> Said:
        noted.heard += tokens.ids
        return hear(self, tokens)

    def noted_take(self: Choice, chunk: Chunk) -> Said:
        noted.taken += chunk.ids.tolist()
        return take(self, chunk)

    monkeypatch.setattr(Direct, "write", noted_write)
    monkeypatch.setattr(Choice, "hear", noted_hear)
    monkeypatch.setattr(Choice, "take", noted_take)
    monkeypatch.setattr(telling, "monotonic", lambda: next(ticks))
    # Two runs of one conversation are to be the same to the last letter.
    numbers = itertools.count(1)
    monkeypatch.setattr(answers, "new_call_id", lambda: f"call_{next(numbers)}")
    if by_task:
        monkeypatch.setattr(Direct, "behind", lambda send: None)
    return noted


@asynccontextmanager
async def speaking(**options: Any) -> AsyncIterator[tuple[Agent, Mouth]]:
    """A gateway in front of a mouth, and a client of it."""
    codec = options.pop("codec", None) or ToyCodec.chatml()
    async with (
        Mouth() as mouth,
        agent(fleet=VllmEngine(mouth.url, name="mouth"), codec=codec, **options) as a,
    ):
        yield a, mouth


def engine_of(a: Agent) -> VllmEngine:
    engine = a.gateway.app.fleet.route("", "").engine
    assert isinstance(engine, VllmEngine)
    return engine


def connection_of(a: Agent) -> Any:
    """The gateway's side of the only connection that there is."""
    assert a.gateway._server is not None
    (connection,) = a.gateway._server.server_state.connections
    return connection


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


class Client:
    """Reads a streamed answer piece by piece."""

    def __init__(self, a: Agent, mouth: Mouth, pieces: AsyncIterator[str]) -> None:
        self.agent, self.mouth = a, mouth
        self._pieces = pieces
        self.text = ""

    async def piece(self) -> str:
        """What arrives next, all at once."""
        piece = await anext(self._pieces)
        self.text += piece
        return piece

    async def rest(self) -> str:
        """The whole stream, read to its end."""
        async for piece in self._pieces:
            self.text += piece
        return self.text

    async def hear(self, text: str) -> list[str]:
        """Has each byte said once the one before it has arrived; what arrived each time."""
        pieces = []
        for token in text.encode():
            self.mouth.say([token])
            pieces.append(await self.piece())
        return pieces

    @property
    def events(self) -> list[dict[str, Any]]:
        return events_in(self.text)


@asynccontextmanager
async def streaming(
    a: Agent, mouth: Mouth, protocol: str = "chat/completions", headers: Any = None, **body: Any
) -> AsyncIterator[Client]:
    """A streamed answer that is being asked for; leaving early is hanging up."""
    asked = request(a, protocol, "q", stream=True, **body)
    asked.headers.update(headers or {})
    before = len(mouth.requests)
    sending = asyncio.ensure_future(a.http.send(asked, stream=True))
    await until(lambda: len(mouth.requests) >= before + body.get("n", 1))
    try:
        yield Client(a, mouth, _text_of(sending))
    finally:
        if sending.done():
            await sending.result().aclose()
        else:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _text_of(sending: asyncio.Future[Any]) -> AsyncIterator[str]:
    response = await sending
    assert response.status_code == 200, await response.aread()
    async for piece in response.aiter_text():
        yield piece


def said_in(protocol: str, events: list[dict[str, Any]]) -> str:
    """The text that the events of a protocol add up to."""
    return "".join(_said(protocol, event) for event in events)


def _said(protocol: str, event: dict[str, Any]) -> str:
    if protocol == "chat/completions":
        return str(event["choices"][0]["delta"].get("content") or "") if "choices" in event else ""
    if protocol == "completions":
        return str(event["choices"][0]["text"]) if "choices" in event else ""
    if protocol == "responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


def recorded(a: Agent) -> list[Any]:
    """What the tree holds of each answer."""
    told: list[Any] = []
    tree = a.session.live.session.tree
    for node in tree.nodes:
        if node.output is not None:
            assert node.sampled_ids is not None
            assert node.output.logprobs is not None
            said = node.message
            calls = [(call.name, call.arguments) for call in said.calls]
            told.append(
                (
                    node.sampled_ids.tolist(),
                    node.output.logprobs.tolist(),
                    [tuple(run) for run in node.output.versions],
                    (said.text, said.reasoning, calls),
                    node.output.finish,
                )
            )
    return told


_TIMES = frozenset({"created", "created_at", "completed_at"})


def timeless(told: Any) -> Any:
    """The same without what no two answers have in common."""
    if isinstance(told, dict):
        return {name: timeless(value) for name, value in told.items() if name not in _TIMES}
    if isinstance(told, list):
        return [timeless(one) for one in told]
    return told


def body_of(chunks: bytes) -> tuple[bytes, bytes]:
    """A chunked body, and what stands behind it; fails where a chunk is none."""
    body = b""
    while True:
        size, found, rest = chunks.partition(b"\r\n")
        assert found, chunks[:80]
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n", rest[:80]
        body, chunks = body + rest[:length], rest[length + 2 :]
        if not length:
            return body, chunks


def json_events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


END = [STOP]
"""The last id of an answer that stops."""
