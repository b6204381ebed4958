"""The journal: opaque records per session, in order, that outlive the process that wrote them.

Its idea is one writer at a time. At level `disk`, `append` only queues; a thread takes everything that is
queued, commits it in one SQLite transaction and then resolves the futures, so that under load many appends
share one fsync. At level `process` a commit costs a fifth of what it costs to wake a thread and to be woken
by it: there `append` commits a small record itself, and the future it gives has resolved. It only queues
while the thread is at work (on a large record, or emptying the WAL). A note, which nobody waits for, is
committed together with the next record, or within a second.

Its invariant: **a record whose future has resolved is found by every later reader, behind all records that
were appended before it.** What a crash cuts off is a tail of unresolved appends. The converse is not
promised: a record whose future failed or never resolved may still turn up after a crash.

    with Journal("run.journal") as journal:
        seq = journal.append("session-1", b"delta").result()
        records = list(journal.read("session-1"))
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

from branchline.core.errors import JournalError
from branchline.tree.journal_file import LAST_SEQ_SQL, check_header, initialize, lock_journal
from branchline.tree.journal_file import Durability as Durability

# The WAL is copied into the main file each time it has grown by this much. Larger: fewer fsyncs and fewer
# pages copied twice. Smaller: less to recover at open, and a shorter stall of the writer while it copies.
_CHECKPOINT_BYTES = 16 * 2**20
_CHECKPOINT_SQL = "PRAGMA wal_checkpoint(TRUNCATE)"
# SQLite refuses rows near 10^9 bytes; found out inside a transaction, that would fail everybody's records.
_MAX_RECORD_BYTES = 512 * 2**20
# What an appender writes itself at level `process`; more would hold up whatever else its thread does.
_MAX_INLINE_BYTES, _MAX_INLINE_RECORDS = 256 * 2**10, 16
# How long a note may stay unwritten.
_LAZY_FLUSH_S = 1.0
# How long to wait for another program that has the file open to write (and how often to look): nobody should.
_BUSY_TIMEOUT_S, _BUSY_POLL_S = 5.0, 0.01
# Sessions whose number is remembered; looking one up again is cheap.
_MAX_CACHED_SESSIONS = 10_000

_Entry = tuple[str, bytes, "Future[int]"]


class Journal:
    """One open journal file; for all threads of one process, but not across a fork.

    Close it: the writer is a daemon thread, so what is still queued when the interpreter exits is lost.
    Callbacks of futures run where the record was written, in any thread that appends: they must not wait.
    A signal that raises inside `append` (Ctrl-C) leaves the record written or queued, once, never half.
    """

    def __init__(self, path: str | os.PathLike[str], *, durability: Durability = "process") -> None:
        self.path: Final = Path(path)
        self.durability: Final = durability
        self._file = self.path.resolve()  # the same file has the same lock, whatever link leads to it
        # Guards the queue, its tail, `failed` and `closed`, and who writes: the thread, or who holds this.
        # Appenders take the bare lock: no signal comes between its taking and the `with` that lets it go.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue: list[_Entry] = []
        self._write_requested = False  # the thread is to write the queue; else it holds nothing but notes
        self._writer_active = False
        self._checkpoint_due = False
        self._last_future: Future[int] | None = None
        self._failure: JournalError | None = None
        self._closed = False
        self._commit_count = 0
        self._session_ids: dict[str, int] = {}
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES
        try:
            with ExitStack() as resources:
                # The lock comes first: POSIX drops a process's locks on a file when any descriptor of it
                # closes, so even a peek at a file already open here would strip SQLite of its locks.
                resources.enter_context(lock_journal(self._file))
                check_header(self._file)
                db = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
                resources.enter_context(closing(db))
                self._last_seq = initialize(db, durability)
                owned = resources.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise self._error("cannot be opened", error) from error
        self._db = db
        self._writer = threading.Thread(target=self._run_writer, args=(owned,), name="journal", daemon=True)
        self._writer.start()

    @property
    def commit_count(self) -> int:
        """Transactions written through this object so far."""
        return self._commit_count

    @property
    def failure(self) -> JournalError | None:
        """Why this journal takes no more records, or None while it does."""
        return self._failure

    def append(self, session: str, record: bytes, *, lazy: bool = False) -> Future[int]:
        """Write or queue a record; the future resolves with its sequence number once it is durable.

        Never raises and never waits for the disk: a refusal is a future that has failed with JournalError.
        """
        future: Future[int] = Future()
        # An append cannot be taken back: later records build on it, whether or not somebody still waits.
        # A running future refuses cancel(), and a cancelled asyncio waiter merely stops listening.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._failure is not None:
                refusal = self._error("has failed and takes no more records", self._failure.__cause__)
            elif self._closed:
                refusal = self._error("is closed")
            # One caller's bad value must not fail the transaction it would share with others.
            elif len(record) > _MAX_RECORD_BYTES:
                refusal = self._error(f"got {len(record)} bytes, expected at most {_MAX_RECORD_BYTES}")
            elif session.encode(errors="ignore").decode() != session:
                refusal = self._error(f"got session {session!r}, expected no lone surrogates")
            else:
                self._queue.append((session, record, future))
                self._last_future = future  # behind it: nobody may wait for what is not queued
                if not lazy and not self._write_inline():
                    self._write_requested = True
                    self._wake.notify()
                return future
        future.set_exception(refusal)
        return future

    def flush(self) -> None:
        """Wait until everything appended so far is committed; JournalError if the journal has failed."""
        with self._lock:
            tail = self._last_future
            self._write_requested = bool(self._queue)
            self._wake.notify()
        if tail is not None:
            tail.exception()  # waits; futures resolve in order, so the last one stands for all
        if self._failure is not None:
            raise self._error("has failed", self._failure.__cause__)

    def sessions(self) -> list[str]:
        """All sessions, in the order of their first records."""
        return [name for (name,) in self._query("SELECT name FROM sessions ORDER BY id")]

    def read(self, session: str) -> Iterator[bytes]:
        """The session's records in order of append, as committed when the first one is taken."""
        query = "SELECT record FROM records JOIN sessions ON id = session WHERE name = ? ORDER BY seq"
        return (record for (record,) in self._query(query, session))

    def replay(self) -> Iterator[tuple[str, bytes]]:
        """Every record with its session, in order of append, as committed when the first one is taken."""
        # CROSS JOIN pins the order of the loops: records stream by seq and are never sorted in memory.
        return self._query(
            "SELECT name, record FROM records CROSS JOIN sessions ON id = session ORDER BY seq"
        )

    def close(self) -> None:
        """Commit what is queued, then let go of the file. Does not raise: futures tell what failed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._writer.join()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _error(self, what: str, cause: BaseException | None = None) -> JournalError:
        error = JournalError(f"{self.path}: the journal {what}" + (f": {cause}" if cause else ""))
        error.__cause__ = cause
        return error

    def _query(self, query: str, *values: str) -> Iterator[Any]:
        with self._lock:
            if self._closed:
                raise self._error("is closed")
            if self._queue:
                self._write_inline()
        # A connection per reader: its own snapshot, from any thread, never in the writer's way.
        uri = f"{self._file.as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as db:
                yield from db.execute(query, values)
        except sqlite3.Error as error:
            raise self._error("cannot be read", error) from error

    def _write_inline(self) -> bool:
        """Writes the queue here and now, unless that could take long; False: the thread has to."""
        is_busy = self._write_requested or self._writer_active or self._checkpoint_due
        if is_busy or self.durability != "process" or len(self._queue) > _MAX_INLINE_RECORDS:
            return False
        if sum([len(record) for _, record, _ in self._queue]) > _MAX_INLINE_BYTES:
            return False
        batch, before = self._queue, self._last_seq
        try:
            self._queue = []
            last = self._insert(batch)
        except Exception as error:
            if _is_busy_error(error):
                self._queue = batch
                return False
            self._fail(batch, error)
            return True
        except BaseException:
            self._recover_batch(batch, before)
            raise
        _resolve(batch, last)
        return True

    def _insert(self, batch: list[_Entry]) -> int:
        """Writes a few records, and gives the last one's number.

        One statement is one transaction: a signal finds it done or not begun.
        """
        values: list[int | bytes] = []
        for session, record, _ in batch:
            values += (self._session_id(session), record)
        rows = ", ".join(["(?, ?)"] * len(batch))
        written = self._db.execute(f"INSERT INTO records (session, record) VALUES {rows}", values)
        self._last_seq = int(written.lastrowid or 0)
        self._after_commit()
        return self._last_seq

    def _recover_batch(self, batch: list[_Entry], before: int) -> None:
        """Behind a signal: the batch is in the file, or it goes back to the queue."""
        (self._last_seq,) = self._db.execute(LAST_SEQ_SQL).fetchone()
        if self._last_seq > before:
            _resolve(batch, self._last_seq)
        else:
            self._queue = batch
            self._write_requested = True
            self._wake.notify()

    def _run_writer(self, owned: ExitStack) -> None:
        """The thread. Leaving `owned` closes the connection, then the lock."""
        with owned:
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._write_requested or self._checkpoint_due or self._closed, _LAZY_FLUSH_S
                    )
                    batch, self._queue, self._write_requested = self._queue, [], False
                    if not batch and self._closed:
                        return
                    self._writer_active = bool(batch) or self._checkpoint_due
                if batch:
                    self._write_batch(batch)
                if self._checkpoint_due:
                    self._checkpoint()
                with self._wake:
                    self._writer_active = False

    def _write_batch(self, batch: list[_Entry]) -> None:
        """Any number of records in one transaction; whatever becomes of it, those who wait hear of it."""
        try:
            self._begin()
            self._commit(batch)
        except Exception as error:
            self._fail(batch, error)
        else:
            _resolve(batch, self._last_seq)

    def _begin(self) -> None:
        """Opens a transaction, once nobody else has one."""
        until = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy_error(error) or time.monotonic() > until:
                    raise
            time.sleep(_BUSY_POLL_S)

    def _commit(self, batch: list[_Entry]) -> None:
        db, first = self._db, self._last_seq + 1
        rows = [(seq, self._session_id(name), record) for seq, (name, record, _) in enumerate(batch, first)]
        db.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        db.execute("COMMIT")
        self._last_seq += len(batch)
        self._after_commit()

    def _after_commit(self) -> None:
        self._commit_count += 1
        if os.stat(f"{self._file}-wal").st_size >= self._checkpoint_at_bytes:
            with self._lock:
                self._checkpoint_due = True
                self._wake.notify()

    def _session_id(self, session: str) -> int:
        """A session's number; a new session gets one, in the transaction under way if there is one."""
        number = self._session_ids.get(session)
        if number is None:
            self._db.execute("INSERT OR IGNORE INTO sessions (name) VALUES (?)", (session,))
            (number,) = self._db.execute("SELECT id FROM sessions WHERE name = ?", (session,)).fetchone()
            if len(self._session_ids) >= _MAX_CACHED_SESSIONS:
                self._session_ids.clear()
            self._session_ids[session] = number
        return int(number)

    def _checkpoint(self) -> None:
        # In place of SQLite's automatic checkpoint, which runs inside COMMIT, before futures could resolve,
        # and leaves the WAL at its greatest length. TRUNCATE empties it: the disk space comes back, and a
        # cut through the WAL never mixes its old pages with newer ones in the main file.
        try:
            wal_bytes = os.stat(f"{self._file}-wal").st_size
            (busy, _, _) = self._db.execute(_CHECKPOINT_SQL).fetchone()
        except Exception as error:
            self._fail([], error)
            wal_bytes, busy = 0, 0
        # Where a reader is in the way, try again after as much growth again, not at every commit.
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES + (wal_bytes if busy else 0)
        self._checkpoint_due = False

    def _fail(self, batch: list[_Entry], cause: Exception) -> None:
        with suppress(sqlite3.Error):  # some failures SQLite has already rolled back
            self._db.rollback()
        with self._wake:
            self._failure = self._error("could not be written", cause)
            unresolved, self._queue = [*batch, *self._queue], []
        for _, _, future in unresolved:
            if not future.done():  # after a failed checkpoint the batch itself is committed
                future.set_exception(self._error("could not be written", cause))


def _resolve(batch: list[_Entry], last: int) -> None:
    """Tells those who wait for a batch whose last record has this number."""
    for seq, (_, _, future) in enumerate(batch, last - len(batch) + 1):
        if not future.done():  # a signal may have come between two of them
            future.set_result(seq)


def _is_busy_error(error: Exception) -> bool:
    """Whether another program has the file open to write."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY
