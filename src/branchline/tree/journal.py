"""The journal: opaque records per session, in order, that outlive the process that wrote them.

Its idea is one writer. `append` only queues; a single thread takes everything that is queued, commits it
in one SQLite transaction and then resolves the futures, so that under load many appends share one commit
(and, at level `disk`, one fsync) and a lone append waits for nobody.

Its invariant: **a record whose future has resolved is found by every later reader, behind all records that
were appended before it.** Whatever a crash cuts off is a tail of unresolved appends. The other way round it
promises nothing: a record whose future failed or never resolved may still turn up after a crash.

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
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from branchline.core.errors import JournalError

if sys.platform != "win32":
    import fcntl

Durability = Literal["process", "disk"]

# NORMAL leaves a commit in the kernel's page cache, which survives kill -9; FULL fsyncs the WAL at every
# commit, which survives power loss. (fullfsync: on macOS a plain fsync stops at the drive's own cache.)
_LEVEL_SQL: dict[Durability, str] = {
    "process": "PRAGMA synchronous = NORMAL",
    "disk": "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON",
}

_APPLICATION_ID = 0x42726C6E  # "Brln", at a fixed place of the file's header
_VERSION = 1
# One transaction, before the file turns to WAL mode: the schema lies in the main file, so that no cut
# through the WAL can take it away, and a kill in the middle leaves a file that counts as empty.
_SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE sessions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE records (seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX records_by_session ON records (session);
COMMIT;
"""
_ADD_SESSION = "INSERT OR IGNORE INTO sessions (name) VALUES (?)"
_ADD_RECORD = "INSERT INTO records VALUES (?, (SELECT id FROM sessions WHERE name = ?), ?)"

# The WAL is copied into the main file each time it has grown by this much. Larger: fewer fsyncs and fewer
# pages copied twice. Smaller: less to recover at open, and a shorter stall of the writer while it copies.
_CHECKPOINT_BYTES = 16 * 2**20
# SQLite refuses rows near 10^9 bytes; found out in the transaction, that would fail everybody's records.
_MAX_RECORD_BYTES = 512 * 2**20

_Entry = tuple[str, bytes, "Future[int]"]


