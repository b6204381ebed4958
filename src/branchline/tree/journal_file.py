"""The file of a journal: its schema and versions, its lock, its checksums, and the end of its WAL.

A record has a checksum over its session's name, its sequence number and its bytes. A record that was changed,
moved to another session or to another place does not match it. Records of older files have none.

SQLite drops the end of a WAL from the first frame on that is incomplete or damaged. `read_wal` finds that
frame without SQLite, which may overwrite what it drops.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from branchline.core.choices import Durability
from branchline.core.errors import JournalError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("branchline.journal")

# NORMAL leaves a commit in the kernel's page cache, which survives kill -9; FULL fsyncs the WAL at every
# commit, which survives power loss. (fullfsync: on macOS a plain fsync stops at the drive's own cache.)
_DURABILITY_PRAGMAS: dict[Durability, str] = {
    "process": "PRAGMA synchronous = NORMAL",
    "disk": "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON",
}
_APPLICATION_ID = 0x42726C6E  # "Brln"
VERSION = 4
_OLDER_VERSIONS = (2, 3)
"""Version 2 has no `media`, versions 2 and 3 have no checksums; a file of them is upgraded when opened."""
_CREATE_MEDIA = "CREATE TABLE media (digest TEXT PRIMARY KEY, payload BLOB NOT NULL)"
_ADD_CHECKSUM = "ALTER TABLE records ADD COLUMN checksum INTEGER"
# One transaction, before the file is switched to WAL mode: the schema is in the main file, where truncating
# the WAL cannot remove it, and a kill in the middle leaves a file that counts as empty.
SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE sessions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE records
    (seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, record BLOB NOT NULL, checksum INTEGER);
CREATE INDEX records_by_session ON records (session);
{_CREATE_MEDIA};
COMMIT;
"""
LAST_SEQ_SQL = "SELECT coalesce(max(seq), 0) FROM records"
_FILE_MODE = 0o600
"""A journal has prompts, answers and hashes of keys: only its owner may read it."""
_FILE_SUFFIXES = ("", "-wal", "-shm", "-lock")


# -- checksums -----------------------------------------------------------------------------------------


SEED_MASK, CHECKSUM_OFFSET = 2**64 - 1, 2**63
"""A checksum is `xxh3_64(record, seed)`, moved to the range of SQLite's integers; the seed is that of the
session plus the sequence number."""


def session_seed(session: str) -> int:
    """The part of a checksum's seed that all records of a session share."""
    return xxhash.xxh3_64_intdigest(session.encode())


def is_intact(session: str, seq: int, record: bytes | None, checksum: int | None) -> bool:
    """Whether a record is what was written; True for a record of an older file, which has no checksum."""
    if checksum is None or record is None:
        return record is not None
    return checksum == xxhash.xxh3_64_intdigest(record, (session_seed(session) + seq) & SEED_MASK) - (
        CHECKSUM_OFFSET
    )


@dataclass(frozen=True)
class DamagedRecord:
    """A record whose bytes are not those that were written."""

    seq: int
    size: int

    def __str__(self) -> str:
        return f"record {self.seq} ({self.size} bytes) does not match its checksum"


# -- errors of SQLite ----------------------------------------------------------------------------------

# Failures that may pass: no space, not allowed to grow, locked by another program. Failures of fsync are not
# among them: the kernel may have dropped what it could not write.
_PASSING_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN)
_PASSING_IO_ERRORS = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
_DAMAGE_ERRORS = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_busy_error(error: Exception) -> bool:
    """Whether another program holds SQLite's write lock."""
    return _error_code(error) & 0xFF == sqlite3.SQLITE_BUSY


def may_pass(error: Exception) -> bool:
    """Whether a write that failed may succeed later, without any change to the file."""
    return _error_code(error) & 0xFF in _PASSING_ERRORS or _error_code(error) in _PASSING_IO_ERRORS


def repair_hint(path: Path, cause: BaseException | None) -> str:
    """What to do about a file that SQLite cannot read, for the end of an error; empty for other causes."""
    if _error_code(cause) & 0xFF not in _DAMAGE_ERRORS:
        return ""
    return f". Repair it with: branchline journal repair {path}"


def _error_code(error: BaseException | None) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code


# -- opening -------------------------------------------------------------------------------------------


