"""Turn 200 of a long conversation, over HTTP: the time that the gateway adds to the engine's.

An agent runs a conversation turn by turn and echoes each reply as received. The turns around the two
hundredth are measured at the client, from the first byte sent to the last byte received.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.codec.conversations import AGENT, TOOLS, ConversationMix, MessageWriter
from benchmarks.gateway.http_client import Connection
from benchmarks.gateway.phase_timer import ENGINE, NESTED_PARTS, PARTS, with_remainders
from benchmarks.gateway.scratch import scratch
from benchmarks.gateway.server_process import ServerProcess, server_process
from benchmarks.measure import BenchmarkTable, format_ms, percentile
from branchline.chat.base import HistoryPolicy
from branchline.core.reader import write_message
from branchline.tree.journal import Durability

_TURN, _AROUND = 200, 20
"""The middle of the measured turns, and how many before and after it."""
_MIX = ConversationMix(
    "turns", reply_tokens=AGENT.reply_tokens, result_tokens=380, system_tokens=AGENT.system_tokens
)
_OTHERS, _OTHER_TURNS, _OTHERS_IN_FLIGHT = 200, 4, 8
_TARGET_MS: dict[HistoryPolicy, int] = {"verbatim": 4, "template": 20}
_GOAL_MS = 12
_FLAT = 1.25
_FIRST_TURNS = 3
_CLIENT_PART = "the client, loopback"


@dataclass
class Client:
    """An agent in a session."""

    connection: Connection
    path: str
    key: str
    writer: MessageWriter
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    sampled: int = 0

    @classmethod
    async def open(cls, server: ServerProcess, connection: Connection, writer: MessageWriter) -> Client:
        session = (await connection.post("/sessions", b"{}", server.key)).json()
        return cls(connection, f"/sessions/{session['id']}/v1/chat/completions", session["api_key"], writer)

    async def next_turn(self) -> float:
        """Sends a new message; returns the seconds until the reply was received."""
        if not self.messages:
            self.messages.append(write_message(self.writer.system()))
            self.messages.append(write_message(self.writer.user()))
        elif calls := self.messages[-1].get("tool_calls"):
            result = self.writer.user().content
            self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
        else:
            self.messages.append(write_message(self.writer.user()))
        return await self.ask()

    async def ask(self) -> float:
        body = msgspec.json.encode({"model": "mock", "messages": self.messages, "tools": TOOLS})
        answer = await self.connection.post(self.path, body, self.key)
        if answer.status != 200:
            raise RuntimeError(f"{self.path}: status {answer.status}: {answer.body[:300]!r}")
        response = answer.json()
        self.messages.append(response["choices"][0]["message"])
        self.prompt_tokens = response["usage"]["prompt_tokens"]
        self.sampled = response["usage"]["completion_tokens"]
        return answer.took_s


@dataclass(frozen=True)
class Measured:
    """The turns around the two hundredth of one conversation."""

    tokens: int
    new_tokens: float
    body_bytes: int
    added_s: Sequence[float]
    cpu_s: float
    parts: dict[str, float]

    @property
    def p50_s(self) -> float:
        return median(self.added_s)


@dataclass
class Case:
    """A gateway's settings and what was measured under them."""

    history: HistoryPolicy
    durability: Durability
    alone: Measured | None = None
    after_others: Measured | None = None
    first: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.history}, {self.durability}"


def tables() -> list[BenchmarkTable]:
    cases = [
        Case(history, durability)
        for durability in ("process", "disk")
        for history in ("verbatim", "template")
    ]
    asyncio.run(_measure_all(cases))
    return [_turns(cases), _parts(cases), _first_turn_table(cases)]


def _turns(cases: Iterable[Case]) -> BenchmarkTable:
    report = BenchmarkTable(
        f"Turn {_TURN} of a conversation: milliseconds that the gateway adds",
        ["history, journal", "earlier", "tokens", "body KB", "new", "p50 ms", "p95 ms", "CPU ms", "target",
         "goal", "flat"],
        [
            f"Turns {_TURN - _AROUND} to {_TURN + _AROUND}, one after the other, measured at a client in "
            "another process:",
            "from the first byte sent to the last byte received, minus the time inside the mock engine.",
            "New: tokens that were not in the last prompt, including the echoed reply. CPU: of the gateway.",
            f"Earlier: other sessions with {_OTHER_TURNS} turns each, served before and still open.",
        ],
    )  # fmt: skip
    for case in cases:
        for earlier, measured in ((0, case.alone), (_OTHERS, case.after_others)):
            if measured is None:
                continue
            p50_ms, target = measured.p50_s * 1e3, _TARGET_MS[case.history]
            flat = ""
            if earlier and case.alone is not None:
                ratio = measured.p50_s / case.alone.p50_s
                flat = report.target_cell(f"{ratio:.2f}× ≤ {_FLAT}×", ratio <= _FLAT)
            report.add_row(
                case.name,
                earlier,
                f"{measured.tokens:,}",
                f"{measured.body_bytes / 1e3:.0f}",
                f"{measured.new_tokens:.0f}",
                f"{p50_ms:.2f}",
                f"{percentile(measured.added_s, 0.95) * 1e3:.2f}",
                format_ms(measured.cpu_s),
                report.target_cell(f"≤ {target}", p50_ms <= target),
                f"{'✓' if p50_ms <= _GOAL_MS else '✗'} ≤ {_GOAL_MS}" if case.history == "template" else "",
                flat,
            )
    return report


