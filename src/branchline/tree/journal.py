"""The journal: opaque records per session, in order, in an SQLite file that outlives the process.

There is one writer at a time. At level `disk`, `append` only queues; a thread takes everything queued,
commits it in one transaction and resolves the futures, so concurrent appends share one fsync. At level
`process`, a commit is five times cheaper than waking a thread and waiting for it, so `append` commits a
small record itself and returns a resolved future; it only queues while the thread is working (on a large
record or a checkpoint). A lazy record is committed together with the next record, or within a second.

Invariant: **a record whose future has resolved is found by every later reader, after all records appended
before it.** A crash loses only a tail of unresolved appends. The converse is not guaranteed: a record whose
future failed or never resolved may still be found after a crash.

A write that fails because the disk is full (or the file is locked, or may not grow) fails the records of its
transaction, and the journal takes no more records. The writer thread then tries again until a write
succeeds, and the journal continues. Records that their callers have applied already (`retain`) are kept
meanwhile and written first, so that the file never lacks a record that a later one builds on. After any other
failure the journal stays readable and takes no more records.

Payloads of media are kept apart from the records, once each, by digest. They are committed together with the
record that first carries them.

    with Journal("run.journal") as journal:
        seq = journal.append("session-1", b"delta").result()
        records = list(journal.read("session-1"))
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from branchline.core.choices import Durability as Durability
from branchline.core.errors import JournalError
from branchline.tree.journal_file import (
    CHECKSUM_OFFSET,
    LAST_SEQ_SQL,
    SEED_MASK,
    VERSION,
    DamagedRecord,
    check_header,
    initialize,
    is_busy_error,
    is_intact,
    lock_journal,
    make_private,
    may_pass,
    repair_hint,
    report_dropped_tail,
    session_seed,
)

log = logging.getLogger("branchline.journal")

# The WAL is copied into the main file each time it has grown by this much. Larger: fewer fsyncs and fewer
# pages copied twice. Smaller: less to recover at open, and a shorter stall of the writer.
_CHECKPOINT_BYTES = 16 * 2**20
_CHECKPOINT_SQL = "PRAGMA wal_checkpoint(TRUNCATE)"
# SQLite rejects rows near 10^9 bytes; inside a transaction that would fail the other records too.
_MAX_RECORD_BYTES = 512 * 2**20
# Limits of what `append` writes itself at level `process`; more would block the calling thread.
_MAX_INLINE_BYTES, _MAX_INLINE_RECORDS = 256 * 2**10, 16
# The longest time a lazy record stays unwritten.
_LAZY_FLUSH_S = 1.0
# How long to wait, and how often to retry, while another program holds SQLite's write lock.
_BUSY_TIMEOUT_S, _BUSY_POLL_S = 5.0, 0.01
# How often a journal that could not be written tries again.
_RETRY_S = 0.5
# Session numbers kept in memory.
_MAX_CACHED_SESSIONS = 10_000


class _Entry(NamedTuple):
    """A queued record."""

    session: str
    record: bytes
    future: Future[int]
    media: Mapping[str, bytes]
    """The payloads that the record carries and the file may lack."""
    retain: bool


class Journal:
    """One open journal file, shared by all threads of one process, but not across a fork.

    Call `close`: the writer is a daemon thread, so records still queued at interpreter exit are lost.
    Future callbacks run in the thread that wrote the record, which may be any appender: they must not block.
    A signal that raises inside `append` (Ctrl-C) leaves the record written or queued once, never partially.
    """

    def __init__(self, path: str | os.PathLike[str], *, durability: Durability = "process") -> None:
        self.path: Final = Path(path)
        self.durability: Final = durability
        self.failure: JournalError | None = None
        """Why this journal takes no records, or None; it is None again after a write has succeeded."""
        self.commit_count = 0
        """Transactions written through this object."""
        self._file = self.path.resolve()  # links to one file share one lock
        # Guards the queue, its last future, `failure`, `_closed` and the right to write: the thread writes
        # while `_writer_active` is set, otherwise the holder of the lock. Appenders take the plain lock: no
        # signal is handled between acquiring it and entering the `with` block.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue: list[_Entry] = []
        self._write_requested = False  # False: the queue holds only lazy records
        self._writer_active = False
        self._checkpoint_due = False
        self._last_future: Future[int] | None = None
        self._closed = False
        self._may_recover = False
        """Whether `failure` may pass, so that the writer thread tries again."""
        self._session_ids: dict[str, tuple[int, int]] = {}
        """Number and checksum seed by session."""
        self._digests: set[str] = set()  # of the payloads that were written or queued through this object
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES
        try:
            with ExitStack() as resources:
                # Lock first: POSIX drops a process's locks on a file when any descriptor of it closes, so
                # even reading the header of a file that is already open here would release SQLite's locks.
                resources.enter_context(lock_journal(self._file))
                check_header(self._file)
                report_dropped_tail(self._file)
                make_private(self._file)
                db = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
                resources.enter_context(closing(db))
                self._last_seq = initialize(db, durability)
                owned = resources.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise self._error("cannot be opened", error) from error
        self._db = db
        self._writer = threading.Thread(target=self._run_writer, args=(owned,), name="journal", daemon=True)
        self._writer.start()

    def append(
        self,
        session: str,
        record: bytes,
        *,
        lazy: bool = False,
        media: Mapping[str, bytes] | None = None,
        retain: bool = False,
    ) -> Future[int]:
        """Writes or queues a record; the future resolves with its sequence number once it is durable, and so
        are the payloads in `media`.

        Never waits for the disk. A rejected record returns a future that failed with JournalError.

        `retain` is for a record that its caller applies when this returns: a rejection raises JournalError.
        If a later write fails, the future fails too, but the record is written when the journal recovers. A
        lazy one is taken even while the journal may recover.
        """
        future: Future[int] = Future()
        # An append cannot be undone, because later records build on it. A running future rejects cancel(),
        # and a cancelled asyncio waiter only stops waiting.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self.failure is not None and not (lazy and retain and self._may_recover):
                until = " until it can be written again" if self._may_recover else ""
                problem = f"has failed and takes no more records{until}"
                rejection = self._error(problem, self.failure.__cause__)
            elif self._closed:
                rejection = self._error("is closed")
            # Checked here, because an invalid value would fail the other records of its transaction.
            elif (size := max(len(record), *map(len, (media or {}).values()), 0)) > _MAX_RECORD_BYTES:
                rejection = self._error(f"got {size} bytes, expected at most {_MAX_RECORD_BYTES}")
            elif session.encode(errors="ignore").decode() != session:
                rejection = self._error(f"got session {session!r}, expected no lone surrogates")
            else:
                new_media = {key: data for key, data in (media or {}).items() if key not in self._digests}
                self._digests.update(new_media)
                self._queue.append(_Entry(session, record, future, new_media, retain))
                self._last_future = future  # set after queueing: flush() must only wait for queued records
                if not lazy and not self._write_inline(is_append=True):
                    self._write_requested = True
                    self._wake.notify()
                # The lock is held, so only `_write_inline` can have failed the record: it was not written.
                if retain and future.done() and (error := future.exception()) is not None:
                    raise error
                return future
        if retain:
            raise rejection
        future.set_exception(rejection)
        return future

    def flush(self) -> None:
        """Waits until everything appended so far is committed; raises JournalError if the journal has
        failed."""
        with self._lock:
            last = self._last_future
            self._write_requested = bool(self._queue)
            self._wake.notify()
        if last is not None:
            last.exception()  # waits; futures resolve in order, so all earlier ones have resolved too
        if self.failure is not None:
            raise self._error("has failed", self.failure.__cause__)

    def read(self, session: str) -> Iterator[bytes]:
        """Yields the session's records in order of append, from a snapshot taken at the first `next`.

        Raises JournalError at a damaged record.
        """
        query = (
            "SELECT seq, CAST(record AS BLOB), checksum FROM records JOIN sessions ON id = session "
            "WHERE name = ? ORDER BY seq"
        )
        for seq, record, checksum in self._query(query, session):
            if not is_intact(session, seq, record, checksum):
                raise self._error(f"is damaged: session {session}, {DamagedRecord(seq, len(record))}")
            yield record

    def replay(self) -> Iterator[tuple[str, bytes | DamagedRecord]]:
        """Yields every record with its session in order of append, from a snapshot taken at the first
        `next`."""
        # A LEFT JOIN fixes the order of the loops: records stream by seq and are never sorted in memory.
        for session, seq, record, checksum in self._query(
            "SELECT name, seq, CAST(record AS BLOB), checksum FROM records "
            "LEFT JOIN sessions ON id = session ORDER BY seq"
        ):
            if session is not None and is_intact(session, seq, record, checksum):
                yield session, record
                continue
            # If only its session number is damaged, the record matches the name of its own session.
            names = self._query("SELECT name FROM sessions")
            owners = [name for (name,) in names if checksum and is_intact(name, seq, record, checksum)]
            for name in {session or "", *owners}:
                yield name, DamagedRecord(seq, len(record or b""))

    def read_media(self, digest: str) -> bytes | None:
        """Returns the payload with this digest, or None."""
        found = next(self._query("SELECT payload FROM media WHERE digest = ?", digest), None)
        return None if found is None else bytes(found[0])

    def close(self) -> None:
        """Commits what is queued and releases the file. Never raises: failures are set on the futures."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._writer.join()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _error(self, problem: str, cause: BaseException | None = None) -> JournalError:
        error = JournalError(
            f"{self.path}: the journal {problem}"
            + (f": {cause}" if cause else "")
            + repair_hint(self.path, cause)
        )
        error.__cause__ = cause
        return error

    def _query(self, query: str, *values: str) -> Iterator[Any]:
        with self._lock:
            if self._closed:
                raise self._error("is closed")
            if self._queue:
                self._write_inline()
        # Each reader has its own connection and snapshot: it works in any thread and never blocks the writer.
        uri = f"{self._file.as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as db:
                db.text_factory = lambda data: data.decode(errors="replace")  # a damaged name
                yield from db.execute(query, values)
        except sqlite3.Error as error:
            raise self._error("cannot be read", error) from error

    # -- writing in the calling thread (level `process`) -----------------------------------------------

    def _write_inline(self, *, is_append: bool = False) -> bool:
        """Writes the queue in the calling thread; returns False if the writer thread has to do it.

        With `is_append` the last record is being appended: if it cannot be written, it is not retained.
        """
        is_busy = self._write_requested or self._writer_active or self._checkpoint_due
        if is_busy or self.durability != "process" or len(self._queue) > _MAX_INLINE_RECORDS:
            return False
        if self.failure is not None or sum([len(entry.record) for entry in self._queue]) > _MAX_INLINE_BYTES:
            return False
        if any(entry.media for entry in self._queue):
            return False  # several statements, so a transaction of the writer thread
        batch, before = self._queue, self._last_seq
        try:
            self._queue = []
            values: list[int | bytes] = []
            for seq, (session, record, _, _, _) in enumerate(batch, before + 1):
                number, seed = self._session_ids.get(session) or self._add_session(session)
                checksum = xxhash.xxh3_64_intdigest(record, (seed + seq) & SEED_MASK) - CHECKSUM_OFFSET
                values += (seq, number, record, checksum)
            rows = ", ".join(["(?, ?, ?, ?)"] * len(batch))
            # One statement is one transaction: a signal arrives before it starts or after it has finished.
            self._db.execute(f"INSERT INTO records VALUES {rows}", values)
            self._last_seq = last = before + len(batch)
            self._after_commit()
        except Exception as error:
            if is_busy_error(error):
                self._queue = batch
                return False
            self._fail([*batch[:-1], batch[-1]._replace(retain=False)] if is_append else batch, error)
            return True
        except BaseException:
            self._recover_batch(batch, before)
            raise
        _resolve(batch, last)
        return True

    def _recover_batch(self, batch: list[_Entry], before: int) -> None:
        """After a signal: resolves the batch if it is in the file, otherwise queues it again."""
        (self._last_seq,) = self._db.execute(LAST_SEQ_SQL).fetchone()
        if self._last_seq > before:
            _resolve(batch, self._last_seq)
        else:
            self._queue = batch
            self._write_requested = True
            self._wake.notify()

    # -- the writer thread -----------------------------------------------------------------------------

    def _run_writer(self, owned: ExitStack) -> None:
        """The thread's main function. Leaving `owned` closes the connection, then releases the file lock."""
        with owned:
            while True:
                with self._wake:
                    self._wake.wait_for(self._has_work, _LAZY_FLUSH_S if self.failure is None else _RETRY_S)
                    batch, self._queue, self._write_requested = self._queue, [], False
                    is_closed, has_failed = self._closed, self.failure is not None
                    if is_closed and not batch:
                        return
                    self._writer_active = bool(batch) or self._checkpoint_due or has_failed
                if has_failed:
                    self._recover(batch)
                elif batch:
                    self._write_batch(batch)
                if self._checkpoint_due and self.failure is None:
                    self._checkpoint()
                with self._wake:
                    self._writer_active = False
                    if is_closed and self.failure is not None:
                        return

    def _has_work(self) -> bool:
        return self._closed or (self.failure is None and (self._write_requested or self._checkpoint_due))

    def _write_batch(self, batch: list[_Entry]) -> None:
        """Writes any number of records in one transaction and resolves or fails all their futures."""
        try:
            self._begin()
            self._commit(batch)
        except Exception as error:
            self._fail(batch, error)
        else:
            _resolve(batch, self._last_seq)

    def _recover(self, batch: list[_Entry]) -> None:
        """After a failure that may pass: writes the retained records, or only the header, and continues."""
        if not self._may_recover:
            return
        try:
            self._begin()
            self._db.execute(f"PRAGMA user_version = {VERSION}")  # writes a page also without records
            self._commit(batch)
            _resolve(batch, self._last_seq)
            written, batch = batch, []  # if the checkpoint fails, they are not written again
            if self._checkpoint_due:
                self._run_checkpoint()
        except Exception as error:
            self._fail(batch, error)
            return
        with self._lock:
            self.failure, self._may_recover = None, False
        log.warning("%s: the journal is written again; %d records were waiting", self.path, len(written))

    def _begin(self) -> None:
        """Opens a transaction; waits while another program has one open."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy_error(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_POLL_S)

    def _commit(self, batch: list[_Entry]) -> None:
        db, rows = self._db, list[tuple[int, int, bytes, int]]()
        for seq, (session, record, _, media, _) in enumerate(batch, self._last_seq + 1):
            number, seed = self._session_ids.get(session) or self._add_session(session)
            checksum = xxhash.xxh3_64_intdigest(record, (seed + seq) & SEED_MASK) - CHECKSUM_OFFSET
            rows.append((seq, number, record, checksum))
            for item in media.items():
                db.execute("INSERT OR IGNORE INTO media VALUES (?, ?)", item)
        db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        db.execute("COMMIT")
        self._last_seq += len(batch)
        self._after_commit()

    def _checkpoint(self) -> None:
        # Replaces SQLite's automatic checkpoint, which runs inside COMMIT, before futures could resolve, and
        # leaves the WAL at its maximum length. TRUNCATE empties it: the disk space is freed, and cutting the
        # WAL never mixes its old pages with newer ones in the main file.
        try:
            self._run_checkpoint()
        except Exception as error:
            self._fail([], error)

    def _run_checkpoint(self) -> None:
        wal_bytes = os.stat(f"{self._file}-wal").st_size
        (busy, _, _) = self._db.execute(_CHECKPOINT_SQL).fetchone()
        # If a reader blocks the checkpoint, retry after the same growth again, not at every commit.
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES + (wal_bytes if busy else 0)
        self._checkpoint_due = False

    # -- shared by both writers ------------------------------------------------------------------------

    def _after_commit(self) -> None:
        self.commit_count += 1
        if os.stat(f"{self._file}-wal").st_size >= self._checkpoint_at_bytes:
            with self._lock:
                self._checkpoint_due = True
                self._wake.notify()

    def _add_session(self, session: str) -> tuple[int, int]:
        """Returns a session's number and checksum seed; adds a new session, inside the open transaction if
        there is one."""
        self._db.execute("INSERT OR IGNORE INTO sessions (name) VALUES (?)", (session,))
        (number,) = self._db.execute("SELECT id FROM sessions WHERE name = ?", (session,)).fetchone()
        if len(self._session_ids) >= _MAX_CACHED_SESSIONS:
            self._session_ids.clear()
        self._session_ids[session] = found = int(number), session_seed(session)
        return found

    def _fail(self, batch: list[_Entry], cause: Exception) -> None:
        """Stops the journal: keeps the retained records of a batch that was not written, fails the others."""
        with suppress(sqlite3.Error):  # SQLite has already rolled back after some failures
            self._db.rollback()
        with self._wake:
            if self.failure is None:
                log.error("%s: the journal could not be written: %s", self.path, cause)
            self.failure, self._may_recover = self._error("could not be written", cause), may_pass(cause)
            self._session_ids.clear()  # the transaction may have added some of them
            unwritten, self._queue = [*batch, *self._queue], []
            for entry in unwritten:
                if entry.retain and self._may_recover:
                    self._queue.append(entry)
                else:
                    self._digests.difference_update(entry.media)
        for entry in unwritten:
            if not entry.future.done():
                entry.future.set_exception(self._error("could not be written", cause))


def _resolve(batch: list[_Entry], last: int) -> None:
    """Resolves the futures of a batch whose last record has this sequence number."""
    for seq, entry in enumerate(batch, last - len(batch) + 1):
        if not entry.future.done():  # a signal may have interrupted an earlier call
            entry.future.set_result(seq)