@contextmanager
def lock_journal(file: Path) -> Iterator[None]:
    """Locks the journal for one object; the kernel releases the lock when the process dies."""
    if not file.parent.is_dir():
        raise JournalError(f"{file}: folder {file.parent} does not exist")
    # A separate file, because SQLite locks the database itself. Never removed: one process could lock the
    # removed file while another locks a new one.
    with open(f"{file}-lock", "ab", opener=_open_private) as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{file}: the journal is already open, here or elsewhere") from None
        yield


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


def make_private(file: Path) -> None:
    """Creates the file if there is none, and lets only its owner read it and the files beside it.

    SQLite creates a WAL with the mode of its main file.
    """
    if not file.exists():
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, _FILE_MODE))
    for suffix in _FILE_SUFFIXES:
        with suppress(OSError):  # it does not exist, or belongs to another user
            os.chmod(f"{file}{suffix}", _FILE_MODE)


def check_header(file: Path) -> None:
    """Rejects a file that is not a journal before SQLite, which may write to a file it opens, opens it."""
    header = b""
    with suppress(FileNotFoundError), file.open("rb") as stream:
        header = stream.read(72)
    if not header:  # a new file, or one whose creation was interrupted before the schema
        return
    found = f"a file that starts {header[:16]!r}"
    if len(header) == 72 and header.startswith(b"SQLite format 3\0"):
        version, application_id = struct.unpack(">60xI4xI", header)
        if application_id == _APPLICATION_ID and version in (*_OLDER_VERSIONS, VERSION):
            return
        found = f"an SQLite file with application_id {application_id:#x}, version {version}"
    expected = f"a journal with application_id {_APPLICATION_ID:#x}, version {VERSION}"
    raise JournalError(f"{file}: found {found}, expected {expected}")


def initialize(db: sqlite3.Connection, durability: Durability) -> int:
    """Creates the schema in a new file, sets the modes, and returns the last sequence number in use."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if db.execute("PRAGMA schema_version").fetchone() == (0,):
        db.executescript(SCHEMA)
    elif version in _OLDER_VERSIONS:
        statements = [_CREATE_MEDIA] * (version == 2) + [_ADD_CHECKSUM, f"PRAGMA user_version = {VERSION}"]
        db.executescript(f"BEGIN IMMEDIATE; {'; '.join(statements)}; COMMIT")
    db.executescript(
        f"PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0; {_DURABILITY_PRAGMAS[durability]}"
    )
    (last_seq,) = db.execute(LAST_SEQ_SQL).fetchone()
    # From now on SQLite never waits: a slow reader must block neither the writer nor an appender.
    db.execute("PRAGMA busy_timeout = 0")
    return int(last_seq)


# -- the WAL -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WalFrame:
    """One page in a WAL."""

    page_number: int
    page: bytes
    ends_commit: bool
    is_intact: bool
    """Whether its checksum follows from that of the frame before it."""


@dataclass(frozen=True)
class Wal:
    """The frames of a WAL since it was last emptied; older ones after them are no part of the journal."""

    frames: tuple[WalFrame, ...]
    page_size: int
    partial_bytes: int
    """Bytes of an incomplete frame at the end."""

    @property
    def used_frames(self) -> int:
        """The number of frames that SQLite uses: up to the last complete commit before any damage."""
        used = 0
        for index, frame in enumerate(self.frames, 1):
            if not frame.is_intact:
                break
            if frame.ends_commit:
                used = index
        return used

    @property
    def dropped_bytes(self) -> int:
        """Bytes that SQLite drops when it opens the journal."""
        return (len(self.frames) - self.used_frames) * (_FRAME_HEADER + self.page_size) + self.partial_bytes

    @property
    def dropped_commits(self) -> int:
        """Complete commits among them. They follow a damaged frame; a crash alone leaves none."""
        return sum(frame.ends_commit for frame in self.frames[self.used_frames :])


_WAL_HEADER, _FRAME_HEADER = 32, 24
_LITTLE_ENDIAN_MAGIC, _BIG_ENDIAN_MAGIC = 0x377F0682, 0x377F0683
_EMPTY_WAL = Wal((), 0, 0)


def read_wal(file: Path) -> Wal:
    """Reads the WAL of a journal that is not open. Format: https://www.sqlite.org/fileformat2.html#walformat"""
    try:
        data = Path(f"{file}-wal").read_bytes()
    except FileNotFoundError:
        return _EMPTY_WAL
    if len(data) < _WAL_HEADER + _FRAME_HEADER:
        return Wal((), 0, max(0, len(data) - _WAL_HEADER))
    magic, _, page_size, _, *header_rest = struct.unpack(">4I8s2I", data[:_WAL_HEADER])
    salts, stored = header_rest[0], (header_rest[1], header_rest[2])
    dtype = ">u4" if magic == _BIG_ENDIAN_MAGIC else "<u4"
    is_valid = magic in (_LITTLE_ENDIAN_MAGIC, _BIG_ENDIAN_MAGIC) and stored == _add_to_checksum(
        (0, 0), np.frombuffer(data[:24], dtype)
    )
    if not is_valid:
        # SQLite ignores the whole WAL. Its frames show their salts; the page size is in the main file.
        salts = data[_WAL_HEADER + 8 : _WAL_HEADER + 16]
        with file.open("rb") as main:
            page_size = struct.unpack(">16xH", main.read(18))[0]
        page_size = 65536 if page_size == 1 else page_size
    frames: list[WalFrame] = []
    position, size = _WAL_HEADER, _FRAME_HEADER + page_size
    while position + size <= len(data) and data[position + 8 : position + 16] == salts:
        frame = data[position : position + size]
        number, commit_size, first, second = struct.unpack(">II8x2I", frame[:_FRAME_HEADER])
        words = np.frombuffer(frame[:8] + frame[_FRAME_HEADER:], dtype)
        follows = is_valid and (first, second) == _add_to_checksum(stored, words)
        frames.append(WalFrame(number, frame[_FRAME_HEADER:], commit_size > 0, follows))
        stored, is_valid = (first, second), True
        position += size
    rest = data[position : position + size]
    is_partial = 0 < len(rest) < size and rest[8:16] == salts[: max(0, len(rest) - 8)]
    return Wal(tuple(frames), page_size, len(rest) if is_partial else 0)


