"""Many concurrent sessions on the scripted engine: no request fails, and no token is lost.

Sampled tokens are counted three times: as reported in responses, in the gateway's trees, and in the journal
after a replay in another process.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gateway.http_client import Connection, HttpAnswer
from benchmarks.gateway.scratch import scratch
from benchmarks.gateway.server_process import ServerProcess, server_process
from benchmarks.measure import BenchmarkTable, percentile
from branchline.chat.toy import ToyCodec
from branchline.runtime.session_store import SessionStore
from branchline.tree.journal import Journal

_MODEL = "scripted"


@dataclass
class Outcome:
    """The results of all clients."""

    reported_tokens: int = 0
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """The size of the load."""

    sessions: int = 1000
    turns: int = 20
    in_flight: int = 64


def table(load: Load) -> BenchmarkTable:
    report = BenchmarkTable(
        f"{load.sessions:,} sessions × {load.turns} turns, {load.in_flight} in flight, scripted engine",
        ["what", "found", "target"],
        [
            "Every second session streams. The journal's durability is `process`; the engine runs in the",
            "gateway's process, and its cost is included. Memory: resident, minus that of the empty gateway,",
            "with all sessions open.",
        ],
    )
    outcome, found = asyncio.run(_run(load))
    requests, errors = load.sessions * load.turns, sum(outcome.errors.values())
    report.add_row(
        "requests answered",
        f"{outcome.requests:,}",
        report.target_cell(f"{requests:,}", outcome.requests == requests),
    )
    report.add_row("errors", errors, report.target_cell("0", errors == 0))
    for message, count in outcome.errors.most_common(3):
        report.add_row(f"    {message}", count, "")
    reported = outcome.reported_tokens
    report.add_row("sampled tokens reported", f"{reported:,}", "")
    for source in ("trees", "journal"):
        sampled = found[source]["sampled"]
        report.add_row(
            f"sampled tokens in {source}", f"{sampled:,}", report.target_cell("lost: 0", sampled == reported)
        )
    report.add_row("requests/s", f"{outcome.requests / found['wall_s']:,.0f}", "")
    report.add_row("gateway CPU ms per request", f"{found['cpu_s'] / max(1, outcome.requests) * 1e3:.2f}", "")
    for share in (0.5, 0.99):
        report.add_row(f"latency p{share * 100:.0f} ms", f"{percentile(outcome.took_s, share) * 1e3:.1f}", "")
    per_session = found["bytes"] / load.sessions
    report.add_row("tokens per session", f"{found['trees']['tokens'] / load.sessions:,.0f}", "")
    report.add_row("memory per session, KB", f"{per_session / 1e3:,.1f}", "")
    report.add_row("memory per stored token, bytes", f"{found['bytes'] / found['trees']['tokens']:,.1f}", "")
    return report


async def _run(load: Load) -> tuple[Outcome, dict[str, Any]]:
    outcome = Outcome()
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        path = Path(folder) / "load"
        async with server_process(
            "branchline_server", {"engine": "scripted", "journal": str(path)}
        ) as server:
            empty = (await server.command("memory"))["bytes"]
            cpu_s, start = await server.cpu_s(), time.perf_counter()
            await _clients(server, load, outcome)
            wall_s = time.perf_counter() - start
            cpu_s = await server.cpu_s() - cpu_s
            trees = await server.command("counts")
            used = (await server.command("memory"))["bytes"] - empty
        with Journal(path) as journal:
            sessions = SessionStore(ToyCodec.chatml(), journal=journal)
            replayed = {"sampled": sum(managed.sampled_tokens for managed in sessions)}
    return outcome, {"trees": trees, "journal": replayed, "bytes": used, "wall_s": wall_s, "cpu_s": cpu_s}


async def _clients(server: ServerProcess, load: Load, outcome: Outcome) -> None:
    numbers = iter(range(load.sessions))

    async def work() -> None:
        async with Connection(server.url) as connection:
            for number in numbers:
                await _session(server, connection, number, load.turns, outcome)

    await asyncio.gather(*(work() for _ in range(load.in_flight)))


async def _session(
    server: ServerProcess, connection: Connection, number: int, turns: int, outcome: Outcome
) -> None:
    opened = (await connection.post("/sessions", {"group": "load"}, server.key)).json()
    path, key = f"/sessions/{opened['id']}/v1/chat/completions", opened["api_key"]
    stream = number % 2 == 1
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer in one line."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"session {number}, turn {turn}: what follows from it?"})
        body = {
            "model": _MODEL,
            "messages": messages,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        answer = await connection.post(path, msgspec.json.encode(body), key)
        if answer.status != 200:
            outcome.errors[f"status {answer.status}: {answer.body[:60]!r}"] += 1
            return
        message, sampled = _read_stream(answer) if stream else _read_whole(answer)
        outcome.took_s.append(answer.took_s)
        outcome.requests += 1
        outcome.reported_tokens += sampled
        messages.append(message)


def _read_whole(answer: HttpAnswer) -> tuple[dict[str, Any], int]:
    body = answer.json()
    return body["choices"][0]["message"], body["usage"]["completion_tokens"]


def _read_stream(answer: HttpAnswer) -> tuple[dict[str, Any], int]:
    events = answer.events()
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return {"role": "assistant", "content": text}, events[-1]["usage"]["completion_tokens"]
