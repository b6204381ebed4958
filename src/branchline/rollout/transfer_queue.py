"""A sink that hands samples to verl through TransferQueue, in verl's row layout.

Each sample is a row under the key `{uid}_{session}_{index}`; when all sessions of a task have ended, the key
`{uid}` gets the task's status. As in verl, a uid is that of a task in one rollout; a second rollout over the
task has another. An underscore of a uid is written as `.5F`. `rm_scores` (the reward, on the last token) and
`rollout_log_probs` are always written: 0 where they are unknown, and the tags say where. `rollout_is_weights`
has the shares, so that verl trains every sampled token once.

A row has all columns of its task too, as JSON values. What a row cannot carry is refused for the whole
session, by name: media, columns that are no JSON.

A writer waits while the partition has `max_rows` rows that the trainer has not cleared. Writing a key again
replaces its row. Rows that the trainer has taken and cleared are not in the queue any more: with a `ledger`
file, a resumed rollout knows them.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.core.errors import SessionRefusedError
from branchline.core.extras import requires_extra
from branchline.core.option_checks import check_count
from branchline.core.sample import Sample
from branchline.export.credit import token_rewards
from branchline.gateway.views import message_view
from branchline.rollout.session_result import SessionResult, sample_key
from branchline.rollout.sinks import append_lines, check_rows, open_lines
from branchline.rollout.stats import PromptStatus
from branchline.rollout.tasks import RolloutTask

log = logging.getLogger("branchline.rollout")

_POLL_S = (0.05, 1.0)
"""How long to wait before asking again whether there is room: at first, and at most."""
TENSOR_FIELDS = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "loss_mask",
    "rm_scores",
    "rollout_log_probs",
    "rollout_is_weights",
)
_SESSION_FIELDS = ("uid", "session_id", "global_steps", "num_turns", "extra_fields")
_TRAINER_FIELDS = (
    "advantages",
    "entropys",
    "loss_weight",
    "metrics",
    "multi_modal_data",
    "multi_modal_inputs",
    "old_log_probs",
    "ref_log_prob",
    "returns",
    "routed_experts",
    "teacher_ids",
    "teacher_logprobs",
    "token_level_rewards",
    "token_level_scores",
    "values",
)
"""Fields that verl computes or reads, and that are not in our rows."""
RESERVED_FIELDS = frozenset({*TENSOR_FIELDS, *_SESSION_FIELDS, *_TRAINER_FIELDS, "raw_prompt"})
"""Names that a column of a task cannot have: it becomes `dataset_…`."""
_ESCAPED = re.compile(r"_|\.(?=5F|2E)")
COLUMN_PREFIX = "dataset_"
_PROMPT_COLUMNS = ("raw_prompt", "prompt", "messages")


@dataclass(frozen=True)
class QueueRow:
    """One sample as a row of TransferQueue."""

    key: str
    fields: Mapping[str, Any]
    """Arrays, and plain values for everything else."""
    tag: Mapping[str, Any]


def make_rows(result: SessionResult, global_steps: int = 0) -> list[QueueRow]:
    """Returns the rows of a session; none if it did not finish.

    Raises SessionRefusedError if a row cannot carry what the session or its task has.
    """
    if not result.samples:
        return []
    _check_session(result)
    check_rows(result)
    columns = _task_columns(result)
    rows: list[QueueRow] = []
    uid = queue_uid(result.job.task.group)
    scores = token_rewards(result.samples)
    for index, (sample, rewards) in enumerate(zip(result.samples, scores, strict=True)):
        fields = {
            **columns,
            **_token_fields(sample, rewards),
            "uid": uid,
            "session_id": result.job.slot,
            "global_steps": global_steps,
            # A prompt and its answer are two turns.
            "num_turns": 2 * len(sample.answers),
            "extra_fields": _extra_fields(result, sample, global_steps),
        }
        key = sample_key(uid, result.job.slot, index)
        rows.append(QueueRow(key, fields, _row_tag(result, sample, global_steps)))
    return rows


def queue_uid(group: str) -> str:
    """Returns the uid of a task in the queue. verl splits keys at underscores, so it has none: `_` is `.5F`,
    and a `.` before `5F` or `2E` is `.2E`, so that the uids of different tasks differ.

    >>> queue_uid("r-django__1.5F"), queue_uid("r-task.1")
    ('r-django.5F.5F1.2E5F', 'r-task.1')
    """
    return _ESCAPED.sub(lambda match: ".5F" if match[0] == "_" else ".2E", group)


def _check_session(result: SessionResult) -> None:
    for key, sample in zip(result.sample_keys, result.samples, strict=True):
        if sample.media:
            kinds = ", ".join(sorted({media.kind for media in sample.media}))
            raise SessionRefusedError(
                result.session,
                "media",
                f"sample {key}: got {len(sample.media)} media ({kinds}), expected none: rows of "
                "TransferQueue carry no media yet; use a JsonlSink or a ParquetSink, or tasks without media",
            )


def _token_fields(sample: Sample, rewards: Any) -> dict[str, Any]:
    ids = np.concatenate((sample.prompt_ids, sample.response_ids)).astype(np.int64)
    mask = sample.response_mask.astype(np.int64)
    return {
        "prompts": sample.prompt_ids.astype(np.int64),
        "responses": sample.response_ids.astype(np.int64),
        "input_ids": ids,
        "attention_mask": np.ones(len(ids), np.int64),
        "position_ids": np.arange(len(ids), dtype=np.int64),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": rewards.astype(np.float32),
        "rollout_log_probs": np.nan_to_num(sample.response_logprobs, nan=0.0).astype(np.float32),
        "rollout_is_weights": sample.shares.astype(np.float32),
    }


def _task_columns(result: SessionResult) -> dict[str, Any]:
    """Returns the columns of the task's row, under verl's names where it has them."""
    task, row = result.job.task, _copy_row(result)
    source, raw_prompt = _raw_prompt(result, row)
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if name == source or (name == "uid" and str(value) == queue_uid(task.group)):
            continue
        if name in RESERVED_FIELDS:
            if COLUMN_PREFIX + name in row:
                raise _refuse_columns(
                    result,
                    f"got {name!r} and {COLUMN_PREFIX + name!r}, expected one of them: {name!r} is a "
                    f"field of verl's rows, so the column is written as {COLUMN_PREFIX + name!r}",
                )
            name = COLUMN_PREFIX + name
        columns[name] = value
    extra_info = columns.get("extra_info")
    if "index" not in columns and isinstance(extra_info, dict) and "index" in extra_info:
        columns["index"] = extra_info["index"]
    defaults = {"data_source": "", "reward_model": {}, "extra_info": {}}
    columns |= {name: value for name, value in defaults.items() if columns.get(name) is None}
    return {**columns, "raw_prompt": raw_prompt, "agent_name": task.agent_name}


def _copy_row(result: SessionResult) -> dict[str, Any]:
    """Returns a copy of the task's row. Raises SessionRefusedError unless it is an object of JSON values."""
    row = result.job.task.row
    if not isinstance(row, Mapping):
        raise _refuse_columns(result, f"got a {type(row).__name__}, expected an object")
    for name, value in row.items():
        if not isinstance(name, str):
            raise _refuse_columns(result, f"got the name {name!r}, expected a text")
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refuse_columns(result, f"{name}: {error}, expected a JSON value") from error
    return copy.deepcopy(dict(row))


