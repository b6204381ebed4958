"""The journal: opaque records per session, in order, in an SQLite file that outlives the process.

There is one writer at a time. At level `disk`, `append` only queues; a thread takes everything queued,
commits it in one transaction and resolves the futures, so concurrent appends share one fsync. At level
`process`, a commit is five times cheaper than waking a thread and waiting for it, so `append` commits a
small record itself and returns a resolved future; it only queues while the thread is working (on a large
record or a checkpoint). A lazy record is committed together with the next record, or within a second.

Invariant: **a record whose future has resolved is found by every later reader, after all records appended
before it.** A crash loses only a tail of unresolved appends. The converse is not guaranteed: a record whose
future failed or never resolved may still be found after a crash.

Payloads of media are kept apart from the records, once each, by digest. They are committed together with the
record that first carries them.

    with Journal("run.journal") as journal:
        seq = journal.append("session-1", b"delta").result()
        records = list(journal.read("session-1"))
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

from branchline.core.errors import JournalError

if sys.platform != "win32":
    import fcntl

Durability = Literal["process", "disk"]

# NORMAL leaves a commit in the kernel's page cache, which survives kill -9; FULL fsyncs the WAL at every
# commit, which survives power loss. (fullfsync: on macOS a plain fsync stops at the drive's own cache.)
_DURABILITY_PRAGMAS: dict[Durability, str] = {
    "process": "PRAGMA synchronous = NORMAL",
    "disk": "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON",
}
_APPLICATION_ID = 0x42726C6E  # "Brln"
_VERSION = 3
_OLDER_VERSION = 2
"""The version before `media`; a file of it is upgraded when it is opened."""
_CREATE_MEDIA = "CREATE TABLE media (digest TEXT PRIMARY KEY, payload BLOB NOT NULL)"
# One transaction, before the file is switched to WAL mode: the schema is in the main file, where truncating
# the WAL cannot remove it, and a kill in the middle leaves a file that counts as empty.
_SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE sessions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE records (seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX records_by_session ON records (session);
{_CREATE_MEDIA};
COMMIT;
"""
_UPGRADE = f"BEGIN IMMEDIATE; {_CREATE_MEDIA}; PRAGMA user_version = {_VERSION}; COMMIT"
_LAST_SEQ_SQL = "SELECT coalesce(max(seq), 0) FROM records"
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
# Session numbers kept in memory.
_MAX_CACHED_SESSIONS = 10_000

_Entry = tuple[str, bytes, "Future[int]", Mapping[str, bytes]]
"""Session, record, future, and the payloads that the record carries."""


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
        """Why this journal accepts no more records, or None."""
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
        self._session_ids: dict[str, int] = {}
        self._digests: set[str] = set()  # of the payloads that were written or queued through this object
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES
        try:
            with ExitStack() as resources:
                # Lock first: POSIX drops a process's locks on a file when any descriptor of it closes, so
                # even reading the header of a file that is already open here would release SQLite's locks.
                resources.enter_context(_lock_journal(self._file))
                _check_header(self._file)
                db = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
                resources.enter_context(closing(db))
                self._last_seq = _initialize(db, durability)
                owned = resources.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise self._error("cannot be opened", error) from error
        self._db = db
        self._writer = threading.Thread(target=self._run_writer, args=(owned,), name="journal", daemon=True)
        self._writer.start()

    def append(
        self, session: str, record: bytes, *, lazy: bool = False, media: Mapping[str, bytes] | None = None
    ) -> Future[int]:
        """Writes or queues a record; the future resolves with its sequence number once it is durable, and so
        are the payloads in `media`.

        Never raises and never waits for the disk: a rejected record returns a future that failed with
        JournalError.
        """
        future: Future[int] = Future()
        # An append cannot be undone, because later records build on it. A running future rejects cancel(),
        # and a cancelled asyncio waiter only stops waiting.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self.failure is not None:
                rejection = self._error("has failed and takes no more records", self.failure.__cause__)
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
                self._queue.append((session, record, future, new_media))
                self._last_future = future  # set after queueing: flush() must only wait for queued records
                if not lazy and not self._write_inline():
                    self._write_requested = True
                    self._wake.notify()
                return future
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
        """Yields the session's records in order of append, from a snapshot taken at the first `next`."""
        query = "SELECT record FROM records JOIN sessions ON id = session WHERE name = ? ORDER BY seq"
        return (record for (record,) in self._query(query, session))

    def replay(self) -> Iterator[tuple[str, bytes]]:
        """Yields every record with its session in order of append, from a snapshot taken at the first
        `next`."""
        # CROSS JOIN fixes the order of the loops: records stream by seq and are never sorted in memory.
        return self._query(
            "SELECT name, record FROM records CROSS JOIN sessions ON id = session ORDER BY seq"
        )

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
        error = JournalError(f"{self.path}: the journal {problem}" + (f": {cause}" if cause else ""))
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
                yield from db.execute(query, values)
        except sqlite3.Error as error:
            raise self._error("cannot be read", error) from error

    # -- writing in the calling thread (level `process`) -----------------------------------------------

    def _write_inline(self) -> bool:
        """Writes the queue in the calling thread; returns False if the writer thread has to do it."""
        is_busy = self._write_requested or self._writer_active or self._checkpoint_due
        if is_busy or self.durability != "process" or len(self._queue) > _MAX_INLINE_RECORDS:
            return False
        if sum([len(record) for _, record, _, _ in self._queue]) > _MAX_INLINE_BYTES:
            return False
        if any(media for _, _, _, media in self._queue):
            return False  # several statements, so a transaction of the writer thread
        batch, before = self._queue, self._last_seq
        try:
            self._queue = []
            values: list[int | bytes] = []
            for session, record, _, _ in batch:
                values += (self._session_ids.get(session) or self._add_session(session), record)
            rows = ", ".join(["(?, ?)"] * len(batch))
            # One statement is one transaction: a signal arrives before it starts or after it has finished.
            written = self._db.execute(f"INSERT INTO records (session, record) VALUES {rows}", values)
            self._last_seq = last = int(written.lastrowid or 0)
            self._after_commit()
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

    def _recover_batch(self, batch: list[_Entry], before: int) -> None:
        """After a signal: resolves the batch if it is in the file, otherwise queues it again."""
        (self._last_seq,) = self._db.execute(_LAST_SEQ_SQL).fetchone()
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
        """Writes any number of records in one transaction and resolves or fails all their futures."""
        try:
            self._begin()
            self._commit(batch)
        except Exception as error:
            self._fail(batch, error)
        else:
            _resolve(batch, self._last_seq)

    def _begin(self) -> None:
        """Opens a transaction; waits while another program has one open."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy_error(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_POLL_S)

    def _commit(self, batch: list[_Entry]) -> None:
        db, first = self._db, self._last_seq + 1
        rows = [
            (seq, self._session_ids.get(name) or self._add_session(name), record)
            for seq, (name, record, _, _) in enumerate(batch, first)
        ]
        for _, _, _, media in batch:
            for item in media.items():
                db.execute("INSERT OR IGNORE INTO media VALUES (?, ?)", item)
        db.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        db.execute("COMMIT")
        self._last_seq += len(batch)
        self._after_commit()

    def _checkpoint(self) -> None:
        # Replaces SQLite's automatic checkpoint, which runs inside COMMIT, before futures could resolve, and
        # leaves the WAL at its maximum length. TRUNCATE empties it: the disk space is freed, and cutting the
        # WAL never mixes its old pages with newer ones in the main file.
        try:
            wal_bytes = os.stat(f"{self._file}-wal").st_size
            (busy, _, _) = self._db.execute(_CHECKPOINT_SQL).fetchone()
        except Exception as error:
            self._fail([], error)
            wal_bytes, busy = 0, 0
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

    def _add_session(self, session: str) -> int:
        """Returns a session's number; adds a new session, inside the open transaction if there is one."""
        self._db.execute("INSERT OR IGNORE INTO sessions (name) VALUES (?)", (session,))
        (number,) = self._db.execute("SELECT id FROM sessions WHERE name = ?", (session,)).fetchone()
        if len(self._session_ids) >= _MAX_CACHED_SESSIONS:
            self._session_ids.clear()
        self._session_ids[session] = int(number)
        return int(number)

    def _fail(self, batch: list[_Entry], cause: Exception) -> None:
        with suppress(sqlite3.Error):  # SQLite has already rolled back after some failures
            self._db.rollback()
        with self._wake:
            self.failure = self._error("could not be written", cause)
            unresolved, self._queue = [*batch, *self._queue], []
        for _, _, future, _ in unresolved:
            if not future.done():  # after a failed checkpoint the batch itself is committed
                future.set_exception(self._error("could not be written", cause))


