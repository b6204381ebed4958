"""The tasks of a rollout: rows of a JSONL or Parquet file, of a Hugging Face dataset, or of any iterable.

A row is a JSON object. Its `agent_name` selects the runner, and its `id` names it if the id can be part of a
session's id; all other fields are for the agent and the reward. Every task has a `uid`, unique in the run and
equal whenever the same rows are read again, which is what a resumed run relies on.

    read_tasks("tasks.jsonl")                      # or tasks.parquet, or openai/gsm8k:train
    read_tasks([{"prompt": "2+2?", "answer": 4}])
"""

from __future__ import annotations

import hashlib
import importlib
import re
import secrets
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra
from branchline.core.suggestions import did_you_mean_path
from branchline.loop.task import to_lists

_UID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_EXPECTED_UID = "at most 96 of the characters A-Z, a-z, 0-9, '_', '.' and '-', not '.' or '-' first"
_PROMPT_FIELDS = ("prompt", "question", "messages", "raw_prompt")
_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<split>[\w\[\]%:+-]+))?")
_DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class RolloutTask:
    """A row, its name in the run, and the agent that works on it."""

    uid: str
    row: Any
    """A JSON object; a trainer's tasks may be anything."""
    agent_name: str = ""
    run: str = ""
    """The rollout that the task is part of. Several rollouts over the same tasks differ in it, and so do the
    ids of their sessions and the keys of their samples."""

    @property
    def group(self) -> str:
        """Names the sessions of the task in one rollout, which are compared with each other."""
        return group_name(self.run, self.uid)

    def copy(self) -> RolloutTask:
        """Returns the task with a row of its own, for code that may change it.

        Raises InputError for a row that cannot be copied.
        """
        try:
            return replace(self, row=deepcopy(self.row))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise InputError(
                f"task {self.uid}: got a row that cannot be copied ({problem}), expected plain data: each "
                "session gets its own copy"
            ) from error

    @property
    def prompt(self) -> str:
        """The row's prompt as text: its `prompt` or `question`, or its last user message; of parts their
        text."""
        row = self.row if isinstance(self.row, Mapping) else {}
        for name in _PROMPT_FIELDS:
            value = row.get(name)
            if isinstance(value, list):
                items = [one for one in value if isinstance(one, Mapping)]
                users = [one for one in items if one.get("role") == "user"]
                is_parts = not any("role" in one for one in items)
                value = users[-1].get("content") if users else value if is_parts else None
            text = _text_of(value)
            if text is not None:
                return text
        return ""


def read_tasks(source: object) -> list[RolloutTask]:
    """Returns the tasks of a file, a dataset or an iterable of rows.

    Raises InputError, with the place of the row, for one that is no JSON object, and for a source that does
    not exist or has no rows.
    """
    if isinstance(source, str | Path):
        rows, name = _open_source(str(source)), str(source)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        rows, name = source, "tasks"
    else:
        raise InputError(f"tasks: got {type(source).__name__}, expected a file, a dataset or a list of rows")
    tasks: list[RolloutTask] = []
    uids: set[str] = set()
    for index, raw in enumerate(rows):
        if isinstance(raw, RolloutTask):
            task = raw
            if not _UID.fullmatch(task.uid):
                raise InputError(f"{name}[{index}].uid: got {task.uid!r}, expected {_EXPECTED_UID}")
        else:
            row = _check_row(raw, f"{name}[{index}]")
            task = RolloutTask(_make_uid(row, index, uids), row, _agent_name(row, f"{name}[{index}]"))
        if task.uid in uids:
            raise InputError(f"{name}[{index}].uid: got {task.uid!r} twice, expected distinct ones")
        uids.add(task.uid)
        tasks.append(task)
    if not tasks:
        raise InputError(f"{name}: got no rows, expected at least one task")
    return tasks


def _text_of(content: object) -> str | None:
    """Returns the text of a message's content, without its images; None for what is no content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(text for text in texts if isinstance(text, str))


def group_name(run: str, uid: str) -> str:
    """Returns the name of a task in one rollout; runs of older versions have no id."""
    return f"{run}-{uid}" if run else uid


def new_run_id() -> str:
    """Returns a name that no other rollout has."""
    return secrets.token_hex(4)


def task_digest(tasks: Iterable[RolloutTask]) -> str:
    """Returns a digest of the tasks, by which a resumed run finds that they are still the same."""

    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(msgspec.json.encode((task.uid, task.row), order="deterministic"))
    return digest.hexdigest()


def _open_source(text: str) -> Iterable[Any]:
    path = Path(text).expanduser()
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    if path.is_file():
        return _read_lines(path)
    match = _DATASET.fullmatch(text)
    near = did_you_mean_path(path)
    # A name of one word without a split may be that of a file; one of a dataset may have its split.
    is_file_name = path.suffix in (".jsonl", ".json") or text.startswith((".", "/", "~"))
    if match is None or is_file_name or (near and match["split"] is None and "/" not in text):
        problem = "is no file" if path.exists() else "does not exist"
        raise InputError(
            f"tasks: got {text}, which {problem}, expected a JSONL or Parquet file, or NAME:SPLIT{near}"
        )
    return _load_dataset(match["name"], match["split"] or _DEFAULT_SPLIT)


def _read_lines(path: Path) -> Iterable[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(
                    f"{path}:{number}: got {line[:80]!r}, expected a JSON object ({error})"
                ) from None


def _read_parquet(path: Path) -> Iterable[Any]:
    with requires_extra():
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise InputError(
            f"tasks: got {path}, which does not exist, expected a JSONL or Parquet file, or NAME:SPLIT"
            f"{did_you_mean_path(path)}"
        ) from error
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: got a file that cannot be read ({error}), expected Parquet") from error
    rows: Iterable[Any] = table.to_pylist()
    return rows


def _load_dataset(name: str, split: str) -> Iterable[Any]:
    with requires_extra():
        datasets: Any = importlib.import_module("datasets")
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise InputError(
            f"tasks: got {name}:{split}, expected a file or a Hugging Face dataset and its split: {error}"
        ) from error
    return rows


def _check_row(raw: object, place: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise InputError(f"{place}: got {type(raw).__name__}, expected an object")
    row: dict[str, Any] = to_lists(raw)
    try:
        msgspec.json.encode(row)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{place}: got a row that is not JSON ({error}), expected a JSON object") from error
    return row


def _agent_name(row: Mapping[str, Any], place: str) -> str:
    name = row.get("agent_name")
    if name is not None and not isinstance(name, str):
        raise InputError(f"{place}.agent_name: got {name!r}, expected the name of an agent")
    return name or ""


def _make_uid(row: Mapping[str, Any], index: int, known: set[str]) -> str:
    """Returns the row's id if it is unique and can be part of a session's id, else its position."""
    name = row.get("uid", row.get("id"))
    if isinstance(name, str | int) and not isinstance(name, bool):
        uid = str(name)
        if _UID.fullmatch(uid) and uid not in known:
            return uid
    uid = f"task{index}"
    while uid in known:
        uid += ".again"
    return uid
