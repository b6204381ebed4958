"""Time of `prepare` deep in a conversation, without encoding."""

from __future__ import annotations

import time

import msgspec

from benchmarks.measure import BenchmarkTable, percentile
from benchmarks.workloads import OBSERVED_TOKENS, Step, Workload, commit_step, long_conversation
from branchline import Message, Request, Session
from branchline.chat.base import HistoryPolicy
from branchline.core.reader import read_messages

_TURNS, _SAMPLES = 200, 200
_TARGET_MS = 1.0


def table() -> BenchmarkTable:
    workload = long_conversation(_TURNS)
    last = workload.steps[-1]
    report = BenchmarkTable(
        f"prepare at turn {_TURNS}: {len(last.prompt_ids):,} prompt tokens, {OBSERVED_TOKENS} of them new",
        ["history", "reading", "CPU p50 ms", "p95 ms", "wall p50 ms", "target (p50)"],
        [f"Of {_SAMPLES} requests, each with {len(last.messages)} new message objects."],
    )
    histories: tuple[HistoryPolicy, ...] = ("verbatim", "template")
    for history in histories:
        session = _session(workload, history)
        for reads in (False, True):
            cpu_ms, wall_ms = _times_ms(session, last, reads)
            p50 = percentile(cpu_ms, 0.5)
            is_met = p50 <= _TARGET_MS
            report.add_row(
                history,
                "included" if reads else "before",
                f"{p50:.3f}",
                f"{percentile(cpu_ms, 0.95):.3f}",
                f"{percentile(wall_ms, 0.5):.3f}",
                "" if reads else report.target_cell(f"≤ {_TARGET_MS:.0f} ms", is_met),
            )
    return report


def _session(workload: Workload, history: HistoryPolicy) -> Session:
    """Returns a session with all turns except the last."""
    session = Session("prepare", workload.codec, history=history)
    for step in workload.steps[:-1]:
        commit_step(session, step)
    return session


def _times_ms(session: Session, step: Step, reads: bool) -> tuple[list[float], list[float]]:
    cpu_ms: list[float] = []
    wall_ms: list[float] = []
    encoded = msgspec.json.encode(step.raw_messages)
    for _ in range(_SAMPLES):
        raw = msgspec.json.decode(encoded)
        messages: tuple[Message, ...] = () if reads else read_messages(raw)
        cpu, wall = time.process_time(), time.perf_counter()
        turn = session.prepare(Request(read_messages(raw) if reads else messages))
        cpu_ms.append((time.process_time() - cpu) * 1e3)
        wall_ms.append((time.perf_counter() - wall) * 1e3)
        assert len(turn.prompt_ids) == len(step.prompt_ids)
    return cpu_ms, wall_ms
