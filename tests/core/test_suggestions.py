"""What was probably meant by a path that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchline.core.suggestions import did_you_mean_path, near_path


def test_a_near_name_beside_a_missing_one_is_found(tmp_path: Path) -> None:
    for name in ("tasks.jsonl", "tasks.py", "other.jsonl"):
        (tmp_path / name).touch()
    assert near_path(tmp_path / "taks.jsonl") == tmp_path / "tasks.jsonl"
    assert near_path(tmp_path / "tasks.json") == tmp_path / "tasks.jsonl"
    assert near_path(tmp_path / "Tasks.PY") == tmp_path / "tasks.py"
    assert near_path(tmp_path / "tasks") is not None
    assert did_you_mean_path(tmp_path / "taks.jsonl") == f"; did you mean {tmp_path / 'tasks.jsonl'}?"


def test_an_ending_alone_makes_no_name_near(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").touch()
    assert near_path(tmp_path / "abc.jsonl") is None


def test_every_part_of_a_path_may_be_misspelt(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    assert near_path(tmp_path / "dat" / "trian.jsonl") == tmp_path / "data" / "train.jsonl"
    assert near_path(tmp_path / "data" / "train.jsonl" / "x") is None


def test_relative_paths_stay_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").touch()
    assert did_you_mean_path("taks.jsonl") == "; did you mean tasks.jsonl?"
    assert did_you_mean_path("./taks.jsonl") == "; did you mean tasks.jsonl?"
    assert did_you_mean_path("tasks.jsonl") == ""
