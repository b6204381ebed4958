"""The journal keeps acknowledged records in order after kills, truncation, full disks and second openers."""

from __future__ import annotations

import asyncio
import linecache
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import xxhash

from branchline.core.errors import JournalError
from branchline.tree import journal as journal_module
from branchline.tree import journal_file
from branchline.tree.journal import Durability, Journal
from branchline.tree.journal_file import DamagedRecord
from branchline.tree.journal_repair import check_journal
from tests.hang import HANG_S

LEVELS: list[Durability] = ["process", "disk"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.journal"


@contextmanager
def write_lock_held(path: Path) -> Iterator[None]:
    """Holds SQLite's write lock from another connection, so that appends stay queued."""
    with closing(sqlite3.connect(path, isolation_level=None)) as outsider:
        outsider.execute("BEGIN IMMEDIATE")
        yield
        outsider.execute("ROLLBACK")


@contextmanager
def child_process(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def encode_index(index: int) -> bytes:
    return b"%d" % index


# -- order and isolation -------------------------------------------------------------------------------


def test_each_session_reads_its_own_records_in_order_of_append(path: Path) -> None:
    with Journal(path) as journal:
        futures = [journal.append(f"s{index % 3}", encode_index(index)) for index in range(30)]
        seqs = [future.result() for future in futures]
        assert seqs == sorted(set(seqs))
        for session in range(3):
            assert list(journal.read(f"s{session}")) == [encode_index(i) for i in range(session, 30, 3)]
        assert list(journal.replay()) == [(f"s{i % 3}", encode_index(i)) for i in range(30)]


def test_any_text_is_a_session_name_and_any_bytes_are_a_record(path: Path) -> None:
    expected = [("", b""), ("a", b"\0"), ("a\0b", bytes(range(256))), ("Zürich/%?#'\"", b"x" * 100_000)]
    with Journal(path) as journal:
        for session, record in expected:
            journal.append(session, record)
        journal.flush()
        assert list(journal.replay()) == expected
        assert [list(journal.read(session)) for session, _ in expected] == [
            [record] for _, record in expected
        ]


def test_an_unknown_session_has_no_records(path: Path) -> None:
    with Journal(path) as journal:
        assert list(journal.read("unknown")) == []
        assert list(journal.replay()) == []


def test_a_reader_sees_the_records_committed_when_it_began(path: Path) -> None:
    with Journal(path) as journal:
        for index in range(3):
            journal.append("s", encode_index(index))
        journal.flush()
        reader = journal.read("s")
        first = next(reader)
        journal.append("s", b"later").result()
        assert [first, *reader] == [b"0", b"1", b"2"]


def test_queued_records_are_not_read_before_they_are_committed(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"committed").result()
        with write_lock_held(path):
            queued = journal.append("s", b"queued")
            assert list(journal.read("s")) == [b"committed"]
            assert not queued.done()
        queued.result()
        assert list(journal.read("s")) == [b"committed", b"queued"]


@pytest.mark.parametrize("durability", LEVELS)
def test_records_and_sequence_numbers_survive_close_and_reopen(path: Path, durability: Durability) -> None:
    with Journal(path, durability=durability) as journal:
        assert (journal.path, journal.durability, journal.failure) == (path, durability, None)
        first = journal.append("a", b"1").result()
        journal.append("b", b"2")  # close commits what is still queued
    with Journal(path, durability=durability) as journal:
        assert journal.append("a", b"3").result() > first + 1
        assert list(journal.replay()) == [("a", b"1"), ("b", b"2"), ("a", b"3")]


# -- inline writes and lazy records --------------------------------------------------------------------


def test_at_level_process_an_append_is_durable_when_it_returns(path: Path) -> None:
    with Journal(path) as journal:
        futures = [journal.append("s", encode_index(index)) for index in range(20)]
        assert [future.done() for future in futures] == [True] * 20
        assert journal.commit_count == 20
        assert list(journal.read("s")) == [encode_index(index) for index in range(20)]


def test_a_large_record_is_written_by_the_thread_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_MAX_INLINE_BYTES", 100)
    records = [bytes([index]) * (1000 if index % 3 == 1 else 10) for index in range(200)]
    with Journal(path) as journal:
        futures = [journal.append("s", record) for record in records]
        assert [future.result() for future in futures] == list(range(1, 201))
        assert list(journal.read("s")) == records


@pytest.mark.parametrize("durability", LEVELS)
def test_a_lazy_record_shares_the_commit_of_the_next_one(path: Path, durability: Durability) -> None:
    with Journal(path, durability=durability) as journal:
        lazy = [journal.append("s", encode_index(index), lazy=True) for index in range(3)]
        assert not any(future.done() for future in lazy)
        assert journal.append("t", b"record").result() == 4
        assert [future.result() for future in lazy] == [1, 2, 3]
        assert journal.commit_count == 1
        assert [record for _, record in journal.replay()] == [
            encode_index(0),
            encode_index(1),
            encode_index(2),
            b"record",
        ]


@pytest.mark.parametrize("durability", LEVELS)
def test_a_lazy_record_without_a_successor_is_written(
    path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_LAZY_FLUSH_S", 0.01)
    with Journal(path, durability=durability) as journal:
        assert journal.append("s", b"lazy", lazy=True).result(timeout=HANG_S) == 1


def test_a_callback_may_append(path: Path) -> None:
    with Journal(path) as journal:
        lazy = journal.append("s", b"lazy", lazy=True)
        lazy.add_done_callback(lambda _: journal.append("s", b"from a callback"))
        journal.append("s", b"record").result()
        assert list(journal.read("s")) == [b"lazy", b"record", b"from a callback"]


@pytest.mark.parametrize("durability", LEVELS)
def test_flush_and_close_write_lazy_records(path: Path, durability: Durability) -> None:
    with Journal(path, durability=durability) as journal:
        flushed = journal.append("s", b"flushed", lazy=True)
        journal.flush()
        assert flushed.done()
        journal.append("s", b"closed", lazy=True)
    with Journal(path) as journal:
        assert list(journal.read("s")) == [b"flushed", b"closed"]


def test_at_level_process_a_reader_finds_earlier_lazy_records(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"lazy", lazy=True)
        assert list(journal.read("s")) == [b"lazy"]


class Interrupt(BaseException):
    """Raised like the exception of a signal handler."""


def interrupted_append(journal: Journal, line: int) -> bool:
    """Appends with a signal at the n-th executed line of the journal's code; False if it has fewer lines."""
    remaining = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal remaining
        if frame.f_code.co_filename != journal_module.__file__:
            return None
        # Between the end of a `with` block and its exit a trace fires, but no signal is handled.
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not code.strip().startswith("with "):
            remaining -= 1
            if remaining == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        journal.append("s", b"interrupted")
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_signal_at_any_line_of_an_append_writes_its_record_at_most_once(tmp_path: Path) -> None:
    for line in range(1, 1000):
        with Journal(tmp_path / str(line)) as journal:
            journal.append("s", b"lazy", lazy=True)
            is_interrupted = interrupted_append(journal, line)
            assert journal.append("s", b"after").result(timeout=HANG_S)
            journal.flush()
            found = list(journal.read("s"))
            assert found in ([b"lazy", b"after"], [b"lazy", b"interrupted", b"after"])
        if not is_interrupted:
            assert line > 20
            return
    raise AssertionError("the append was interrupted at every line")


def test_a_journal_locked_too_long_by_another_program_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_BUSY_TIMEOUT_S", 0.02)
    with Journal(path) as journal, write_lock_held(path):
        with pytest.raises(JournalError, match="locked"):
            journal.append("s", b"late").result()
        assert journal.failure is not None


# -- group commit, threads, asyncio --------------------------------------------------------------------


@pytest.mark.parametrize("durability", LEVELS)
def test_appends_queued_at_once_share_a_transaction(path: Path, durability: Durability) -> None:
    with Journal(path, durability=durability) as journal:
        with write_lock_held(path):
            futures = [journal.append("s", encode_index(index)) for index in range(500)]
        assert [future.result() for future in futures] == list(range(1, 501))
        assert journal.commit_count <= 2  # the writer may have taken the first record alone
        assert list(journal.read("s")) == [encode_index(index) for index in range(500)]


def test_concurrent_threads_keep_all_records_in_order(path: Path) -> None:
    with Journal(path) as journal:

        def work(name: str) -> None:
            for index in range(300):
                future = journal.append(name, encode_index(index))
                if index % 50 == 0:
                    future.result()

        threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        journal.flush()
        for index in range(8):
            assert list(journal.read(f"t{index}")) == [encode_index(i) for i in range(300)]
        assert len(list(journal.replay())) == 8 * 300


def test_flush_waits_for_everything_appended_before_it(path: Path) -> None:
    with Journal(path) as journal:
        journal.flush()  # an empty queue
        futures = [journal.append("s", encode_index(index)) for index in range(200)]
        journal.flush()
        assert all(future.done() for future in futures)
        assert len(list(journal.read("s"))) == 200


def test_an_event_loop_awaits_appends_with_wrap_future(path: Path) -> None:
    async def append_all(journal: Journal) -> list[int]:
        return await asyncio.gather(
            *(asyncio.wrap_future(journal.append("s", encode_index(index))) for index in range(50))
        )

    with Journal(path) as journal:
        assert asyncio.run(append_all(journal)) == list(range(1, 51))
        assert list(journal.read("s")) == [encode_index(index) for index in range(50)]


def test_a_cancelled_waiter_does_not_undo_its_append(path: Path) -> None:
    async def append_and_cancel(journal: Journal) -> None:
        with write_lock_held(path):
            waiter = asyncio.wrap_future(journal.append("s", b"unawaited"))
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert not journal.append("s", b"kept").cancel()
        await asyncio.wrap_future(journal.append("s", b"after"))

    with Journal(path) as journal:
        asyncio.run(append_and_cancel(journal))
        assert list(journal.read("s")) == [b"unawaited", b"kept", b"after"]


def test_a_callback_that_raises_does_not_stop_the_writer(path: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("error in a callback")

    with Journal(path) as journal:
        with write_lock_held(path):
            journal.append("s", b"1").add_done_callback(fail)
        journal.append("s", b"2").result()
        assert list(journal.read("s")) == [b"1", b"2"]


# -- kills and truncated files -------------------------------------------------------------------------

APPEND_SCRIPT = """
import sys
from branchline.tree.journal import Journal
journal = Journal(sys.argv[1], durability=sys.argv[2])
for index in range(10**9):
    future = journal.append(f"s{index % 7}", b"%d" % index)
    if index % 3 == 0:
        print(future.result(), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("durability", LEVELS)
def test_everything_acknowledged_survives_kill_9(path: Path, durability: Durability) -> None:
    with child_process(APPEND_SCRIPT, path, durability) as process:
        assert process.stdout is not None
        acknowledged = [int(next(process.stdout)) for _ in range(150)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    with Journal(path) as journal:
        records = list(journal.replay())
        # The child counts records from 0, the journal from 1: the records are a prefix without gaps.
        assert records == [(f"s{index % 7}", encode_index(index)) for index in range(len(records))]
        assert len(records) >= max(acknowledged)
        assert journal.append("s", b"after").result() == len(records) + 1


def crashed_copy(path: Path, records: list[bytes], sizes: list[int]) -> Path:
    """Copies a journal and its WAL as after a crash; appends the WAL's size per commit to `sizes`."""
    crashed = path.with_name("crashed.journal")
    wal = Path(f"{path}-wal")
    with Journal(path) as journal:
        sizes.append(wal.stat().st_size if wal.exists() else 0)
        for record in records:
            journal.append("s", record).result()
            sizes.append(wal.stat().st_size)
        shutil.copy(path, crashed)
        shutil.copy(wal, f"{crashed}-wal")
    return crashed


def check_cuts(crashed: Path, records: list[bytes], sizes: list[int], cuts: list[int], folder: Path) -> None:
    main, wal = crashed.read_bytes(), Path(f"{crashed}-wal").read_bytes()
    cut_path = folder / "cut.journal"
    for step, cut in enumerate(cuts):
        cut_path.write_bytes(main)
        Path(f"{cut_path}-wal").write_bytes(wal[:cut])
        complete = sum(size <= cut for size in sizes[1:])
        with Journal(cut_path) as journal:
            assert list(journal.read("s")) == records[:complete], cut
            if step % 10 == 0:
                assert journal.append("s", b"after").result() == complete + 1
                assert list(journal.read("s")) == [*records[:complete], b"after"]


def test_a_wal_truncated_at_any_byte_opens_at_the_last_complete_commit(
    path: Path, fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small pages make small commits, so that every byte of the last one can be tested.
    monkeypatch.setattr(journal_file, "SCHEMA", f"PRAGMA page_size = 512; {journal_file.SCHEMA}")
    records = [encode_index(index) * 20 for index in range(8)]
    sizes: list[int] = []
    crashed = crashed_copy(path, records, sizes)
    cuts = [*range(0, sizes[-2], 97), *range(sizes[-2], sizes[-1] + 1)]
    check_cuts(crashed, records, sizes, cuts, fast_folder)


def test_a_wal_truncated_inside_default_pages_opens_at_the_last_complete_commit(
    path: Path, fast_folder: Path
) -> None:
    records = [bytes([index]) * 3000 for index in range(12)]
    sizes: list[int] = []
    crashed = crashed_copy(path, records, sizes)
    cuts = [*range(0, sizes[-1], 997), *(size + off for size in sizes[1:] for off in (-1, 0)), sizes[-1]]
    check_cuts(crashed, records, sizes, cuts, fast_folder)


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if available: these tests truncate files, so fsync does not matter."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = memory / f"branchline-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_an_empty_file_opens_as_an_empty_journal(path: Path) -> None:
    path.touch()
    with Journal(path) as journal:
        assert list(journal.replay()) == []
        assert journal.append("s", b"1").result() == 1


def test_a_long_wal_is_emptied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_CHECKPOINT_BYTES", 50_000)
    wal = Path(f"{path}-wal")
    with Journal(path) as journal:
        for index in range(100):
            journal.append("s", encode_index(index) * 1000).result()
        assert journal.failure is None
        assert list(journal.read("s")) == [encode_index(index) * 1000 for index in range(100)]
        assert wal.stat().st_size < 100_000


def test_a_slow_reader_delays_the_checkpoint_and_not_the_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_CHECKPOINT_BYTES", 50_000)
    wal = Path(f"{path}-wal")
    with Journal(path) as journal:
        for _ in range(3):
            journal.append("s", b"early").result()
        reader = journal.read("s")
        next(reader)
        for index in range(100):
            journal.append("s", encode_index(index) * 1000).result()
        assert wal.stat().st_size > 200_000
        assert list(reader) == [b"early", b"early"]
        for index in range(50):
            journal.append("s", encode_index(index) * 1000).result()
        assert journal.failure is None
        assert wal.stat().st_size < 100_000


# -- other files, second openers -----------------------------------------------------------------------


def file_contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-lock")}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nowhere does not exist"):
        Journal(tmp_path / "nowhere" / "run.journal")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "content", [b"dear diary\n", b"dear diary\n" * 1000, b"SQLite format 3\0", b"\0" * 4096]
)
def test_a_file_that_is_not_sqlite_is_rejected_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    before = file_contents(path.parent)
    with pytest.raises(JournalError, match=r"run\.journal: found a.*, expected a journal"):
        Journal(path)
    assert file_contents(path.parent) == before


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_foreign_database_is_rejected_unchanged(path: Path, mode: str) -> None:
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute(f"PRAGMA journal_mode = {mode}")
        foreign.execute("CREATE TABLE diary (page TEXT)")
        foreign.commit()
        before = file_contents(path.parent)
        with pytest.raises(JournalError, match="found an SQLite file with application_id 0x0, version 0"):
            Journal(path)
        assert file_contents(path.parent) == before


def test_a_journal_of_the_version_before_media_is_upgraded(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"1")
    with closing(sqlite3.connect(path)) as older:
        older.execute("DROP TABLE media")
        older.execute("ALTER TABLE records DROP COLUMN checksum")
        older.execute("PRAGMA user_version = 2")
    with Journal(path) as journal:
        journal.append("s", b"2", media={"d": b"image"}).result()
    with Journal(path) as journal:
        assert list(journal.read("s")) == [b"1", b"2"]
        assert journal.read_media("d") == b"image"


@pytest.mark.parametrize("durability", LEVELS)
def test_a_payload_is_stored_once_for_all_sessions(path: Path, durability: Durability) -> None:
    image = b"image" * 1000
    for _ in range(2):
        with Journal(path, durability=durability) as journal:
            for session in "abc":
                journal.append(session, b"record", media={"d": image}).result()
            assert journal.read_media("d") == image
            assert journal.read_media("other") is None
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT digest, payload FROM media").fetchall() == [("d", image)]
        assert file.execute("SELECT count(*) FROM records").fetchone() == (6,)


def test_a_payload_and_its_record_are_one_transaction(path: Path) -> None:
    with Journal(path) as journal:
        before = journal.commit_count
        journal.append("s", b"record", media={"d": b"1", "e": b"2"}).result()
        assert journal.commit_count == before + 1


def test_another_version_is_rejected_unchanged(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"1")
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 7")
    before = file_contents(path.parent)
    with pytest.raises(
        JournalError, match=r"version 7, expected a journal with application_id .*, version 4"
    ):
        Journal(path)
    assert file_contents(path.parent) == before


def test_a_damaged_journal_is_rejected_with_its_path(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"x" * 100_000)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8000)
    with pytest.raises(JournalError, match=r"run\.journal: the journal cannot be opened"):
        Journal(path)


def test_a_second_opener_in_this_process_is_rejected_even_through_a_link(path: Path) -> None:
    link = path.with_name("link.journal")
    link.symlink_to(path)
    with Journal(path) as journal:
        for other in (path, link):
            with pytest.raises(JournalError, match="already open"):
                Journal(other)
        journal.append("s", b"1").result()
    with Journal(link) as journal:
        assert list(journal.read("s")) == [b"1"]


OPEN_SCRIPT = """
import sys
from branchline.tree.journal import Journal
journal = Journal(sys.argv[1])
journal.append("s", b"theirs").result()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_another_process_holds_the_journal_until_it_is_killed(path: Path) -> None:
    with child_process(OPEN_SCRIPT, path) as process:
        assert process.stdout is not None
        assert next(process.stdout) == "open\n"
        with pytest.raises(JournalError, match="already open"):
            Journal(path)
        process.kill()
        process.wait()
        with Journal(path) as journal:
            assert list(journal.read("s")) == [b"theirs"]


# -- failures ------------------------------------------------------------------------------------------

FILL_DISK_SCRIPT = """
import resource, sys
from branchline.core.errors import JournalError
from branchline.tree.journal import Journal
journal = Journal(sys.argv[1], durability=sys.argv[2])
for index in range(5):
    journal.append("s", b"%d" % index).result()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # from here the disk is full at 200 kB
batch = [journal.append("s", b"x" * 150_000) for _ in range(4)]
errors = [future.exception() for future in batch]
assert errors[-1] is not None
failed = [error for error in errors if error is not None]
assert all(type(error) is JournalError and sys.argv[1] in str(error) for error in failed), failed
assert all(error.__cause__ is not None and str(error.__cause__) in str(error) for error in failed), failed
assert isinstance(journal.failure, JournalError)
later = journal.append("s", b"small").exception(timeout=0)
assert type(later) is JournalError and "takes no more records" in str(later), later
try:
    journal.flush()
except JournalError:
    kept = list(journal.read("s"))
    assert kept[:5] == [b"%d" % index for index in range(5)], kept
    assert len(kept) == 5 + errors.count(None)
    journal.close()
    journal.close()
    print(len(kept))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
@pytest.mark.parametrize("durability", LEVELS)
def test_a_full_disk_fails_the_futures_and_keeps_what_was_committed(
    path: Path, durability: Durability
) -> None:
    with child_process(FILL_DISK_SCRIPT, path, durability) as process:
        out, _ = process.communicate()
        assert process.returncode == 0
    with Journal(path) as journal:
        kept = list(journal.read("s"))
        assert len(kept) == int(out)
        assert kept[:5] == [encode_index(index) for index in range(5)]
        journal.append("s", b"after").result()
        assert list(journal.read("s")) == [*kept, b"after"]


def test_a_failed_transaction_fails_all_later_records(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", b"kept").result()
        with closing(sqlite3.connect(path)) as outsider:
            outsider.execute("DROP TABLE records")  # the next transaction cannot succeed
        futures = [journal.append("s", encode_index(index)) for index in range(20)]
        assert all(isinstance(future.exception(), JournalError) for future in futures)
        assert "no such table" in str(journal.failure)


def test_a_failed_checkpoint_stops_the_journal_and_keeps_its_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(journal_module, "_CHECKPOINT_SQL", "SELECT * FROM nowhere")
    with Journal(path) as journal:
        kept: list[bytes] = []
        while (rejection := journal.append("s", encode_index(len(kept))).exception()) is None:
            kept.append(encode_index(len(kept)))
        assert kept
        assert "no such table: nowhere" in str(rejection)
        assert list(journal.read("s")) == kept


def test_an_invalid_record_is_rejected_without_failing_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_MAX_RECORD_BYTES", 10)
    with Journal(path) as journal:
        with pytest.raises(JournalError, match="got 11 bytes, expected at most 10"):
            journal.append("s", b"x" * 11).result()
        with pytest.raises(JournalError, match="lone surrogates"):
            journal.append("\ud800", b"x").result()
        journal.append("s", b"fine").result()
        assert journal.failure is None
        assert list(journal.replay()) == [("s", b"fine")]


def test_a_closed_journal_rejects_appends_and_reads(path: Path) -> None:
    journal = Journal(path)
    journal.close()
    journal.close()
    journal.flush()
    with pytest.raises(JournalError, match="is closed"):
        journal.append("s", b"x").result(timeout=0)
    with pytest.raises(JournalError, match="is closed"):
        list(journal.read("s"))


# -- full disks that have space again ------------------------------------------------------------------


@contextmanager
def size_limit(path: Path, more_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond a size: that of the journal or its WAL plus `more_bytes`. A write beyond it
    fails partway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = path if more_bytes % 2 else Path(f"{path}-wal")
    limit = file.stat().st_size + more_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_for_recovery(journal: Journal) -> None:
    deadline = time.monotonic() + HANG_S
    while journal.failure is not None:
        assert time.monotonic() < deadline, journal.failure
        time.sleep(0.002)


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.005)
    monkeypatch.setattr(journal_module, "_LAZY_FLUSH_S", 0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
@pytest.mark.parametrize("durability", LEVELS)
@pytest.mark.parametrize("seed", range(5))
def test_a_disk_that_is_full_after_any_byte_and_has_space_again_loses_and_halves_no_record(
    path: Path, durability: Durability, seed: int, fast_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    if seed % 2:
        monkeypatch.setattr(journal_module, "_CHECKPOINT_BYTES", 20_000)
    acknowledged: list[bytes] = []
    applied: list[bytes] = []
    payloads: dict[str, bytes] = {}

    def append(journal: Journal, retain: bool, lazy: bool) -> Future[int] | None:
        record = b"%d:" % len(applied) + rng.randbytes(rng.choice((1, 500, 9000, 40_000)))
        media = {xxhash.xxh3_128_hexdigest(record * 2): record * 2} if rng.random() < 0.2 else {}
        try:
            future = journal.append("s", record, retain=retain, lazy=lazy, media=media)
        except JournalError:
            assert retain
            return None
        if retain:
            applied.append(record)
            payloads.update(media)

        def note(done: Future[int]) -> None:
            if done.exception() is None:
                acknowledged.append(record)

        future.add_done_callback(note)
        return future

    with Journal(path, durability=durability) as journal:
        journal.append("s", b"first").result()
        for _ in range(6):
            with size_limit(path, rng.randrange(60_000)):
                for _ in range(rng.randint(1, 8)):
                    # `retain` only: a record without it may be in the file although its future failed.
                    future = append(journal, retain=True, lazy=rng.random() < 0.3)
                    if future is not None and rng.random() < 0.7 and not future.done():
                        future.exception(timeout=HANG_S)
            wait_for_recovery(journal)
            assert append(journal, retain=True, lazy=False) is not None
        journal.flush()
        found = list(journal.read("s"))
        # Every record that was applied is there once, in order: the acknowledged ones are among them.
        assert found == [b"first", *applied]
        assert set(acknowledged) <= set(found)
        assert all(journal.read_media(digest) == data for digest, data in payloads.items())
    assert check_journal(path).damages == ()
    with Journal(path) as journal:
        assert list(journal.read("s")) == [b"first", *applied]


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
@pytest.mark.parametrize("durability", LEVELS)
def test_a_rejected_record_is_not_written_when_there_is_space_again(
    path: Path, durability: Durability, fast_retries: None
) -> None:
    with Journal(path, durability=durability) as journal:
        journal.append("s", b"before").result()
        with size_limit(path, 1000):
            with pytest.raises(JournalError):
                journal.append("s", b"rejected" * 5000, media={"d": b"image"}).result()
            assert journal.failure is not None
            with pytest.raises(JournalError, match="takes no more records until it can be written again"):
                journal.append("s", b"also rejected", retain=True)
            kept = journal.append("s", b"a note", lazy=True, retain=True)
        wait_for_recovery(journal)
        assert kept.done()
        # The payload of the rejected record is not taken for written.
        journal.append("s", b"after", media={"d": b"image"}).result()
        assert list(journal.read("s")) == [b"before", b"a note", b"after"]
        assert journal.read_media("d") == b"image"


def test_records_are_written_once_if_the_checkpoint_after_them_finds_the_disk_full(
    path: Path, fast_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_CHECKPOINT_BYTES", 1)
    run_checkpoint, failures = Journal._run_checkpoint, iter(range(5))

    def fail_first(journal: Journal) -> None:
        if next(failures, None) is not None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        run_checkpoint(journal)

    monkeypatch.setattr(Journal, "_run_checkpoint", fail_first)
    with Journal(path) as journal:
        journal.append("s", b"first").result()
        while journal.failure is None:
            time.sleep(0.001)
        journal.append("s", b"note", lazy=True, retain=True)
        wait_for_recovery(journal)
        journal.append("s", b"after").result()
        assert list(journal.read("s")) == [b"first", b"note", b"after"]


def test_another_failure_than_a_full_disk_is_final(path: Path, fast_retries: None) -> None:
    with Journal(path) as journal:
        with closing(sqlite3.connect(path)) as outsider:
            outsider.execute("DROP TABLE records")
        with pytest.raises(JournalError, match="no such table"):
            journal.append("s", b"x", retain=True)
        time.sleep(0.05)
        with pytest.raises(JournalError, match="takes no more records:"):
            journal.append("s", b"x", retain=True, lazy=True)


@pytest.mark.parametrize("name", ["SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC", "SQLITE_IOERR_READ"])
def test_a_failed_fsync_is_final_because_the_kernel_may_have_dropped_the_data(
    path: Path, name: str, fast_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, failures = Journal._commit, iter(range(1))

    def fail_once(journal: Journal, batch: Any) -> None:
        if next(failures, None) is not None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = getattr(sqlite3, name)
            raise error
        commit(journal, batch)

    monkeypatch.setattr(Journal, "_commit", fail_once)
    with Journal(path, durability="disk") as journal:
        with pytest.raises(JournalError, match="disk I/O error"):
            journal.append("s", b"x").result()
        time.sleep(0.05)
        with pytest.raises(JournalError, match="takes no more records:"):
            journal.append("s", b"x", retain=True, lazy=True)


# -- damage --------------------------------------------------------------------------------------------


def test_only_the_owner_may_read_a_journal(path: Path) -> None:
    old_umask = os.umask(0)
    try:
        with Journal(path) as journal:
            journal.append("s", b"1").result()
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(old_umask)
    assert set(modes) == {"run.journal", "run.journal-wal", "run.journal-shm", "run.journal-lock"}
    assert set(modes.values()) == {0o600}
    path.chmod(0o644)
    with Journal(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_record_is_not_read(path: Path) -> None:
    with Journal(path) as journal:
        for index in range(6):
            journal.append(f"s{index % 2}", encode_index(index) * 50)
    with closing(sqlite3.connect(path)) as disk:
        disk.execute("UPDATE records SET record = x'00' WHERE seq = 3")
        disk.commit()
    with Journal(path) as journal:
        assert [record for _, record in journal.replay()] == [
            DamagedRecord(3, 1) if index == 2 else encode_index(index) * 50 for index in range(6)
        ]
        reader = journal.read("s0")
        assert next(reader) == b"0" * 50
        with pytest.raises(JournalError, match=r"session s0, record 3 \(1 bytes\) does not match"):
            next(reader)
        assert len(list(journal.read("s1"))) == 3


@pytest.mark.parametrize("number", [1, 77])
def test_a_record_moved_to_another_session_is_damaged(path: Path, number: int) -> None:
    with Journal(path) as journal:
        journal.append("a", b"1")
        journal.append("b", b"2")
    with closing(sqlite3.connect(path)) as disk:
        disk.execute("UPDATE records SET session = ?", (number,))
        disk.commit()
    with Journal(path) as journal:
        # Both sessions are damaged: one lacks a record, the other has one too many.
        damaged = {session for session, record in journal.replay() if record == DamagedRecord(2, 1)}
        assert {"b"} <= damaged <= {"a", "b", ""}
        assert len(damaged) == 2


def test_a_truncated_tail_is_logged_with_its_size(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []
    crashed = crashed_copy(path, [bytes([index]) * 3000 for index in range(5)], sizes)
    with open(f"{crashed}-wal", "r+b") as wal:
        wal.truncate(sizes[-1] - 1000)
    with Journal(crashed) as journal:
        assert len(list(journal.read("s"))) == 4
    lost = sizes[-1] - 1000 - sizes[-2]
    assert f"dropped {lost} bytes of a commit that is not complete" in caplog.text


def test_commits_after_a_damaged_page_of_the_wal_are_counted_and_kept_beside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    crashed = crashed_copy(path, [bytes([index]) * 3000 for index in range(8)], sizes)
    wal = Path(f"{crashed}-wal")
    data = bytearray(wal.read_bytes())
    data[sizes[3] + 500] ^= 1
    wal.write_bytes(data)
    with Journal(crashed) as journal:
        assert len(list(journal.read("s"))) == 3
    kept = crashed.with_name("crashed.journal.damaged-1")
    assert "with 5 complete commits after a damaged page" in caplog.text
    assert f"branchline journal repair {kept}" in caplog.text
    assert Path(f"{kept}-wal").read_bytes() == bytes(data)
