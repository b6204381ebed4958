"""Our gateway beside rllm-model-gateway: CPU of the gateway's process for each request.

Both get the same bodies over the same kind of connection and the same replies from the engine. Theirs relays
an HTTP engine and stores what passed; ours encodes, finds the path, parses, commits and journals.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.codec.talks import AGENT, CACHE, TOOLS, Mix, Writer
from benchmarks.gateway.processes import Served, served
from benchmarks.gateway.replies import REPLY_TOKENS, STREAMED, MockOptions, plain_reply
from benchmarks.gateway.scratch import scratch
from benchmarks.gateway.wire import Answer, Connection
from benchmarks.measure import Report, ms
from branchline import Message
from branchline.chat.generic.codec import GenericCodec
from branchline.core.reader import read_messages, write_message

_REQUEST_BYTES = 23_000
_MIX = Mix("beside", observed=400, system=900)
_TURNS = 5
"""Replies in the history of a measured request."""
_REQUESTS, _ROUNDS, _IN_FLIGHT = 40, 2, 4
_TARGET = 0.25
PYTHON_VARIABLE = "RLLM_PYTHON"
"""Names a Python that has rllm-model-gateway, where this one has not."""


@dataclass
class Side:
    """One server, and the CPU seconds of a request by kind, the best of all rounds."""

    name: str
    store: str
    server: Served
    is_ours: bool
    rival: str = ""
    """The name of the side it is compared with."""
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    name: str
    stream: bool = False
    is_first: bool = False
    """The whole conversation is new to its session: all of it must be encoded."""


_KINDS = (
    Kind("whole reply"),
    Kind("streamed, a token an event", stream=True),
    Kind("first call of a session", is_first=True),
)


def table() -> Report:
    report = Report(
        f"CPU of the gateway for each request of {_REQUEST_BYTES / 1000:.0f} KB with a reply of "
        f"{REPLY_TOKENS} tokens",
        ["request", "gateway", "engine", "store", "CPU ms", "rllm ms", "share", "target"],
        [
            f"process_time of the server's process, the best of {_ROUNDS} rounds of {_REQUESTS} requests, "
            f"{_IN_FLIGHT} in flight; the sides take turns.",
            f"A request is turn {_TURNS + 1} of a conversation (before it, off the clock, the {_TURNS} turns "
            "of its history); tokens by Qwen3.",
            "rllm-model-gateway 0.1.0, logs off; its engine is an HTTP mock that answers as vLLM does, ids "
            "and logprobs included.",
            "In-process: our engine gives the same ids in this process. vLLM: our vLLM engine asks the same "
            "HTTP mock, which streams.",
            "A first call is encoded whole by ours; theirs never encodes, so there is no target.",
        ],
    )
    python = _rival_python()
    if python is None:
        report.notes = [
            *report.notes,
            "rllm-model-gateway is not installed here, so nothing stands beside ours: pip install "
            f"rllm-model-gateway, or name a Python that has it in {PYTHON_VARIABLE}.",
        ]
    sides = asyncio.run(_measure(python))
    by_name = {side.name + side.store: side for side in sides}
    for kind in _KINDS:
        for side in sides:
            if kind.name not in side.cpu_s:
                continue
            gateway, _, engine = side.name.partition(", ")
            cells: tuple[str, ...] = ("", "", "")
            rival = by_name.get(side.rival)
            if rival is not None and kind.name in rival.cpu_s and not kind.is_first:
                share = side.cpu_s[kind.name] / rival.cpu_s[kind.name]
                cells = (
                    ms(rival.cpu_s[kind.name]),
                    f"{share:.2f}",
                    report.target(f"≤ {_TARGET}", share <= _TARGET),
                )
            report.row(kind.name, gateway, engine, side.store, ms(side.cpu_s[kind.name]), *cells)
    return report


def _rival_python() -> str | None:
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (sys.executable if find_spec("rllm_model_gateway") is not None else None)


async def _measure(python: str | None) -> list[Side]:
    codec = GenericCodec.open(CACHE / "qwen3")
    reply = plain_reply(codec)
    # The message that the gateway makes of it comes back in every history.
    said = write_message(codec.parse(reply))
    texts = [codec.decode(reply[place : place + 1]) for place in range(len(reply))]
    texts[-1] = ""
    prompt_ids = _prompt_ids(codec, _conversation(Writer(_MIX, 1), said)[-1])
    mock_options = MockOptions(reply.tolist(), texts, prompt_ids)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch())))
        mock = await stack.enter_async_context(served("mock", msgspec.to_builtins(mock_options)))
        sides: list[Side] = []
        if python is not None:
            for store in ("sqlite", "memory"):
                options = {"engine_url": mock.url, "store": store, "db_path": str(folder / "theirs.db")}
                server = await stack.enter_async_context(served("theirs", options, python))
                sides.append(Side("rllm, HTTP", store, server, is_ours=False))
        for name, engine, journal in (
            ("ours, in-process", "plain", True),
            ("ours, in-process", "plain", False),
            ("ours, vLLM", "vllm", True),
        ):
            file = str(folder / f"ours-{engine}") if journal else None
            ours = {"engine": engine, "journal": file, "engine_url": mock.url}
            server = await stack.enter_async_context(served("ours", ours))
            rival = "rllm, HTTP" + ("sqlite" if journal else "memory")
            sides.append(Side(name, "journal" if journal else "memory", server, is_ours=True, rival=rival))
        for round_ in range(_ROUNDS):
            for kind in _KINDS:
                for side in sides:
                    if kind.is_first and not side.is_ours:
                        continue
                    seed = 1_000_000 * (round_ + 1) + 10_000 * _KINDS.index(kind)
                    spent = await _round(side, kind, said, seed)
                    side.cpu_s[kind.name] = min(spent, side.cpu_s.get(kind.name, float("inf")))
        return sides


def _conversation(writer: Writer, said: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages of each request of a session; the last request has the size that is asked for."""
    messages = [write_message(writer.system()), write_message(writer.user())]
    requests = [messages]
    for _ in range(_TURNS):
        messages = [*messages, said, write_message(writer.user())]
        requests.append(messages)
    missing = _REQUEST_BYTES - len(_body(messages, stream=False))
    last = messages[-1]["content"]
    filled = last + Writer(AGENT, missing).user(missing).text[:missing] if missing > 0 else last[:missing]
    requests[-1] = [*messages[:-1], {"role": "user", "content": filled}]
    return requests