def _parts(cases: Sequence[Case]) -> BenchmarkTable:
    report = BenchmarkTable(
        f"Phases of turn {_TURN}, milliseconds of wall time",
        ["part", *(case.name for case in cases)],
        [
            "Medians of each phase; one call at a time, so the phases are sequential.",
            "Journal: from the commit until the record is written, including the thread switches.",
            f"{_CLIENT_PART}: time at the client outside the gateway's first and last byte.",
        ],
    )
    measured = [case.alone for case in cases if case.alone is not None]
    for part in (*PARTS, _CLIENT_PART):
        report.add_row(part, *(format_ms(one.parts.get(part, 0.0)) for one in measured))
        if part == "prepare":
            for inner in NESTED_PARTS:
                report.add_row(
                    f"    of it: {inner}", *(format_ms(one.parts.get(inner, 0.0)) for one in measured)
                )
    return report


def _first_turn_table(cases: Iterable[Case]) -> BenchmarkTable:
    report = BenchmarkTable(
        "The first turn of a session: all of it is encoded",
        ["history, journal", *_FIRST_NAMES],
        [f"Milliseconds at the client, the median of {_FIRST_TURNS}, each in its own session."],
    )
    for case in cases:
        if case.first:
            report.add_row(case.name, *(f"{format_ms(case.first[name])} ms" for name in _FIRST_NAMES))
    return report


_FIRST_NAMES = ("system prompt and question", "131k tokens, nothing cached", "131k tokens, segments cached")


async def _measure_all(cases: Iterable[Case]) -> None:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        for case in cases:
            options = {
                "engine": "agent",
                "history": case.history,
                "journal": str(Path(folder) / f"{case.history}-{case.durability}"),
                "durability": case.durability,
                "time_phases": True,
            }
            async with server_process("branchline_server", options) as server:
                case.alone = await _conversation(server, seed=1)
                if case.durability == "process":
                    await _run_other_sessions(server)
                    case.after_others = await _conversation(server, seed=2)
                    case.first = await _first_turns(server)


async def _conversation(server: ServerProcess, seed: int) -> Measured:
    # The server closes idle connections, so each conversation opens a new one.
    async with Connection(server.url) as connection:
        return await _measure(server, await Client.open(server, connection, MessageWriter(_MIX, seed)))


async def _measure(server: ServerProcess, client: Client) -> Measured:
    for _ in range(1, _TURN - _AROUND):
        await client.next_turn()
    await server.command("phases")
    cpu_s = await server.cpu_s()
    took_s: list[float] = []
    new_tokens: list[int] = []
    tokens = body_bytes = 0
    for turn in range(_TURN - _AROUND, _TURN + _AROUND + 1):
        before = client.prompt_tokens
        took_s.append(await client.next_turn())
        new_tokens.append(client.prompt_tokens - before)
        if turn == _TURN:
            tokens, body_bytes = client.prompt_tokens, len(msgspec.json.encode(client.messages))
    cpu_s = (await server.cpu_s() - cpu_s) / len(took_s)
    calls = [with_remainders(spent) for spent in (await server.command("phases"))["calls"]]
    assert len(calls) == len(took_s), f"{len(calls)} calls were timed, expected {len(took_s)}"
    for spent, took in zip(calls, took_s, strict=True):
        spent[_CLIENT_PART] = took - sum(spent.get(part, 0.0) for part in PARTS)
    names = {name for spent in calls for name in spent}
    return Measured(
        tokens,
        median(new_tokens),
        body_bytes,
        [took - spent[ENGINE] for spent, took in zip(calls, took_s, strict=True)],
        cpu_s,
        {name: median(spent.get(name, 0.0) for spent in calls) for name in names},
    )


async def _run_other_sessions(server: ServerProcess) -> None:
    seeds = iter(range(1000, 1000 + _OTHERS))

    async def run() -> None:
        async with Connection(server.url) as connection:
            for seed in seeds:
                client = await Client.open(server, connection, MessageWriter(_MIX, seed))
                for _ in range(_OTHER_TURNS):
                    await client.next_turn()

    await asyncio.gather(*(run() for _ in range(_OTHERS_IN_FLIGHT)))


async def _first_turns(server: ServerProcess) -> dict[str, float]:
    names = _FIRST_NAMES
    spent: dict[str, list[float]] = {name: [] for name in names}
    async with Connection(server.url) as connection:
        for seed in range(_FIRST_TURNS):
            short = await Client.open(server, connection, MessageWriter(_MIX, 5000 + seed))
            spent[names[0]].append(await short.next_turn())
            # As many messages as turn 200 has; the last one is not a reply.
            messages = list(islice(MessageWriter(_MIX, 6000 + seed).messages(), 2 * _TURN))
            for name in names[1:]:
                long = await Client.open(server, connection, short.writer)
                long.messages = [write_message(message) for message in messages]
                spent[name].append(await long.ask())
    return {name: median(values) for name, values in spent.items()}
