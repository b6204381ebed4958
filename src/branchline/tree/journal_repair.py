"""Checks a journal for damage, and repairs it.

A check changes nothing. A repair writes a new file with everything that is intact and keeps the old one
beside it. Of a session with a damaged or missing record, only the records before that one are kept: what
follows was recorded in a context that the file no longer has.

Records after a damaged page of the WAL, which SQLite drops, are recovered too: each is proven intact by its
own checksum.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from branchline.core.errors import JournalError
from branchline.core.suggestions import did_you_mean_path
from branchline.tree.journal_file import (
    CHECKSUM_OFFSET,
    SCHEMA,
    SEED_MASK,
    check_header,
    is_intact,
    keep_copy,
    lock_journal,
    make_private,
    read_wal,
    session_seed,
)

_MAX_MESSAGES = 20
"""Messages about damaged pages in a report; SQLite has one for each page."""


@dataclass(frozen=True)
class JournalDamage:
    """One thing that is wrong with a journal."""

    problem: str
    session: str | None = None
    """The session whose record is damaged; None if it is unknown, or all may be affected."""


@dataclass(frozen=True)
class JournalReport:
    """What a check found."""

    path: Path
    records: int
    """The records that are intact."""
    sessions: int
    unchecked: int
    """How many of them have no checksum, because an older version wrote them."""
    damages: tuple[JournalDamage, ...]
    is_open: bool
    """Whether a gateway has the journal open; then the end of its WAL is not checked."""


@dataclass(frozen=True)
class RepairReport:
    """What a repair did."""

    before: JournalReport
    copy: Path | None
    """The journal as it was; None if there was nothing to repair."""
    kept: int
    dropped: dict[str, int]
    """Intact records that were dropped because they follow a damaged one, by session."""


@dataclass(frozen=True)
class _Contents:
    """Everything in a file that can be read."""

    sessions: dict[int, str]
    records: dict[int, tuple[int, bytes, int | None]]
    """Session number, bytes and checksum by sequence number."""
    missing: dict[int, int | None]
    """Sequence numbers that are in use but cannot be read, with the session number if the index has it."""
    pages: tuple[str, ...]
    """What SQLite found wrong with the pages."""


def check_journal(path: str | os.PathLike[str]) -> JournalReport:
    """Reads everything in a journal. Raises JournalError if the file is not a journal."""
    file = Path(path).resolve()
    _require_file(Path(path))
    with ExitStack() as resources:
        is_open = False
        try:
            resources.enter_context(lock_journal(file))
        except JournalError:
            is_open = True  # by a gateway, which has checked the header
        if not is_open:
            check_header(file)
        # Without a writer, a copy is read: a connection to the file itself would make files beside it.
        folder = resources.enter_context(tempfile.TemporaryDirectory(dir=file.parent))
        source = file if is_open else _copy_main(file, Path(folder), only_used=True)
        contents, damaged_media = _read_contents(source)
        damages = [damage for _, damage in sorted(_find_damages(contents).items())]
        damages += [JournalDamage(text) for text in (*contents.pages, *damaged_media)]
        if not is_open and (wal := read_wal(file)).dropped_commits:
            damages.append(
                JournalDamage(
                    f"the WAL has a damaged page: {wal.dropped_bytes} bytes at its end with "
                    f"{wal.dropped_commits} complete commits are dropped when the journal is opened"
                )
            )
    intact = len(contents.records) - sum(seq in contents.records for seq in _find_damages(contents))
    unchecked = sum(checksum is None for _, _, checksum in contents.records.values())
    return JournalReport(Path(path), intact, len(contents.sessions), unchecked, tuple(damages), is_open)


def repair_journal(path: str | os.PathLike[str]) -> RepairReport:
    """Replaces a damaged journal by one with everything that is intact; an intact one is left unchanged.

    Raises JournalError if a gateway has it open, or if the file is not a journal.
    """
    file = Path(path).resolve()
    _require_file(Path(path))
    with lock_journal(file):
        pass  # fails if it is open
    before = check_journal(file)
    if not before.damages:
        return RepairReport(before, None, before.records, {})
    with lock_journal(file), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        merged = _copy_main(file, Path(folder), only_used=False)
        contents, _ = _read_contents(merged)
        kept, dropped = _records_to_keep(contents)
        repaired = Path(folder) / "repaired"
        make_private(repaired)
        _write_contents(repaired, contents, kept, merged)
        copy = keep_copy(file)
        # The WAL belongs to the old file: with the new one it would damage it.
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{file}{suffix}")
        os.replace(repaired, file)
    return RepairReport(before, copy, len(kept), dropped)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise JournalError(f"{path}: there is no such file, expected a journal{did_you_mean_path(path)}")


def _copy_main(file: Path, folder: Path, *, only_used: bool) -> Path:
    """Copies a journal into one file: the main file with the pages of its WAL.

    With `only_used`, those pages that SQLite uses; otherwise also intact pages after a damaged one.
    """
    wal = read_wal(file)
    data = bytearray(file.read_bytes())
    frames = wal.frames[: wal.used_frames] if only_used else wal.frames
    for frame in frames:
        if frame.is_intact:
            start = (frame.page_number - 1) * wal.page_size
            data.extend(bytes(max(0, start + wal.page_size - len(data))))
            data[start : start + wal.page_size] = frame.page
    if len(data) >= 100:
        data[18:20] = b"\1\1"  # no WAL mode, so that no WAL is looked for
        if frames and wal.page_size:
            data[28:32] = (len(data) // wal.page_size).to_bytes(4, "big")
    copy = folder / "copy"
    copy.write_bytes(data)
    return copy


# -- reading -------------------------------------------------------------------------------------------


def _read_contents(file: Path) -> tuple[_Contents, list[str]]:
    """Returns everything that can be read, and what is wrong with the media."""
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as db:
            db.text_factory = lambda data: data.decode(errors="replace")
            sessions = dict(_readable_rows(db, "SELECT id, name FROM sessions"))
            columns = [row[1] for row in db.execute("PRAGMA table_info(records)")]
            checksum = "checksum" if "checksum" in columns else "NULL"
            records = _readable_records(db, checksum)
            indexed = dict(
                _readable_rows(db, "SELECT rowid, session FROM records INDEXED BY records_by_session")
            )
            last = max([*records, *indexed], default=0)
            missing = {seq: indexed.get(seq) for seq in range(1, last + 1) if seq not in records}
            return _Contents(sessions, records, missing, _damaged_pages(db)), _damaged_media(db)
    except sqlite3.Error as error:
        raise JournalError(f"{file}: cannot be read at all: {error}") from error


def _readable_rows(db: sqlite3.Connection, query: str) -> Iterator[Any]:
    """Yields rows up to the first that cannot be read."""
    with suppress(sqlite3.DatabaseError):
        yield from db.execute(query)


def _readable_records(db: sqlite3.Connection, checksum: str) -> dict[int, tuple[int, bytes, int | None]]:
    """Returns the records by sequence number; jumps over those that cannot be read."""
    last = max((row[0] for row in _readable_rows(db, "SELECT max(seq) FROM records")), default=None)
    if last is None:  # the end of the table is damaged: the index may have it
        query = "SELECT max(rowid) FROM records INDEXED BY records_by_session"
        last = max((row[0] for row in _readable_rows(db, query)), default=0)
    records: dict[int, tuple[int, bytes, int | None]] = {}
    position = 0
    while position < (last or 0):
        query = (
            f"SELECT seq, session, CAST(record AS BLOB), {checksum} FROM records WHERE seq > {position} "
            "ORDER BY seq"
        )
        for seq, session, record, stored in _readable_rows(db, query):
            if not isinstance(seq, int) or seq <= position:
                break  # a damaged page is not in order
            position = seq
            if isinstance(session, int) and isinstance(record, bytes):
                records[seq] = (session, record, stored if isinstance(stored, int) else None)
        position += 1
    return records


def _damaged_pages(db: sqlite3.Connection) -> tuple[str, ...]:
    try:
        found = [text for (text,) in db.execute(f"PRAGMA integrity_check({_MAX_MESSAGES})")]
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    return tuple(f"SQLite: {text}" for text in found if text != "ok")


def _damaged_media(db: sqlite3.Connection) -> list[str]:
    return [
        f"media {digest}: the payload is damaged"
        for digest, payload in _readable_rows(db, "SELECT digest, payload FROM media")
        if not isinstance(payload, bytes) or xxhash.xxh3_128_hexdigest(payload) != digest
    ]


# -- checking ------------------------------------------------------------------------------------------


def _find_damages(contents: _Contents) -> dict[int, JournalDamage]:
    """Returns what is wrong with records, by sequence number."""
    damages: dict[int, JournalDamage] = {}
    for seq, number in contents.missing.items():
        name = None if number is None else contents.sessions.get(number)
        damages[seq] = JournalDamage(f"record {seq} is missing or cannot be read", name)
    for seq, (number, record, checksum) in contents.records.items():
        session = contents.sessions.get(number)
        if session is None:
            damages[seq] = JournalDamage(f"record {seq} belongs to session number {number}, which is unknown")
        elif not is_intact(session, seq, record, checksum):
            problem = f"record {seq} ({len(record)} bytes) does not match its checksum"
            damages[seq] = JournalDamage(problem, session)
        elif checksum is None and not _is_msgpack(record):
            damages[seq] = JournalDamage(f"record {seq} ({len(record)} bytes) cannot be decoded", session)
    return damages


def _is_msgpack(record: bytes) -> bool:
    try:
        msgspec.msgpack.decode(record)
    except msgspec.DecodeError:
        return False
    return True


def _records_to_keep(contents: _Contents) -> tuple[list[int], dict[str, int]]:
    """Returns the intact records before the first damage of their session, and the number of the others."""
    damages = _find_damages(contents)
    first_damage: dict[str, int] = {}
    for seq, damage in sorted(damages.items()):
        if damage.session is not None:
            first_damage.setdefault(damage.session, seq)
    kept: list[int] = []
    dropped = dict.fromkeys(first_damage, 0)
    for seq, (number, _, _) in sorted(contents.records.items()):
        if seq in damages:
            continue
        session = contents.sessions[number]
        if seq < first_damage.get(session, seq + 1):
            kept.append(seq)
        else:
            dropped[session] += 1
    return kept, dropped


def _write_contents(file: Path, contents: _Contents, kept: list[int], source: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.executescript(SCHEMA)
        db.execute("BEGIN")
        numbers = {contents.records[seq][0] for seq in kept}
        names = [(number, contents.sessions[number]) for number in sorted(numbers)]
        db.executemany("INSERT INTO sessions VALUES (?, ?)", names)
        # With new numbers, without gaps: a gap is a missing record.
        for seq, old_seq in enumerate(kept, 1):
            number, record, checksum = contents.records[old_seq]
            if checksum is not None:
                seed = session_seed(contents.sessions[number]) + seq
                checksum = xxhash.xxh3_64_intdigest(record, seed & SEED_MASK) - CHECKSUM_OFFSET
            db.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (seq, number, record, checksum))
        with closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old:
            for digest, payload in _readable_rows(old, "SELECT digest, payload FROM media"):
                if isinstance(payload, bytes) and xxhash.xxh3_128_hexdigest(payload) == digest:
                    db.execute("INSERT OR IGNORE INTO media VALUES (?, ?)", (digest, payload))
        db.execute("COMMIT")
