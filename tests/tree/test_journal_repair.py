"""A check finds every damaged byte of a record, and a repair keeps exactly the records before it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import JournalError
from branchline.tree.journal import Journal
from branchline.tree.journal_file import CHECKSUM_OFFSET, SEED_MASK, is_intact, read_wal, session_seed
from branchline.tree.journal_repair import check_journal, repair_journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.journal"


def record_of(index: int) -> bytes:
    return msgspec.msgpack.encode((index, bytes([index % 256]) * 300))


def write(path: Path, count: int = 30, sessions: int = 3) -> None:
    with Journal(path) as journal:
        for index in range(count):
            journal.append(f"s{index % sessions}", record_of(index)).result()


def damage_record(path: Path, seq: int) -> None:
    """Changes one byte of a record, as a bad disk does."""
    with closing(sqlite3.connect(path)) as db:
        (record,) = db.execute("SELECT record FROM records WHERE seq = ?", (seq,)).fetchone()
        changed = record[:100] + bytes([record[100] ^ 1]) + record[101:]
        db.execute("UPDATE records SET record = ? WHERE seq = ?", (changed, seq))
        db.commit()


def records(path: Path, sessions: Sequence[str] = ("s0", "s1", "s2")) -> dict[str, list[bytes]]:
    with Journal(path) as journal:
        return {session: list(journal.read(session)) for session in sessions}


def file_contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-lock")}


def test_a_sound_journal_has_no_damage_and_is_not_changed(path: Path) -> None:
    write(path)
    before = file_contents(path.parent)
    report = check_journal(path)
    assert (report.records, report.sessions, report.unchecked, report.damages) == (30, 3, 0, ())
    repaired = repair_journal(path)
    assert (repaired.copy, repaired.kept, repaired.dropped) == (None, 30, {})
    assert file_contents(path.parent) == before


def test_a_damaged_record_is_found_with_its_session_and_nothing_is_changed(path: Path) -> None:
    write(path)
    damage_record(path, 11)
    before = file_contents(path.parent)
    (damage,) = check_journal(path).damages
    assert damage.session == "s1"
    assert damage.problem.startswith("record 11 (")
    assert file_contents(path.parent) == before


def test_a_repair_keeps_all_records_but_those_from_the_damaged_one_on(path: Path) -> None:
    write(path)
    damage_record(path, 11)
    old = path.read_bytes()
    report = repair_journal(path)
    assert report.copy is not None
    assert report.copy.read_bytes() == old
    assert report.copy.stat().st_mode & 0o777 == 0o600
    assert (report.kept, report.dropped) == (23, {"s1": 6})
    found = records(path)
    assert found["s0"] == [record_of(index) for index in range(0, 30, 3)]
    assert found["s1"] == [record_of(index) for index in (1, 4, 7)]
    assert found["s2"] == [record_of(index) for index in range(2, 30, 3)]
    with Journal(path) as journal:
        assert journal.append("s1", b"after").result() == 24
    assert check_journal(path).damages == ()


def test_only_the_owner_may_read_a_repaired_journal(path: Path) -> None:
    write(path)
    damage_record(path, 11)
    path.chmod(0o644)
    repair_journal(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_damage_of_a_journal_without_checksums_is_found_by_decoding(path: Path) -> None:
    write(path)
    with closing(sqlite3.connect(path)) as older:
        older.execute("ALTER TABLE records DROP COLUMN checksum")
        older.execute("PRAGMA user_version = 3")
        older.execute("UPDATE records SET record = x'c1' WHERE seq = 5")
        older.commit()
    report = check_journal(path)
    assert (report.unchecked, [damage.session for damage in report.damages]) == (30, ["s1"])
    assert repair_journal(path).kept == 30 - 9


def test_a_damaged_payload_is_found_and_only_the_others_are_kept(path: Path) -> None:
    digests = {data: xxhash.xxh3_128_hexdigest(data) for data in (b"pixels", b"other pixels")}
    with Journal(path) as journal:
        for data, digest in digests.items():
            journal.append("s", record_of(1), media={digest: data}).result()
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE media SET payload = x'00' WHERE digest = ?", (digests[b"pixels"],))
        db.commit()
    (damage,) = check_journal(path).damages
    assert damage.problem == f"media {digests[b'pixels']}: the payload is damaged"
    assert repair_journal(path).kept == 2
    assert check_journal(path).damages == ()
    with Journal(path) as journal:
        assert journal.read_media(digests[b"pixels"]) is None
        assert journal.read_media(digests[b"other pixels"]) == b"other pixels"


def test_an_index_that_lacks_records_is_found_and_written_again(path: Path) -> None:
    write(path)
    with closing(sqlite3.connect(path)) as db:
        (schema,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'records_by_session'").fetchone()
        db.execute("DROP INDEX records_by_session")
        db.execute(f"{schema} WHERE seq < 10")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'records_by_session'", (schema,))
        db.commit()
    problems = [damage.problem for damage in check_journal(path).damages]
    assert problems
    assert all(problem.startswith("SQLite: ") for problem in problems)
    assert repair_journal(path).kept == 30
    assert records(path)["s0"] == [record_of(index) for index in range(0, 30, 3)]
    assert check_journal(path).damages == ()


def test_records_after_a_damaged_page_of_the_wal_are_recovered(path: Path) -> None:
    crashed = path.with_name("crashed.journal")
    with Journal(path) as journal:
        for index in range(30):
            journal.append(f"s{index % 3}", record_of(index) * 8).result()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{crashed}{suffix}")
    wal = bytearray(Path(f"{crashed}-wal").read_bytes())
    wal[len(wal) // 2] ^= 255
    Path(f"{crashed}-wal").write_bytes(wal)
    tail = read_wal(crashed)
    assert tail.dropped_commits > 5
    assert any("complete commits" in damage.problem for damage in check_journal(crashed).damages)
    kept = repair_journal(crashed).kept
    with Journal(crashed) as journal:
        found = dict.fromkeys(("s0", "s1", "s2"), 0)
        for session, record in journal.replay():
            index = 3 * found[session] + int(session[1])
            assert record == record_of(index) * 8
            found[session] += 1
    # One page is damaged, so at most the records on it and those of the same sessions after it are lost.
    assert sum(found.values()) == kept > 30 - tail.dropped_commits


@pytest.mark.parametrize("seed", range(40))
def test_any_damaged_bytes_of_the_file_leave_a_prefix_of_each_session(path: Path, seed: int) -> None:
    rng = Random(seed)
    write(path, 60)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        # The first page has the schema: without it nothing can be read.
        position, size = rng.randrange(4096, len(data) - 40), rng.randint(1, 40)
        data[position : position + size] = rng.randbytes(size)
    path.write_bytes(data)
    repair_journal(path)
    for session, found in records(path).items():
        expected = [record_of(index) for index in range(int(session[1]), 60, 3)]
        assert found == expected[: len(found)]
    assert check_journal(path).damages == ()


@given(st.integers(1, 30), st.integers(0, 7))
def test_every_bit_of_a_checksum_and_its_record_counts(seq: int, bit: int) -> None:
    record = record_of(seq)
    checksum = xxhash.xxh3_64_intdigest(record, (session_seed("s") + seq) & SEED_MASK) - CHECKSUM_OFFSET
    assert is_intact("s", seq, record, checksum)
    assert not is_intact("t", seq, record, checksum)
    assert not is_intact("s", seq + 1, record, checksum)
    assert not is_intact("s", seq, bytes([record[0] ^ 1 << bit]) + record[1:], checksum)


def test_what_is_not_a_journal_is_refused(path: Path) -> None:
    with pytest.raises(JournalError, match="no such file"):
        check_journal(path)
    path.write_bytes(b"dear diary\n" * 100)
    for action in (check_journal, repair_journal):
        with pytest.raises(JournalError, match="expected a journal"):
            action(path)


def test_an_open_journal_is_checked_but_not_repaired(path: Path) -> None:
    with Journal(path) as journal:
        journal.append("s", record_of(1)).result()
        report = check_journal(path)
        assert (report.is_open, report.records, report.damages) == (True, 1, ())
        with pytest.raises(JournalError, match="already open"):
            repair_journal(path)
