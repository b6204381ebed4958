"""CPU time per request of Branchline's gateway and of rllm-model-gateway.

Both get the same bodies over the same kind of connection and the same replies from the engine. rllm forwards
to an HTTP engine and stores what it forwarded; Branchline encodes, matches, parses, commits and journals.
Branchline is measured with the same HTTP engine, and with one in its own process that costs nothing. A proxy
that only copies bytes gives the lower bound.
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
"""A Python that has rllm-model-gateway, uvloop and httptools."""
_RLLM_DEFAULT_PYTHON = CACHE.parent / "rllm" / "bin" / "python"
"""The environment in which `make bench-gateway` installs it."""


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    name: str
    stream: bool = False
    is_first: bool = False
    """The conversation is new to its session, so all of it must be encoded."""


_BUFFERED = Kind("whole reply")
_STREAMED = Kind("streamed, at once", stream=True)
_PACED = Kind("streamed, a token per ms", stream=True)
_FIRST = Kind("first call of a session", is_first=True)
_KINDS = (_BUFFERED, _STREAMED, _PACED, _FIRST)
_PACE_S = 0.001


@dataclass(frozen=True)
class Setup:
    """A gateway and the engine that it uses."""

    gateway: Literal["rllm", "branchline", "proxy"]
    engine: str
    """The engine's name in the table: one of the HTTP mocks, or in-process."""
    store: str
    kinds: tuple[Kind, ...]
    fast: bool = False
    """rllm on uvloop and httptools, which its own requirements do not install."""


_HTTP, _OLD, _IN_PROCESS = "HTTP", "HTTP, vLLM < 0.27", "in-process"
_SETUPS = (
    Setup("rllm", _HTTP, "sqlite", (_BUFFERED, _STREAMED, _PACED)),
    Setup("rllm", _HTTP, "sqlite", (_BUFFERED, _STREAMED, _PACED), fast=True),
    Setup("rllm", _HTTP, "memory", (_BUFFERED, _STREAMED)),
    Setup("proxy", _HTTP, "", (_BUFFERED, _STREAMED, _PACED)),
    Setup("branchline", _HTTP, "journal", _KINDS),
    Setup("branchline", _HTTP, "memory", (_BUFFERED, _STREAMED)),
    Setup("branchline", _OLD, "journal", (_BUFFERED,)),
    Setup("branchline", _IN_PROCESS, "journal", (_BUFFERED, _STREAMED, _FIRST)),
    Setup("branchline", _IN_PROCESS, "memory", (_BUFFERED, _STREAMED, _FIRST)),
)


@dataclass
class RunningSetup:
    """A running setup, and its cost per request of each kind, the best of all rounds."""

    setup: Setup
    servers: dict[Kind, ServerProcess]
    cpu_s: dict[Kind, float] = field(default_factory=dict)
    events: dict[Kind, list[int]] = field(default_factory=dict)
    """The number of events of each stream, as its client received it."""

    @property
    def is_branchline(self) -> bool:
        return self.setup.gateway == "branchline"


def table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"CPU of the gateway for each request of {_REQUEST_BYTES / 1000:.0f} KB with a reply of "
        f"{REPLY_TOKENS} tokens",
        ["request", "gateway", "engine", "store", "events", "CPU ms", "share", "target", "of its best"],
        [
            f"process_time of the gateway's process, the best of {_ROUNDS} rounds of {_REQUESTS} requests, "
            f"{_IN_FLIGHT} in flight; the setups alternate.",
            f"A request is turn {_TURNS + 1} of a conversation (after {_TURNS} turns "
            "that are not measured); tokens by Qwen3.",
            "HTTP: a mock that answers as vLLM does, ids and logprobs included, in another process. "
            "In-process: a mock in the gateway's own, which costs nothing.",
            "Compared: rllm-model-gateway 0.1.0 with sqlite and Branchline with a journal, both also without "
            "a store; rllm always with the HTTP engine.",
            "Whole reply: rllm requests a whole reply. Branchline requests a stream, so that little is lost "
            f"when weights change: {STREAM_INTERVAL} tokens per",
            "event, or one with vLLM before 0.27. Streamed: both request one token per event. At once: as "
            "fast as the mock can.",
            "A token per ms: each event of the engine arrives alone. Branchline coalesces tokens that arrive "
            "within `stream_flush_s`",
            "into one event (events: received by a client). Proxy: copies bytes only, the lower bound.",
            "rllm-model-gateway runs on asyncio and h11, as its requirements install it. rllm, uvloop: on "
            "uvloop and httptools, as Branchline and the",
            "proxy; of its best: relative to that.",
            "A first call is encoded completely by Branchline; rllm never encodes, so there is no target.",
        ],
    )
    python = _rllm_python()
    if python is None:
        report.notes = [
            *report.notes,
            "rllm-model-gateway is not installed, so nothing is compared: `make bench-gateway` installs it; "
            f"or set {PYTHON_VARIABLE} to a Python that has it, uvloop and httptools.",
        ]
    sides = asyncio.run(_measure(python))
    rllm = {(side.setup.store, side.setup.fast): side for side in sides if side.setup.gateway == "rllm"}
    for kind in _KINDS:
        for side in sides:
            if kind not in side.cpu_s:
                continue
            setup, target = side.setup, ""
            store = "memory" if setup.store == "memory" else "sqlite"
            shares = [_cpu_ratio(side, rllm.get((store, fast)), kind) for fast in (False, True)]
            if side.is_branchline and shares[0] is not None:
                target = report.target_cell(f"≤ {_TARGET}", shares[0] <= _TARGET)
            share, of_best = ["" if share is None else f"{share:.2f}" for share in shares]
            name = f"{setup.gateway}, uvloop" if setup.fast else setup.gateway
            cpu = format_ms(side.cpu_s[kind])
            events = f"{mean(side.events[kind]):.0f}" if kind.stream else ""
            report.add_row(kind.name, name, setup.engine, setup.store, events, cpu, share, target, of_best)
    return report


