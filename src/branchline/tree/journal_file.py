"""The journal's file: whose it is, what is in it, how safe a commit is.

A file that is not ours is refused before anything is written to it, and so is one that somebody has open.
"""

from __future__ import annotations

import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

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
_VERSION = 2
# One transaction, before the file turns to WAL mode: the schema lies in the main file, where no cut through
# the WAL can take it away, and a kill in the middle leaves a file that counts as empty.
_SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE sessions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE records (seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX records_by_session ON records (session);
COMMIT;
"""
LAST_SEQ_SQL = "SELECT coalesce(max(seq), 0) FROM records"


@contextmanager
def lock_journal(file: Path) -> Iterator[None]:
    """Hold the journal for one object alone; the kernel lets go when the process dies, however it dies."""
    if not file.parent.is_dir():
        raise JournalError(f"{file}: folder {file.parent} does not exist")
    # A file of its own, because SQLite locks the database itself; never removed, because someone about to
    # lock the removed file and someone who makes it anew would both get in.
    with open(f"{file}-lock", "ab") as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{file}: the journal is already open, here or elsewhere") from None
        yield


def check_header(file: Path) -> None:
    """Refuse what is not ours before SQLite, which may write to what it opens, gets to see it."""
    header = b""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        header = stream.read(72)
    if not header:  # new, or made and cut off before the schema
        return
    found = f"a file that starts {header[:16]!r}"
    if len(header) == 72 and header.startswith(b"SQLite format 3\0"):
        version, application_id = struct.unpack(">60xI4xI", header)
        if (application_id, version) == (_APPLICATION_ID, _VERSION):
            return
        found = f"an SQLite file with application_id {application_id:#x}, version {version}"
    expected = f"a journal with application_id {_APPLICATION_ID:#x}, version {_VERSION}"
    raise JournalError(f"{file}: found {found}, expected {expected}")


def initialize(db: sqlite3.Connection, durability: Durability) -> int:
    """Make the schema if the file is new, set the modes; return the last sequence number in use."""
    if db.execute("PRAGMA schema_version").fetchone() == (0,):
        db.executescript(_SCHEMA)
    db.executescript(
        f"PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0; {_DURABILITY_PRAGMAS[durability]}"
    )
    (last_seq,) = db.execute(LAST_SEQ_SQL).fetchone()
    # From here on no waiting inside SQLite: a slow reader must hold up neither the writer nor an appender.
    db.execute("PRAGMA busy_timeout = 0")
    return int(last_seq)
