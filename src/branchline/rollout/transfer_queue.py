"""A sink that hands samples to verl through TransferQueue, in verl's row layout.

Each sample is a row under the key `{uid}_{session}_{index}`; when all sessions of a task have ended, the key
`{uid}` gets the task's status. `rm_scores` (the reward, on the last token) and `rollout_log_probs` are always
written: 0 where they are unknown, and the tags say where. `rollout_is_weights` has the shares, so that verl
trains every sampled token once.

A writer waits while the partition has `max_rows` rows that the trainer has not cleared. Writing a key again
replaces its row. Rows that the trainer has taken and cleared are not in the queue any more: with a `ledger`
file, a resumed rollout knows them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from branchline.core.errors import InputError, requires_extra
from branchline.core.sample import Sample
from branchline.export.credit import token_rewards
from branchline.gateway.views import message_view
from branchline.rollout.session_result import SessionResult
from branchline.rollout.sinks import append_lines, open_lines
from branchline.rollout.stats import PromptStatus
from branchline.rollout.tasks import RolloutTask

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


@dataclass(frozen=True)
class QueueRow:
    """One sample as a row of TransferQueue."""

    key: str
    fields: Mapping[str, Any]
    """Arrays, and plain values for everything else."""
    tag: Mapping[str, Any]


def make_rows(result: SessionResult, global_steps: int = 0) -> list[QueueRow]:
    """Returns the rows of a session; none if it did not finish."""
    rows: list[QueueRow] = []
    scores = token_rewards(result.samples)
    for key, sample, rewards in zip(result.sample_keys, result.samples, scores, strict=True):
        fields = {**_token_fields(sample, rewards), **_task_fields(result, sample, global_steps)}
        rows.append(QueueRow(key, fields, _row_tag(result, sample, global_steps)))
    return rows


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


def _task_fields(result: SessionResult, sample: Sample, global_steps: int) -> dict[str, Any]:
    task, row = result.job.task, result.job.task.row
    extra_info = dict(row.get("extra_info") or {})
    if sample.reward_extras:
        extra_info["reward_extras"] = sample.reward_extras
    return {
        "uid": task.uid,
        "raw_prompt": _raw_prompt(result),
        "data_source": row.get("data_source", ""),
        "reward_model": row.get("reward_model") or {},
        "extra_info": extra_info,
        "agent_name": task.agent_name,
        "session_id": result.job.slot,
        "global_steps": global_steps,
        # A prompt and its answer are two turns.
        "num_turns": 2 * len(sample.answers),
    }


def _raw_prompt(result: SessionResult) -> list[dict[str, Any]]:
    """Returns the messages before the first answer, as the row has them or as the agent sent them."""
    for name in ("raw_prompt", "prompt", "messages"):
        if isinstance(result.job.task.row.get(name), list):
            messages: list[dict[str, Any]] = result.job.task.row[name]
            return messages
    history = result.trajectory.history
    if history is None or not history.sampled:
        return []
    return [message_view(message) for message in history.messages[: history.sampled[0]]]


def _row_tag(result: SessionResult, sample: Sample, global_steps: int) -> dict[str, Any]:
    versions = sample.response_versions[sample.response_mask != 0]
    return {
        "is_prompt": False,
        "status": "success",
        "uid": result.job.task.uid,
        "session": result.session,
        "global_steps": global_steps,
        "min_global_steps": int(versions.min()) if len(versions) else global_steps,
        "max_global_steps": int(versions.max()) if len(versions) else global_steps,
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
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows: got {max_rows}, expected 1 or more, or None")
        if queue is None:
            with requires_extra("transferqueue"):
                queue = importlib.import_module("transfer_queue")
        self._queue: Any = queue
        self._partition = partition
        self.global_steps = global_steps
        self._max_rows = max_rows
        self._ledger = ledger
        known = [line["session"] for line in open_lines(ledger)] if ledger is not None else []
        self._sessions = {*known, *(tag["session"] for tag in self._tags() if "session" in tag)}
        self._lock = asyncio.Lock()

    def contains(self, session: str) -> bool:
        return session in self._sessions

    async def write(self, result: SessionResult) -> None:
        async with self._lock:
            if result.session in self._sessions:
                return
            rows = make_rows(result, self.global_steps)
            if rows:
                await self._wait_for_room(len(rows))
                await asyncio.to_thread(self._put, rows)
            if self._ledger is not None:
                append_lines(self._ledger, [{"session": result.session}])
            self._sessions.add(result.session)

    async def end_prompt(self, task: RolloutTask, status: PromptStatus) -> None:
        tag = {"is_prompt": True, "status": status, "uid": task.uid, "global_steps": self.global_steps}
        await asyncio.to_thread(
            self._queue.kv_put, key=task.uid, partition_id=self._partition, fields=None, tag=tag
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
    with requires_extra("transferqueue"):
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
