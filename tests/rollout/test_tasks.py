"""Tasks from files, datasets and iterables, and their names."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import install_line
from branchline.rollout.session_result import SessionJob
from branchline.rollout.tasks import RolloutTask, read_tasks, task_digest
from branchline.runtime.session_store import _is_valid_id

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "2+2?", "answer": [4]},
    {"id": "b", "prompt": "3+3?", "answer": [6], "agent_name": "tool"},
]


def test_jsonl_and_parquet_give_the_same_tasks(tmp_path: Path) -> None:
    lines = tmp_path / "tasks.jsonl"
    lines.write_text("\n".join(json.dumps({"agent_name": None, **row}) for row in ROWS) + "\n\n")
    pq.write_table(
        pa.Table.from_pylist([{"agent_name": None, **row} for row in ROWS]), tmp_path / "t.parquet"
    )
    expected = [
        RolloutTask(row["id"], {"agent_name": None, **row}, row.get("agent_name", "")) for row in ROWS
    ]
    assert read_tasks(lines) == read_tasks(str(tmp_path / "t.parquet")) == expected
    assert task_digest(read_tasks(lines)) == task_digest(expected)


def test_a_dataset_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, split: str) -> Any:
        asked.append((name, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [task.uid for task in read_tasks("org/set:test")] == ["a", "b"]
    read_tasks("set")
    assert asked == [("org/set", "test"), ("set", "train")]


def test_a_dataset_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_line("data"))):
        read_tasks("org/set")


def test_rows_of_any_iterable_are_plain_json() -> None:
    tasks = read_tasks(iter([{"prompt": "x", "scores": np.arange(3), "nested": {"a": np.float32(1)}}]))
    assert tasks[0].row == {"prompt": "x", "scores": [0, 1, 2], "nested": {"a": 1.0}}
    assert tasks[0].uid == "task0"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("missing.jsonl", "missing.jsonl, which does not exist, expected a JSONL or Parquet file, or NAME"),
        ("./missing", "does not exist"),
        ([], "tasks: got no rows, expected at least one task"),
        ([3], r"tasks\[0\]: got int, expected an object"),
        ([{"x": object()}], r"tasks\[0\]: got a row that is not JSON"),
        ([{"agent_name": 3}], r"tasks\[0\].agent_name: got 3, expected the name of an agent"),
        ({"prompt": "x"}, "tasks: got dict, expected a file, a dataset or a list of rows"),
        (None, "tasks: got NoneType"),
    ],
)
def test_what_is_no_task_is_an_error(source: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_tasks(source)


def test_a_line_that_is_not_json_is_an_error_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "x"}\nwhat\n')
    with pytest.raises(InputError, match=r"tasks.jsonl:2: got b'what\\n', expected a JSON object"):
        read_tasks(file)


def test_ids_with_underscores_name_their_tasks() -> None:
    ids = ["django__django-11099", "_a", "a_", "a_b", "a-b", "a.b"]
    assert [task.uid for task in read_tasks([{"id": name} for name in ids])] == ids


names = st.none() | st.integers() | st.text(st.sampled_from("ab_-. /é"), max_size=5) | st.just("task1")


@given(st.lists(names, min_size=1, max_size=8), st.integers(0, 3), st.integers(0, 3))
def test_every_session_of_every_task_has_a_valid_id_of_its_own(
    ids: list[Any], slot: int, attempt: int
) -> None:
    tasks = read_tasks([{"id": name} for name in ids])
    uids = [task.uid for task in tasks]
    assert len(set(uids)) == len(uids)
    jobs = [SessionJob(task, s, a).session_id for task in tasks for s in range(4) for a in range(3)]
    assert len(set(jobs)) == len(jobs)
    assert all(map(_is_valid_id, jobs))
    assert [task.uid for task in read_tasks([{"id": name} for name in ids])] == uids


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "x"}, "x"),
        ({"question": "y"}, "y"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a "}, IMAGE, "b"]}]}, "a b"),
        ({"prompt": [{"type": "text", "text": "a "}, IMAGE, {"type": "text", "text": "b"}]}, "a b"),
        ({"prompt": [{"role": "user", "content": [IMAGE]}]}, ""),
        ({"prompt": [{"role": "user", "content": None}]}, ""),
        ({"prompt": [{"role": "system", "content": "s"}], "question": "y"}, "y"),
        ({"raw_prompt": [{"role": "user", "content": "r"}]}, "r"),
        ({"prompt": []}, ""),
        ({}, ""),
    ],
)
def test_a_task_has_a_prompt_as_text(row: Any, prompt: str) -> None:
    assert read_tasks([row])[0].prompt == prompt
