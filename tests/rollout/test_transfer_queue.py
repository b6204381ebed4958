"""Rows, keys and tags for verl, and a queue that is full or was cleared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline.core.errors import InputError
from branchline.rollout import transfer_queue
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.sinks import MemorySink
from branchline.rollout.transfer_queue import TENSOR_FIELDS, TransferQueueSink, make_rows
from tests.rollout.harness import ask, run, scripted_gateway


class FakeQueue:
    """The functions of TransferQueue that the sink calls, on a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.puts = 0

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any, tags: Any) -> None:
        self.puts += 1
        for key, row, tag in zip(keys, fields, tags, strict=True):
            self.rows[key] = row.fields
            self.tags[key] = tag

    def kv_put(self, key: str, partition_id: str, fields: Any, tag: Any) -> None:
        self.tags[key] = {**self.tags.get(key, {}), **tag}

    def kv_list(self, partition_id: str) -> dict[str, Any]:
        return {partition_id: dict(self.tags)}

    def kv_clear(self, keys: Any) -> None:
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    # Tensors need torch and tensordict; tests/transfer_queue has them.
    monkeypatch.setattr(transfer_queue, "to_tensordict", lambda rows: rows)
    return FakeQueue()


TASKS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "hello", "data_source": "math", "reward_model": {"ground_truth": "4"}},
    {
        "id": "b",
        "prompt": [{"role": "user", "content": "hi"}],
        "agent_name": "twice",
        "extra_info": {"index": 7},
    },
]


async def answer(task: Mapping[str, Any], session: Any) -> dict[str, Any]:
    await ask(session, "hello")
    await ask(session, "hello", "ok", "more")
    return {"score": 0.5, "format": 1}


def test_rows_keys_and_tags_are_those_of_verl(queue: FakeQueue) -> None:
    async def test() -> None:
        memory = MemorySink()
        sink = TransferQueueSink(queue=queue, global_steps=3)
        async with scripted_gateway() as gateway:
            await Rollout(
                gateway, {"": answer, "twice": answer}, sinks=[sink, memory], config=RolloutConfig(n=2)
            ).run(TASKS)
        assert set(queue.tags) == {"a", "b", "a_0_0", "a_1_0", "b_0_0", "b_1_0"}
        assert queue.tags["a"] == {"is_prompt": True, "status": "finished", "uid": "a", "global_steps": 3}
        sample = next(one for one in memory.results if one.session == "a-1").samples[0]
        row, tag = queue.rows["a_1_0"], queue.tags["a_1_0"]
        length = len(sample)
        assert row["prompts"].tolist() == sample.prompt_ids.tolist()
        assert row["responses"].tolist() == sample.response_ids.tolist()
        assert row["input_ids"].tolist() == [*sample.prompt_ids, *sample.response_ids]
        assert row["position_ids"].tolist() == list(range(length))
        assert row["attention_mask"].tolist() == [1] * length
        assert row["response_mask"].tolist() == row["loss_mask"].tolist() == sample.response_mask.tolist()
        assert row["rm_scores"].tolist() == [0.0] * (len(sample.response_ids) - 1) + [0.5]
        assert np.array_equal(row["rollout_log_probs"], sample.response_logprobs)
        assert np.array_equal(row["rollout_is_weights"], sample.shares)
        others = {name: value for name, value in row.items() if name not in TENSOR_FIELDS}
        assert others == {
            "uid": "a",
            "raw_prompt": [{"role": "user", "content": "hello"}],
            "data_source": "math",
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"reward_extras": '{"format":1}'},
            "agent_name": "",
            "session_id": 1,
            "global_steps": 3,
            "num_turns": 4,
        }
        assert tag == {
            "is_prompt": False,
            "status": "success",
            "uid": "a",
            "session": "a-1",
            "global_steps": 3,
            "min_global_steps": 0,
            "max_global_steps": 0,
            "prompt_len": len(sample.prompt_ids),
            "response_len": len(sample.response_ids),
            "seq_len": length,
            "has_reward": True,
            "missing_log_probs": 0,
        }
        assert queue.rows["b_0_0"]["raw_prompt"] == TASKS[1]["prompt"]
        assert queue.rows["b_0_0"]["agent_name"] == "twice"
        assert json.loads(sample.reward_extras) == {"format": 1}

    run(test)


def test_unknown_rewards_and_logprobs_are_zero_and_tagged(queue: FakeQueue) -> None:
    async def test() -> None:
        from dataclasses import replace

        async def silent(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, "hello")

        memory = MemorySink()
        async with scripted_gateway() as gateway:
            await Rollout(gateway, silent, sinks=[memory]).run(TASKS[:1])
        result = memory.results[0]
        sample = result.trajectory.samples[0]
        unknown = np.full(len(sample.response_ids), np.nan, np.float32)
        changed = replace(sample, response_logprobs=unknown, missing_logprobs=len(unknown))
        trajectory = replace(result.trajectory, samples=(changed,))
        (row,) = make_rows(replace(result, trajectory=trajectory))
        assert row.fields["rollout_log_probs"].tolist() == [0.0] * len(unknown)
        assert row.fields["rm_scores"].tolist() == [0.0] * len(unknown)
        assert row.tag["missing_log_probs"] == len(unknown)
        assert row.tag["has_reward"] is False

    run(test)


def test_a_failed_task_has_no_rows_and_a_failure(queue: FakeQueue) -> None:
    async def test() -> None:
        async def broken(task: Mapping[str, Any], session: Any) -> None:
            await ask(session, "hello")
            raise ValueError("no")

        async with scripted_gateway() as gateway:
            sink = TransferQueueSink(queue=queue)
            await Rollout(gateway, broken, sinks=[sink], config=RolloutConfig(n=2)).run(TASKS[:1])
        assert queue.rows == {}
        assert queue.tags["a"]["status"] == "failure"

    run(test)


def test_a_full_queue_holds_the_rollout_back(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue, "_POLL_S", (0.001, 0.001))

    async def test() -> None:
        async with scripted_gateway() as gateway:
            sink = TransferQueueSink(queue=queue, max_rows=2)
            rollout = Rollout(gateway, answer, sinks=[sink], config=RolloutConfig(n=5, concurrency=5))
            running = asyncio.create_task(rollout.run(TASKS[:1]))
            taken: set[str] = set()
            while len(taken) < 5:
                await asyncio.sleep(0.002)
                rows = sorted(queue.rows)
                assert len(rows) <= 2
                taken.update(rows)
                queue.kv_clear(rows[:1])
            await running
        assert queue.puts == 5

    run(test)


def test_a_ledger_knows_rows_that_the_trainer_has_cleared(queue: FakeQueue, tmp_path: Path) -> None:
    async def test() -> None:
        ledger = tmp_path / "ledger.jsonl"
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            await Rollout(gateway, answer, sinks=[TransferQueueSink(queue=queue, ledger=ledger)]).run(
                TASKS[:1]
            )
            assert set(queue.rows) == {"a_0_0"}
            queue.kv_clear(["a_0_0"])
            again = TransferQueueSink(queue=queue, ledger=ledger)
            await Rollout(gateway, answer, sinks=[again], resume=True).run(TASKS[:1])
            assert queue.rows == {}
        assert TransferQueueSink(queue=FakeQueue()).contains("a-0") is False

    run(test)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="max_rows: got 0, expected 1 or more"):
        TransferQueueSink(queue=FakeQueue(), max_rows=0)
