"""`branchline journal` lists damage with exit code 1, repairs it, and refuses what is no journal with 2."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from branchline.cli.main import main
from branchline.tree.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.journal"
    with Journal(path) as journal:
        for index in range(9):
            journal.append(f"s{index % 3}", b"\xa5hello")
    return path


def damage(path: Path) -> None:
    with closing(sqlite3.connect(path)) as disk:
        disk.execute("UPDATE records SET record = x'a568656c6c70' WHERE seq = 5")
        disk.commit()


def test_a_sound_journal_exits_with_0(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 9 intact records of 3 sessions\nno damage found\n"
    assert main(["journal", "repair", str(path)]) == 0
    assert capsys.readouterr().out.endswith("nothing to repair\n")


def test_damage_is_listed_with_exit_code_1_and_repaired(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path)
    assert main(["journal", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "1 damage found:\n  session s1: record 5 (6 bytes) does not match its checksum\n" in out
    assert main(["journal", "repair", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"kept 7 records; the old file is {path}.damaged-1\n" in out
    assert "session s1: dropped 1 record after the damage" in out
    assert main(["journal", "check", str(path)]) == 0
    assert main(["journal", "check", f"{path}.damaged-1"]) == 1


def test_what_is_not_a_journal_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("notes")
    for action in ("check", "repair"):
        for name in (file, tmp_path / "nowhere"):
            assert main(["journal", action, str(name)]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert "expected a journal" in captured.err


def test_a_journal_in_use_is_not_repaired(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(path):
        assert main(["journal", "repair", str(path)]) == 2
    assert "already open" in capsys.readouterr().err
