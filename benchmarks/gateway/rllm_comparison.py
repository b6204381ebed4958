"""Our gateway beside rllm-model-gateway: CPU of the gateway's process for each request.

Both get the same bodies over the same kind of connection and the same replies from the engine. Theirs relays
an HTTP engine and stores what passed; ours encodes, finds the path, parses, commits and journals. Ours is
measured in front of the same HTTP engine, and in front of one in its own process, which costs nothing. A
relay that only copies bytes says what no gateway can be below.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import msgspec

from benchmarks.codec.conversations import AGENT, CACHE, TOOLS, ConversationMix, MessageWriter
from benchmarks.gateway.http_client import Connection, HttpAnswer
from benchmarks.gateway.mock_engine import REPLY_TOKENS, STREAMED, MockOptions, plain_reply
from benchmarks.gateway.scratch import scratch
from benchmarks.gateway.server_process import ServerProcess, server_process
from benchmarks.measure import BenchmarkTable, format_ms
from branchline import Message
from branchline.chat.generic.codec import GenericCodec
from branchline.core.reader import read_messages, write_message
from branchline.engines.http import STREAM_INTERVAL

_REQUEST_BYTES = 23_000
_MIX = ConversationMix("beside", result_tokens=400, system_tokens=900)
_TURNS = 5
"""Replies in the history of a measured request."""
_REQUESTS, _ROUNDS, _IN_FLIGHT = 40, 4, 4
_TARGET = 0.25
PYTHON_VARIABLE = "RLLM_PYTHON"
"""Names another Python that has rllm-model-gateway, uvloop and httptools."""
_RLLM_DEFAULT_PYTHON = CACHE.parent / "rllm" / "bin" / "python"
"""Where `make bench-gateway` installs it, in an environment of its own."""


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    name: str
    stream: bool = False
    is_first: bool = False
    """The whole conversation is new to its session: all of it must be encoded."""


_BUFFERED = Kind("whole reply")
_STREAMED = Kind("streamed, at once", stream=True)
_PACED = Kind("streamed, a token a ms", stream=True)
_FIRST = Kind("first call of a session", is_first=True)
_KINDS = (_BUFFERED, _STREAMED, _PACED, _FIRST)
_PACE_S = 0.001


@dataclass(frozen=True)
class Setup:
    """What stands in front of which engine."""

    gateway: Literal["rllm", "ours", "relay"]
    engine: str
    """As the table calls it: one of the mocks, or in this process."""
    store: str
    kinds: tuple[Kind, ...]
    fast: bool = False
    """Of theirs: on uvloop and httptools, which its own requirements do not install."""


_HTTP, _OLD, _HERE = "HTTP", "HTTP, vLLM < 0.27", "in-process"
_SETUPS = (
    Setup("rllm", _HTTP, "sqlite", (_BUFFERED, _STREAMED, _PACED)),
    Setup("rllm", _HTTP, "sqlite", (_BUFFERED, _STREAMED, _PACED), fast=True),
    Setup("rllm", _HTTP, "memory", (_BUFFERED, _STREAMED)),
    Setup("relay", _HTTP, "", (_BUFFERED, _STREAMED, _PACED)),
    Setup("ours", _HTTP, "journal", _KINDS),
    Setup("ours", _HTTP, "memory", (_BUFFERED, _STREAMED)),
    Setup("ours", _OLD, "journal", (_BUFFERED,)),
    Setup("ours", _HERE, "journal", (_BUFFERED, _STREAMED, _FIRST)),
    Setup("ours", _HERE, "memory", (_BUFFERED, _STREAMED, _FIRST)),
)


@dataclass
class RunningSetup:
    """A setup at work, and what a request of each kind came to, the best of all rounds."""

    setup: Setup
    servers: dict[Kind, ServerProcess]
    cpu_s: dict[Kind, float] = field(default_factory=dict)
    events: dict[Kind, list[int]] = field(default_factory=dict)
    """Of each stream, as its client got it."""

    @property
    def is_branchline(self) -> bool:
        return self.setup.gateway == "ours"


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"CPU of the gateway for each request of {_REQUEST_BYTES / 1000:.0f} KB with a reply of "
        f"{REPLY_TOKENS} tokens",
        ["request", "gateway", "engine", "store", "events", "CPU ms", "share", "target", "of its best"],
        [
            f"process_time of the gateway's process, the best of {_ROUNDS} rounds of {_REQUESTS} requests, "
            f"{_IN_FLIGHT} in flight; the sides take turns.",
            f"A request is turn {_TURNS + 1} of a conversation (before it, off the clock, the {_TURNS} turns "
            "of its history); tokens by Qwen3.",
            "HTTP: a mock that answers as vLLM does, ids and logprobs included, in another process. "
            "In-process: a mock in the gateway's own, which costs nothing.",
            "Compared: rllm-model-gateway 0.1.0 with sqlite and ours with a journal, both without a store; "
            "theirs always in front of HTTP.",
            "Whole reply: theirs asks the engine for a whole one. Ours asks for a stream, so that little is "
            f"lost when weights change: {STREAM_INTERVAL} tokens an",
            "event, or one where vLLM is older than 0.27. Streamed: both ask for a token an event. At once: "
            "as fast as the mock can; ours",
            "says in one event what arrived together (events: what a client got). A token a ms: nothing "
            "arrives together,",
            "so each token is received, read, written and sent by itself. Relay: copies bytes and reads "
            "nothing; nobody can cost less.",
            "rllm-model-gateway runs on asyncio and h11, as its requirements install it. rllm, uvloop: on "
            "uvloop and httptools, which ours and the relay",
            "have; its best: of that one.",
            "A first call is encoded whole by ours; theirs never encodes, so there is no target.",
        ],
    )
    python = _rllm_python()
    if python is None:
        report.notes = [
            *report.notes,
            "rllm-model-gateway is not installed here, so nothing stands beside ours: `make bench-gateway` "
            f"installs it; or name a Python that has it, uvloop and httptools in {PYTHON_VARIABLE}.",
        ]
    sides = asyncio.run(_measure(python))
    theirs = {(side.setup.store, side.setup.fast): side for side in sides if side.setup.gateway == "rllm"}
    for kind in _KINDS:
        for side in sides:
            if kind not in side.cpu_s:
                continue
            setup, told = side.setup, ""
            store = "memory" if setup.store == "memory" else "sqlite"
            shares = [_cpu_ratio(side, theirs.get((store, fast)), kind) for fast in (False, True)]
            if side.is_branchline and shares[0] is not None:
                told = report.target_cell(f"≤ {_TARGET}", shares[0] <= _TARGET)
            share, of_best = ["" if share is None else f"{share:.2f}" for share in shares]
            name = f"{setup.gateway}, uvloop" if setup.fast else setup.gateway
            cpu = format_ms(side.cpu_s[kind])
            events = f"{mean(side.events[kind]):.0f}" if kind.stream else ""
            report.add_row(kind.name, name, setup.engine, setup.store, events, cpu, share, told, of_best)
    return report


def _cpu_ratio(side: RunningSetup, rival: RunningSetup | None, kind: Kind) -> float | None:
    """What a side costs of what theirs does."""
    if rival is None or side.setup.gateway == "rllm" or kind not in rival.cpu_s:
        return None
    return side.cpu_s[kind] / rival.cpu_s[kind]


def _rllm_python() -> str | None:
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (str(_RLLM_DEFAULT_PYTHON) if _RLLM_DEFAULT_PYTHON.exists() else None)


async def _measure(python: str | None) -> list[RunningSetup]:
    codec = GenericCodec.open(CACHE / "qwen3")
    reply = plain_reply(codec)
    # The message that the gateway makes of it comes back in every history.
    said = write_message(codec.parse(reply))
    texts = [codec.decode(reply[place : place + 1]) for place in range(len(reply))]
    texts[-1] = ""
    prompt_ids = _prompt_ids(codec, _conversation(MessageWriter(_MIX, 1), said)[-1])
    mock_options = MockOptions(reply.tolist(), texts, prompt_ids)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch())))
        urls: dict[tuple[str, bool], str] = {}
        for engine, is_paced in ((_HTTP, False), (_HTTP, True), (_OLD, False)):
            options = msgspec.structs.replace(
                mock_options, is_old=engine == _OLD, pause_s=_PACE_S if is_paced else 0.0
            )
            mock = await stack.enter_async_context(server_process("mock", msgspec.to_builtins(options)))
            urls[engine, is_paced] = mock.url
        sides: list[RunningSetup] = []
        for setup in _SETUPS:
            if setup.gateway == "rllm" and python is None:
                continue
            servers: dict[bool, ServerProcess] = {}
            for is_paced in {kind is _PACED for kind in setup.kinds}:
                url = urls.get((setup.engine, is_paced), "")
                file = str(folder / f"{len(sides)}-{is_paced}")
                servers[is_paced] = await stack.enter_async_context(_server(setup, url, file, python))
            sides.append(RunningSetup(setup, {kind: servers[kind is _PACED] for kind in setup.kinds}))
        for round_ in range(_ROUNDS):
            for kind in _KINDS:
                for side in sides:
                    if kind in side.servers:
                        seed = 1_000_000 * (round_ + 1) + 10_000 * _KINDS.index(kind)
                        spent = await _round(side, kind, said, seed)
                        side.cpu_s[kind] = min(spent, side.cpu_s.get(kind, float("inf")))
        return sides


def _server(
    setup: Setup, url: str, file: str, python: str | None
) -> AbstractAsyncContextManager[ServerProcess]:
    if setup.gateway == "rllm":
        assert python is not None
        options = {"engine_url": url, "store": setup.store, "db_path": file, "fast": setup.fast}
        return server_process("theirs", options, python)
    if setup.gateway == "relay":
        return server_process("relay", {"engine_url": url})
    engine = "plain" if setup.engine == _HERE else "vllm"
    journal = file if setup.store == "journal" else None
    return server_process("ours", {"engine": engine, "journal": journal, "engine_url": url})


def _conversation(writer: MessageWriter, said: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages of each request of a session; the last request has the size that is asked for."""
    messages = [write_message(writer.system()), write_message(writer.user())]
    requests = [messages]
    for _ in range(_TURNS):
        messages = [*messages, said, write_message(writer.user())]
        requests.append(messages)
    missing = _REQUEST_BYTES - len(_body(messages, stream=False))
    last = messages[-1]["content"]
    filled = (
        last + MessageWriter(AGENT, missing).user(missing).content[:missing]
        if missing > 0
        else last[:missing]
    )
    requests[-1] = [*messages[:-1], {"role": "user", "content": filled}]
    return requests