def _cpu_ratio(side: RunningSetup, other: RunningSetup | None, kind: Kind) -> float | None:
    """The CPU time of a setup relative to that of rllm; None if they are not compared."""
    if other is None or side.setup.gateway == "rllm" or kind not in other.cpu_s:
        return None
    return side.cpu_s[kind] / other.cpu_s[kind]


def _rllm_python() -> str | None:
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (str(_RLLM_DEFAULT_PYTHON) if _RLLM_DEFAULT_PYTHON.exists() else None)


async def _measure(python: str | None) -> list[RunningSetup]:
    codec = GenericCodec.open(CACHE / "qwen3")
    reply = plain_reply(codec)
    # Every history contains the message that the gateway parses from the reply.
    assistant = write_message(codec.parse(reply))
    texts = [codec.decode(reply[index : index + 1]) for index in range(len(reply))]
    texts[-1] = ""
    prompt_ids = _prompt_ids(codec, _conversation(MessageWriter(_MIX, 1), assistant)[-1])
    mock_options = MockOptions(reply.tolist(), texts, prompt_ids)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch())))
        urls: dict[tuple[str, bool], str] = {}
        for engine, is_paced in ((_HTTP, False), (_HTTP, True), (_OLD, False)):
            options = msgspec.structs.replace(
                mock_options, is_old=engine == _OLD, pause_s=_PACE_S if is_paced else 0.0
            )
            mock = await stack.enter_async_context(server_process("mock_vllm", msgspec.to_builtins(options)))
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
                        spent = await _round(side, kind, assistant, seed)
                        side.cpu_s[kind] = min(spent, side.cpu_s.get(kind, float("inf")))
        return sides


def _server(
    setup: Setup, url: str, file: str, python: str | None
) -> AbstractAsyncContextManager[ServerProcess]:
    if setup.gateway == "rllm":
        assert python is not None
        options = {"engine_url": url, "store": setup.store, "db_path": file, "fast": setup.fast}
        return server_process("rllm_server", options, python)
    if setup.gateway == "proxy":
        return server_process("byte_proxy", {"engine_url": url})
    engine = "plain" if setup.engine == _IN_PROCESS else "vllm"
    journal = file if setup.store == "journal" else None
    return server_process("branchline_server", {"engine": engine, "journal": journal, "engine_url": url})


def _conversation(writer: MessageWriter, assistant: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages of each request of a session; the last request has _REQUEST_BYTES bytes."""
    messages = [write_message(writer.system()), write_message(writer.user())]
    requests = [messages]
    for _ in range(_TURNS):
        messages = [*messages, assistant, write_message(writer.user())]
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
    """Arbitrary ids, as many as the request's prompt has."""
    read: Sequence[Message] = read_messages(list(messages))
    count = codec.count_tokens(read, TOOLS)
    return [1000 + index % 100_000 for index in range(count)]


async def _round(side: RunningSetup, kind: Kind, assistant: dict[str, Any], seed: int) -> float:
    """CPU seconds per request of one round."""
    server = side.servers[kind]
    sessions = [f"{STREAMED if kind.stream else 'whole-'}{seed + index}" for index in range(_REQUESTS)]
    conversations = [
        _conversation(MessageWriter(_MIX, seed + index), assistant) for index in range(_REQUESTS)
    ]
    keys: dict[str, str] = {}

    async def prepare(connection: Connection, index: int) -> None:
        name = sessions[index]
        if side.setup.gateway == "proxy":
            return
        options = {"id": name} if side.is_branchline else {"session_id": name}
        opened = await connection.post("/sessions", options, server.key)
        keys[name] = opened.json().get("api_key", "")
        if side.is_branchline and not kind.is_first:
            for messages in conversations[index][:-1]:
                _check(await connection.post(_path(name), _body(messages, stream=False), keys[name]))

    bodies = [_body(requests[-1], stream=kind.stream) for requests in conversations]

    async def measure(connection: Connection, index: int) -> None:
        name = sessions[index]
        is_proxy = side.setup.gateway == "proxy"
        path = "/v1/chat/completions" if is_proxy else _path(name)
        answer = await connection.post(path, bodies[index], keys.get(name, ""))
        _check(answer)
        side.events.setdefault(kind, []).append(answer.body.count(b"\n\n"))

    await _for_each_request(server.url, prepare)
    before = await server.cpu_s()
    await _for_each_request(server.url, measure)
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
    """Checks that rllm stored ids and logprobs."""
    async with Connection(server.url) as connection:
        (trace,) = (await connection.get(f"/sessions/{session}/traces")).json()
        found = len(trace["completion_token_ids"]), len(trace["logprobs"])
        assert found == (REPLY_TOKENS, REPLY_TOKENS), f"rllm stored {found} ids and logprobs"


async def _for_each_request(url: str, run: Callable[[Connection, int], Any]) -> None:
    """Runs a function for the index of every request, _IN_FLIGHT at a time."""
    indexes = iter(range(_REQUESTS))

    async def work() -> None:
        async with Connection(url) as connection:
            for index in indexes:
                await run(connection, index)

    await asyncio.gather(*(work() for _ in range(_IN_FLIGHT)))