def _resolve(batch: list[_Entry], last: int) -> None:
    """Resolves the futures of a batch whose last record has this sequence number."""
    for seq, (_, _, future, _) in enumerate(batch, last - len(batch) + 1):
        if not future.done():  # a signal may have interrupted an earlier call
            future.set_result(seq)


def _is_busy_error(error: Exception) -> bool:
    """Whether another program holds SQLite's write lock."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY


# -- the file ------------------------------------------------------------------------------------------


@contextmanager
def _lock_journal(file: Path) -> Iterator[None]:
    """Locks the journal for one object; the kernel releases the lock when the process dies."""
    if not file.parent.is_dir():
        raise JournalError(f"{file}: folder {file.parent} does not exist")
    # A separate file, because SQLite locks the database itself. Never removed: one process could lock the
    # removed file while another locks a new one.
    with open(f"{file}-lock", "ab") as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{file}: the journal is already open, here or elsewhere") from None
        yield


def _check_header(file: Path) -> None:
    """Rejects a file that is not a journal before SQLite, which may write to a file it opens, opens it."""
    header = b""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        header = stream.read(72)
    if not header:  # a new file, or one whose creation was interrupted before the schema
        return
    found = f"a file that starts {header[:16]!r}"
    if len(header) == 72 and header.startswith(b"SQLite format 3\0"):
        version, application_id = struct.unpack(">60xI4xI", header)
        if application_id == _APPLICATION_ID and version in (_OLDER_VERSION, _VERSION):
            return
        found = f"an SQLite file with application_id {application_id:#x}, version {version}"
    expected = f"a journal with application_id {_APPLICATION_ID:#x}, version {_VERSION}"
    raise JournalError(f"{file}: found {found}, expected {expected}")


def _initialize(db: sqlite3.Connection, durability: Durability) -> int:
    """Creates the schema in a new file, sets the modes, and returns the last sequence number in use."""
    if db.execute("PRAGMA schema_version").fetchone() == (0,):
        db.executescript(_SCHEMA)
    elif db.execute("PRAGMA user_version").fetchone() == (_OLDER_VERSION,):
        db.executescript(_UPGRADE)
    db.executescript(
        f"PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0; {_DURABILITY_PRAGMAS[durability]}"
    )
    (last_seq,) = db.execute(_LAST_SEQ_SQL).fetchone()
    # From now on SQLite never waits: a slow reader must block neither the writer nor an appender.
    db.execute("PRAGMA busy_timeout = 0")
    return int(last_seq)