def _body(messages: Sequence[dict[str, Any]], *, stream: bool) -> bytes:
    return msgspec.json.encode({"model": "mock", "messages": messages, "tools": TOOLS, "stream": stream})


def _prompt_ids(codec: GenericCodec, messages: Sequence[dict[str, Any]]) -> list[int]:
    """As many ids as such a request has."""
    read: Sequence[Message] = read_messages(list(messages))
    count = codec.count(read, TOOLS)
    return [1000 + place % 100_000 for place in range(count)]


async def _round(side: Side, kind: Kind, said: dict[str, Any], seed: int) -> float:
    """CPU seconds for each request of one round."""
    sessions = [f"{STREAMED if kind.stream else 'whole-'}{seed + place}" for place in range(_REQUESTS)]
    talks = [_conversation(Writer(_MIX, seed + place), said) for place in range(_REQUESTS)]
    keys: dict[str, str] = {}

    async def ready(connection: Connection, place: int) -> None:
        name = sessions[place]
        options = {"id": name} if side.is_ours else {"session_id": name}
        opened = await connection.post("/sessions", options, side.server.key)
        keys[name] = opened.json().get("api_key", "")
        if side.is_ours and not kind.is_first:
            for messages in talks[place][:-1]:
                _check(await connection.post(_path(name), _body(messages, stream=kind.stream), keys[name]))

    bodies = [_body(talk[-1], stream=kind.stream) for talk in talks]

    async def measured(connection: Connection, place: int) -> None:
        name = sessions[place]
        _check(await connection.post(_path(name), bodies[place], keys[name]))

    await _each(side.server.url, ready)
    before = await side.server.cpu_s()
    await _each(side.server.url, measured)
    spent = await side.server.cpu_s() - before
    if not side.is_ours:
        await _check_trace(side, sessions[0])
    return spent / _REQUESTS


def _path(session: str) -> str:
    return f"/sessions/{session}/v1/chat/completions"


def _check(answer: Answer) -> None:
    if answer.status != 200 or (answer.body[:5] == b"data:") != (answer.body[-8:] == b"[DONE]\n\n"):
        raise RuntimeError(f"status {answer.status}: {answer.body[-300:]!r}")


async def _check_trace(side: Side, session: str) -> None:
    """They did store what they were there to store."""
    async with Connection(side.server.url) as connection:
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