def _add_to_checksum(start: tuple[int, int], words: NDArray[np.uint32]) -> tuple[int, int]:
    """SQLite's checksum of 32-bit words that follow words with the checksum `start`.

    Each pair (x, y) changes (a, b) to (a + x + b, b + y + a + x + b). Over many pairs this is a sum with
    Fibonacci numbers as weights, which numpy computes at once.
    """
    pairs = words.astype(np.uint64).reshape(-1, 2)
    fibonacci = _fibonacci(2 * len(pairs) + 2)
    # The weights of the pairs, of which the last has the smallest.
    one, two, three = (fibonacci[first : first + 2 * len(pairs) : 2][::-1] for first in (0, 1, 2))
    x, y, mask = pairs[:, 0], pairs[:, 1], np.uint64(0xFFFFFFFF)
    a = int(((two * x) & mask).sum() + ((one * y) & mask).sum())
    b = int(((three * x) & mask).sum() + ((two * y) & mask).sum())
    before, at, after = (int(number) for number in fibonacci[2 * len(pairs) - 1 :])
    a += before * start[0] + at * start[1]
    b += at * start[0] + after * start[1]
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF


@cache
def _fibonacci(last: int) -> NDArray[np.uint64]:
    """The Fibonacci numbers from 0 up to the one with index `last - 1`, modulo 2**32."""
    numbers = [0, 1]
    while len(numbers) < last:
        numbers.append((numbers[-1] + numbers[-2]) & 0xFFFFFFFF)
    return np.array(numbers, np.uint64)


def report_dropped_tail(file: Path) -> None:
    """Logs what SQLite will drop from the end of the WAL. If there are complete commits in it, keeps a copy
    of the journal first."""
    wal = read_wal(file)
    if not wal.dropped_bytes:
        return
    if not wal.dropped_commits:
        log.warning("%s: dropped %d bytes of a commit that is not complete", file, wal.dropped_bytes)
        return
    log.error(
        "%s: dropped %d bytes at the end, with %d complete commits after a damaged page. Recover them with: "
        "branchline journal repair %s",
        *(file, wal.dropped_bytes, wal.dropped_commits, keep_copy(file)),
    )


# -- copies --------------------------------------------------------------------------------------------


def keep_copy(file: Path) -> Path:
    """Copies a journal that is not open and its WAL beside it, under a new name; returns the copy."""
    number = 1
    while (copy := file.with_name(f"{file.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("", "-wal"):
        if Path(f"{file}{suffix}").exists():
            shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
            os.chmod(f"{copy}{suffix}", _FILE_MODE)
    return copy