def _refuse_columns(result: SessionResult, problem: str) -> SessionRefusedError:
    return SessionRefusedError(result.session, "columns", f"columns of task {result.job.task.uid}: {problem}")


def _raw_prompt(result: SessionResult, row: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the messages before the first answer, as the row has them or as the agent sent them, and the
    column that they are from."""
    for name in _PROMPT_COLUMNS:
        if isinstance(row.get(name), list):
            messages: list[dict[str, Any]] = row[name]
            return name, messages
    history = result.trajectory.history
    if history is None or not history.sampled:
        return "", []
    return "", [message_view(message) for message in history.messages[: history.sampled[0]]]


def _extra_fields(result: SessionResult, sample: Sample, global_steps: int) -> dict[str, Any]:
    """Returns what verl's agent loops put into `extra_fields`."""
    first, last = _policy_versions(sample, global_steps)
    extras = msgspec.json.decode(sample.reward_extras) if sample.reward_extras else {}
    turns = [one for one in result.rewards if "turn" in one or "call" in one]
    return {
        "reward_extra_info": extras,
        "turn_scores": [one["score"] for one in turns if "tool" not in one],
        "tool_rewards": [one["score"] for one in turns if "tool" in one],
        "min_global_steps": first,
        "max_global_steps": last,
    }


def _policy_versions(sample: Sample, global_steps: int) -> tuple[int, int]:
    versions = sample.response_versions[sample.response_mask != 0]
    return (int(versions.min()), int(versions.max())) if len(versions) else (global_steps, global_steps)


def _row_tag(result: SessionResult, sample: Sample, global_steps: int) -> dict[str, Any]:
    first, last = _policy_versions(sample, global_steps)
    return {
        "is_prompt": False,
        "status": "success",
        "uid": queue_uid(result.job.task.group),
        "session": result.session,
        "global_steps": global_steps,
        "min_global_steps": first,
        "max_global_steps": last,
        "prompt_len": len(sample.prompt_ids),
        "response_len": len(sample.response_ids),
        "seq_len": len(sample),
        "has_reward": sample.reward is not None,
        "missing_log_probs": sample.missing_logprobs,
    }


class TransferQueueSink:
    """Writes the rows of sessions to a partition of TransferQueue, which the program has initialised."""

    def __init__(
        self,
        partition: str = "train",
        *,
        global_steps: int = 0,
        max_rows: int | None = None,
        ledger: Path | None = None,
        queue: Any = None,
    ) -> None:
        """`global_steps` is the trainer's step that the rows are for; it may be changed between rollouts.
        `queue` replaces the module `transfer_queue`."""
        if max_rows is not None:
            check_count("max_rows", max_rows)
        if queue is None:
            with requires_extra():
                queue = importlib.import_module("transfer_queue")
        self._queue: Any = queue
        self._partition = partition
        self.global_steps = global_steps
        self._max_rows = max_rows
        self._ledger = ledger
        lines = list(open_lines(ledger)) if ledger is not None else []
        tags = [tag for tag in self._tags() if "session" in tag]
        self._sessions = {line["session"] for line in (*lines, *tags)}
        self._tasks_with_rows = {line["uid"] for line in lines if line.get("rows")} | {
            tag["uid"] for tag in tags
        }
        self._has_unknown_rows = any("rows" not in line for line in lines)
        """Whether an older version wrote the ledger, which did not count rows."""
        self._lock = asyncio.Lock()

    def contains(self, session: str) -> bool:
        return session in self._sessions

    async def write(self, result: SessionResult) -> None:
        async with self._lock:
            if result.session in self._sessions:
                return
            rows, uid = make_rows(result, self.global_steps), queue_uid(result.job.task.group)
            if rows:
                await self._wait_for_room(len(rows))
                await asyncio.to_thread(self._put, rows)
            if self._ledger is not None:
                line = {"session": result.session, "uid": uid, "rows": len(rows)}
                append_lines(self._ledger, [line])
            self._sessions.add(result.session)
            if rows:
                self._tasks_with_rows.add(uid)

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        """Writes the status of a task; one without any row is a failure here, whatever its sessions are."""
        uid = queue_uid(task.group)
        if status == "finished" and not self._has_unknown_rows and uid not in self._tasks_with_rows:
            log.error("task %s: no row was written, so its status in the queue is failure", task.uid)
            status = "failure"
        tag = {"is_prompt": True, "status": status, "uid": uid, "global_steps": self.global_steps}
        await asyncio.to_thread(
            self._queue.kv_put, key=uid, partition_id=self._partition, fields=None, tag=tag
        )

    async def close(self) -> None:
        pass

    async def _wait_for_room(self, count: int) -> None:
        """Waits until the trainer has cleared enough rows; one session may be larger than the limit."""
        delay_s, longest_s = _POLL_S
        while self._max_rows is not None:
            tags = await asyncio.to_thread(self._tags)
            waiting = sum(not tag.get("is_prompt") for tag in tags)
            if waiting == 0 or waiting + count <= self._max_rows:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, longest_s)

    def _tags(self) -> list[Mapping[str, Any]]:
        listed = self._queue.kv_list(partition_id=self._partition) or {}
        return list((listed.get(self._partition) or {}).values())

    def _put(self, rows: Sequence[QueueRow]) -> None:
        self._queue.kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=self._partition,
            fields=to_tensordict(rows),
            tags=[dict(row.tag) for row in rows],
        )


def to_tensordict(rows: Sequence[QueueRow]) -> Any:
    """Returns rows as one TensorDict: arrays as jagged tensors, everything else as it is."""
    with requires_extra():
        torch: Any = importlib.import_module("torch")
        tensordict: Any = importlib.import_module("tensordict")
    columns: dict[str, Any] = {}
    for name in rows[0].fields:
        values = [row.fields[name] for row in rows]
        if name in TENSOR_FIELDS:
            tensors = [torch.from_numpy(value) for value in values]
            columns[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
        else:
            columns[name] = tensordict.NonTensorStack(*(tensordict.NonTensorData(value) for value in values))
    return tensordict.TensorDict(columns, batch_size=[len(rows)])