class Journal:
    """One open journal file; safe to use from all threads of one process, but not across a fork.

    Close it: the writer is a daemon thread, so what is still queued when the interpreter exits is lost.
    Callbacks of futures run in the writer thread: they must not wait for this journal.
    """

    def __init__(self, path: str | os.PathLike[str], *, durability: Durability = "process") -> None:
        self._path = Path(path)
        self._durability = durability
        self._file = self._path.resolve()  # one lock per file, whatever link or folder it is opened through
        self._wake = threading.Condition()  # guards the queue, its tail, the two ends (failed, closed)
        self._queue: list[_Entry] = []
        self._tail: Future[int] | None = None
        self._failed: JournalError | None = None
        self._closed = False
        self._commits = 0
        try:
            with ExitStack() as resources:
                # The lock comes first: POSIX drops all of a process's locks on a file when any descriptor
                # of it closes, so even peeking at a file that is open here would strip SQLite's locks.
                resources.enter_context(_locked(self._file))
                _check_header(self._file)
                db = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
                resources.enter_context(closing(db))
                self._last_seq = _set_up(self._file, db, durability)
                owned = resources.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"{self._path}: cannot be opened: {error}") from error
        self._checkpoint_at = _CHECKPOINT_BYTES
        self._writer = threading.Thread(
            target=self._write, args=(db, owned), name=f"journal {self._path.name}", daemon=True
        )
        self._writer.start()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def durability(self) -> Durability:
        return self._durability

    @property
    def commits(self) -> int:
        """Transactions written through this object so far; records per commit is what grouping gained."""
        return self._commits

    @property
    def failed(self) -> JournalError | None:
        """Why this journal takes no more records, or None while it does."""
        return self._failed

    def append(self, session: str, record: bytes) -> Future[int]:
        """Queue a record; the future resolves with its sequence number once it is durable.

        Never raises and never waits: a refusal is a future that has already failed with JournalError.
        """
        future: Future[int] = Future()
        # An append cannot be taken back: later records build on it, whether or not somebody still waits.
        # A running future refuses cancel(), and a cancelled asyncio waiter just stops listening.
        future.set_running_or_notify_cancel()
        refusal = self._unstorable(session, record)
        with self._wake:
            if self._failed is not None:
                refusal = self._error(f"takes no more records since it failed: {self._failed.__cause__}")
            elif self._closed:
                refusal = self._error("is closed")
            if refusal is None:
                self._queue.append((session, record, future))
                self._tail = future
                self._wake.notify()
        if refusal is not None:
            future.set_exception(refusal)
        return future

    def flush(self) -> None:
        """Wait until everything appended so far is committed; JournalError if the journal has failed."""
        with self._wake:
            tail = self._tail
        if tail is not None:
            tail.exception()  # waits; futures resolve in order, so the last one stands for all
        if self._failed is not None:
            raise self._error("has failed", self._failed.__cause__)

    def sessions(self) -> list[str]:
        """All sessions, in the order of their first records."""
        return [name for (name,) in self._select("SELECT name FROM sessions ORDER BY id")]

    def read(self, session: str) -> Iterator[bytes]:
        """The session's records in order of append, as committed when the first one is taken."""
        query = (
            "SELECT record FROM records WHERE session = (SELECT id FROM sessions WHERE name = ?) ORDER BY seq"
        )
        return (record for (record,) in self._select(query, session))

    def replay(self) -> Iterator[tuple[str, bytes]]:
        """Every record with its session, in order of append, as committed when the first one is taken."""
        # CROSS JOIN pins the loop order: records stream by seq and are never sorted in memory.
        query = "SELECT name, record FROM records CROSS JOIN sessions ON id = session ORDER BY seq"
        return self._select(query)

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
        error = JournalError(f"{self._path}: the journal {what}" + (f": {cause}" if cause else ""))
        error.__cause__ = cause
        return error

    def _unstorable(self, session: str, record: bytes) -> JournalError | None:
        # One caller's bad value must not fail the transaction it would share with others.
        if len(record) > _MAX_RECORD_BYTES:
            return self._error(f"got a record of {len(record)} bytes, expected at most {_MAX_RECORD_BYTES}")
        try:
            session.encode()
        except UnicodeEncodeError as error:
            return self._error(f"got session {session!r}, expected text that UTF-8 can hold", error)
        return None

    def _select(self, query: str, *values: str) -> Iterator[Any]:
        if self._closed:
            raise self._error("is closed")
        return self._rows(query, values)

    def _rows(self, query: str, values: tuple[str, ...]) -> Iterator[Any]:
        # A connection per reader: its own snapshot, from any thread, never in the writer's way.
        try:
            uri = f"{self._file.as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as db:
                yield from db.execute(query, values)
        except sqlite3.Error as error:
            raise self._error("cannot be read", error) from error

    def _write(self, db: sqlite3.Connection, owned: ExitStack) -> None:
        """The writer thread: the only place that writes. `owned` closes the connection, then the lock."""
        with owned:
            while batch := self._take():
                try:
                    first_seq = self._commit(db, batch)
                except Exception as error:  # whatever it is, those who wait hear of it
                    self._fail(db, error, batch)
                    continue
                for seq, (_, _, future) in enumerate(batch, first_seq):
                    future.set_result(seq)
                try:
                    self._checkpoint(db)
                except Exception as error:  # these records are safe in the WAL, but no more can follow
                    self._fail(db, error, [])

    def _take(self) -> list[_Entry]:
        """Everything queued, at least one entry; nothing once the journal is closed and the queue empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closed)
            batch, self._queue = self._queue, []
            return batch

    def _commit(self, db: sqlite3.Connection, batch: list[_Entry]) -> int:
        first_seq = self._last_seq + 1
        db.execute("BEGIN IMMEDIATE")
        db.executemany(_ADD_SESSION, [(session,) for session in dict.fromkeys(entry[0] for entry in batch)])
        db.executemany(
            _ADD_RECORD,
            [(seq, session, record) for seq, (session, record, _) in enumerate(batch, first_seq)],
        )
        db.execute("COMMIT")
        self._last_seq += len(batch)
        self._commits += 1
        return first_seq

    def _fail(self, db: sqlite3.Connection, cause: Exception, batch: list[_Entry]) -> None:
        with suppress(sqlite3.Error):  # SQLite rolls some failures back by itself
            db.rollback()
        with self._wake:
            self._failed = self._error("could not be written", cause)
            batch, self._queue = batch + self._queue, []
        for _, _, future in batch:
            future.set_exception(self._error("could not be written", cause))

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        # Ours in place of SQLite's automatic one, which runs inside COMMIT, before futures could resolve,
        # and leaves the copied WAL at its greatest length. TRUNCATE empties it: the disk space comes back,
        # and a cut through the WAL never mixes its old pages with newer ones in the main file.
        wal_bytes = os.stat(f"{self._file}-wal").st_size
        if wal_bytes < self._checkpoint_at:
            return
        db.execute("PRAGMA busy_timeout = 0")  # a reader that holds the WAL must not hold the writer
        (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        db.execute("PRAGMA busy_timeout = 5000")
        # Held up by a reader: try again after as much growth again, not at every commit.
        self._checkpoint_at = _CHECKPOINT_BYTES + (wal_bytes if busy else 0)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the journal for this object alone; the kernel lets go when the process dies, however it dies."""
    if not file.parent.is_dir():
        raise JournalError(f"{file}: folder {file.parent} does not exist")
    if sys.platform == "win32":
        yield
        return
    # A file of its own, because SQLite locks the database itself; never removed, because whoever waits
    # for a removed lock file and whoever makes it anew would both hold it.
    descriptor = os.open(f"{file}-lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(
                f"{file}: the journal is already open, in another process or in this one"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _check_header(file: Path) -> None:
    """Refuse what is not ours before SQLite, which may write to what it opens, sees it."""
    try:
        with file.open("rb") as stream:
            header = stream.read(72)
    except FileNotFoundError:
        return
    if not header:  # made, and cut off before the schema
        return
    if len(header) < 72 or not header.startswith(b"SQLite format 3\0"):
        raise JournalError(f"{file}: not a journal: found {header[:16]!r}, expected an SQLite file")
    version, application_id = struct.unpack(">60xI4xI", header)
    if application_id != _APPLICATION_ID:
        raise JournalError(
            f"{file}: not a journal: found application_id {application_id:#x}, expected {_APPLICATION_ID:#x}"
        )
    _check_version(file, version)


def _check_version(file: Path, version: int) -> None:
    if version != _VERSION:
        raise JournalError(f"{file}: found journal version {version}, expected {_VERSION}")


def _set_up(file: Path, db: sqlite3.Connection, durability: Durability) -> int:
    """Make the schema where there is none, set the level; return the last sequence number."""
    if not db.execute("PRAGMA schema_version").fetchone()[0]:
        db.executescript(_SCHEMA)
    _check_version(file, db.execute("PRAGMA user_version").fetchone()[0])  # a newer one may lie in the WAL
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise JournalError(f"{file}: found journal mode {mode}, expected wal; is it on a local disk?")
    db.executescript(f"PRAGMA wal_autocheckpoint = 0; {_LEVEL_SQL[durability]}")
    (last_seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()
    return int(last_seq)