def _body(messages: Sequence[dict[str, Any]], *, stream: bool) -> bytes:
    return msgspec.json.encode({"model": "mock", "messages": messages, "tools": TOOLS, "stream": stream})


def _prompt_ids(codec: GenericCodec, messages: Sequence[dict[str, Any]]) -> list[int]:
    """As many ids as such a request has."""
    read: Sequence[Message] = read_messages(list(messages))
    count = codec.count_tokens(read, TOOLS)
    return [1000 + place % 100_000 for place in range(count)]


async def _round(side: RunningSetup, kind: Kind, said: dict[str, Any], seed: int) -> float:
    """CPU seconds for each request of one round."""
    server = side.servers[kind]
    sessions = [f"{STREAMED if kind.stream else 'whole-'}{seed + place}" for place in range(_REQUESTS)]
    talks = [_conversation(MessageWriter(_MIX, seed + place), said) for place in range(_REQUESTS)]
    keys: dict[str, str] = {}

    async def ready(connection: Connection, place: int) -> None:
        name = sessions[place]
        if side.setup.gateway == "relay":
            return
        options = {"id": name} if side.is_branchline else {"session_id": name}
        opened = await connection.post("/sessions", options, server.key)
        keys[name] = opened.json().get("api_key", "")
        if side.is_branchline and not kind.is_first:
            for messages in talks[place][:-1]:
                _check(await connection.post(_path(name), _body(messages, stream=False), keys[name]))

    bodies = [_body(talk[-1], stream=kind.stream) for talk in talks]

    async def measured(connection: Connection, place: int) -> None:
        name = sessions[place]
        is_relay = side.setup.gateway == "relay"
        path = "/v1/chat/completions" if is_relay else _path(name)
        answer = await connection.post(path, bodies[place], keys.get(name, ""))
        _check(answer)
        side.events.setdefault(kind, []).append(answer.body.count(b"\n\n"))

    await _each(server.url, ready)
    before = await server.cpu_s()
    await _each(server.url, measured)
    spent = await server.cpu_s() - before
    if side.setup.gateway == "rllm":
        await _check_trace(server, sessions[0])
    return spent / _REQUESTS


def _path(session: str) -> str:
    return f"/sessions/{session}/v1/chat/completions"


def _check(answer: HttpAnswer) -> None:
    if answer.status != 200 or (answer.body[:5] == b"data:") != (answer.body[-8:] == b"[DONE]\n\n"):
        raise RuntimeError(f"status {answer.status}: {answer.body[-300:]!r}")


async def _check_trace(server: ServerProcess, session: str) -> None:
    """They did store what they were there to store."""
    async with Connection(server.url) as connection:
        (trace,) = (await connection.get(f"/sessions/{session}/traces")).json()
        found = len(trace["completion_token_ids"]), len(trace["logprobs"])
        assert found == (REPLY_TOKENS, REPLY_TOKENS), f"rllm stored {found} ids and logprobs"


async def _each(url: str, run: Callable[[Connection, int], Any]) -> None:
    """Every place once, so many at a time."""
    places = iter(range(_REQUESTS))

    async def work() -> None:
        async with Connection(url) as connection:
            for place in places:
                await run(connection, place)

    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
