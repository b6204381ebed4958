"""The journal: commits per second at both levels of durability, and replay of a session."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import BenchmarkTable, best_cpu_s, percentile, wall_s
from benchmarks.workloads import Workload, long_conversation, run_workload
from branchline import Generation, Journal, Request, Session
from branchline.tree.journal import Durability
from branchline.tree.tree import encode_record

_SINGLE_APPENDER_COMMITS: dict[Durability, int] = {"process": 4000, "disk": 300}
_APPENDERS, _COMMITS_PER_APPENDER = 64, 64


def write_table() -> BenchmarkTable:
    record = _realistic_record()
    report = BenchmarkTable(
        f"Journal: commits of 650 tokens ({len(record):,} bytes), each awaited",
        ["level", "appenders", "commits/s", "CPU µs a commit", "commits a transaction", "p50 wait ms"],
    )
    levels: tuple[Durability, ...] = ("process", "disk")
    with tempfile.TemporaryDirectory(dir=_scratch_dir()) as folder:
        syncs = _fsyncs_per_s(Path(folder) / "plain")
        report.notes = [
            f"A plain file on this disk takes {syncs:,.0f} appends of this size a second, each with fsync.",
            "commits/s is wall-clock time of one run: it depends on the disk and its other users.",
        ]
        for level in levels:
            for appenders in (1, _APPENDERS):
                each = _SINGLE_APPENDER_COMMITS[level] if appenders == 1 else _COMMITS_PER_APPENDER
                path = Path(folder) / f"{level}-{appenders}"
                with Journal(path, durability=level) as journal:
                    waits_ms: list[float] = []
                    wall, cpu = wall_s(partial(_append, journal, record, appenders, each, waits_ms))
                    commits = appenders * each
                    report.add_row(
                        level,
                        appenders,
                        f"{commits / wall:,.0f}",
                        f"{cpu / commits * 1e6:.0f}",
                        f"{commits / journal.commit_count:.1f}",
                        f"{percentile(waits_ms, 0.5):.2f}",
                    )
    return report


def replay_table() -> BenchmarkTable:
    report = BenchmarkTable(
        "Replay: Session.reopen",
        ["workload", "commits", "tokens", "CPU ms", "commits/s", "tokens/s"],
    )
    workload = long_conversation(200)
    with tempfile.TemporaryDirectory(dir=_scratch_dir()) as folder:
        path = Path(folder) / "replay"
        with Journal(path) as journal:
            session = _write_workload(workload, journal)
        with Journal(path) as journal:
            spent = best_cpu_s(lambda: Session.reopen(workload.name, workload.codec, journal))[0]
            again = Session.reopen(workload.name, workload.codec, journal)
            assert again.tree.token_count == session.tree.token_count
    commits, tokens = len(session.tree.calls), session.tree.token_count
    report.add_row(
        workload.name,
        commits,
        f"{tokens:,}",
        f"{spent * 1e3:.1f}",
        f"{commits / spent:,.0f}",
        f"{tokens / spent:,.0f}",
    )
    return report


def _write_workload(workload: Workload, journal: Journal) -> Session:
    session = run_workload(workload, Session(workload.name, workload.codec, journal=journal))
    journal.flush()
    return session


def _realistic_record() -> bytes:
    """Returns the encoded delta of a turn: a tool result and a reply with logprobs."""
    workload = long_conversation(20)
    *earlier, last = workload.steps
    session = Session("record", workload.codec)
    for step in earlier:
        turn = session.prepare(Request(step.messages))
        session.commit(turn, Generation(step.ids, step.logprobs, message=step.output))
    turn = session.prepare(Request(last.messages))
    return encode_record(session.tree.plan(turn, [Generation(last.ids, last.logprobs, message=last.output)]))


def _append(journal: Journal, record: bytes, appenders: int, each: int, waits_ms: list[float]) -> None:
    def run(name: str) -> None:
        for _ in range(each):
            start = time.perf_counter()
            journal.append(name, record).result()
            waits_ms.append((time.perf_counter() - start) * 1e3)

    threads = [threading.Thread(target=run, args=(f"session-{index}",)) for index in range(appenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _fsyncs_per_s(path: Path, count: int = 200) -> float:
    data = _realistic_record()

    def run() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
                os.fsync(file.fileno())

    return count / wall_s(run)[0]


def _scratch_dir() -> Path:
    """Returns a folder on a disk: /tmp is often in memory, where fsync costs nothing."""
    folder = Path(".cache")
    folder.mkdir(exist_ok=True)
    return folder
