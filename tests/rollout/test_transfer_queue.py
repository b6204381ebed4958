"""Rows, keys and tags for verl, and a queue that is full or was cleared."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import InputError, SessionRefusedError
from branchline.export.samples import ExportPolicy
from branchline.rollout import transfer_queue
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.session_result import SessionResult
from branchline.rollout.sinks import MemorySink
from branchline.rollout.tasks import RolloutTask
from branchline.rollout.transfer_queue import (
    RESERVED_FIELDS,
    TENSOR_FIELDS,
    TransferQueueSink,
    make_rows,
    queue_uid,
)
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
    {
        "id": "a",
        "prompt": "hello",
        "data_source": "math",
        "reward_model": {"ground_truth": "4"},
        "level": 2.5,
        "hint": None,
        "values": [1, 2],
    },
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
            agents, config = {"": answer, "twice": answer}, RolloutConfig(n=2)
            await Rollout(gateway, agents, sinks=[sink, memory], config=config, run_id="r").run(TASKS)
        assert set(queue.tags) == {"r-a", "r-b", "r-a_0_0", "r-a_1_0", "r-b_0_0", "r-b_1_0"}
        assert queue.tags["r-a"] == {"is_prompt": True, "status": "finished", "uid": "r-a", "global_steps": 3}
        sample = next(one for one in memory.results if one.session == "r-a-1").samples[0]
        row, tag = queue.rows["r-a_1_0"], queue.tags["r-a_1_0"]
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
            "id": "a",
            "prompt": "hello",
            "level": 2.5,
            "hint": None,
            "dataset_values": [1, 2],
            "uid": "r-a",
            "raw_prompt": [{"role": "user", "content": "hello"}],
            "data_source": "math",
            "reward_model": {"ground_truth": "4"},
            "extra_info": {},
            "extra_fields": {
                "reward_extra_info": {"format": 1},
                "turn_scores": [],
                "tool_rewards": [],
                "min_global_steps": 0,
                "max_global_steps": 0,
            },
            "agent_name": "",
            "session_id": 1,
            "global_steps": 3,
            "num_turns": 4,
        }
        assert tag == {
            "is_prompt": False,
            "status": "success",
            "uid": "r-a",
            "session": "r-a-1",
            "global_steps": 3,
            "min_global_steps": 0,
            "max_global_steps": 0,
            "prompt_len": len(sample.prompt_ids),
            "response_len": len(sample.response_ids),
            "seq_len": length,
            "has_reward": True,
            "missing_log_probs": 0,
        }
        assert queue.rows["r-b_0_0"]["raw_prompt"] == TASKS[1]["prompt"]
        assert "prompt" not in queue.rows["r-b_0_0"], "it is raw_prompt"
        assert (queue.rows["r-b_0_0"]["index"], queue.rows["r-b_0_0"]["extra_info"]) == (7, {"index": 7})
        assert queue.rows["r-b_0_0"]["agent_name"] == "twice"
        assert json.loads(sample.reward_extras) == {"format": 1}

    run(test)


def test_unknown_rewards_and_logprobs_are_zero_and_tagged(queue: FakeQueue) -> None:
    async def test() -> None:
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
            config = RolloutConfig(n=2)
            await Rollout(gateway, broken, sinks=[sink], config=config, run_id="r").run(TASKS[:1])
        assert queue.rows == {}
        assert queue.tags["r-a"]["status"] == "failure"

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
            sink = TransferQueueSink(queue=queue, ledger=ledger)
            await Rollout(gateway, answer, sinks=[sink], run_id="r").run(TASKS[:1])
            assert set(queue.rows) == {"r-a_0_0"}
            queue.kv_clear(["r-a_0_0"])
            again = TransferQueueSink(queue=queue, ledger=ledger)
            await Rollout(gateway, answer, sinks=[again], resume=True, run_id="r").run(TASKS[:1])
            assert queue.rows == {}
        assert TransferQueueSink(queue=FakeQueue()).contains("a-0") is False

    run(test)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", float("nan")])
def test_limits_that_are_no_count_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=f"max_rows: got {value!r}, expected a whole number of 1 or more"):
        TransferQueueSink(queue=FakeQueue(), max_rows=value)


# -- what a row cannot carry -------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


async def look(task: Mapping[str, Any], session: Any) -> float:
    """Shows the model an image in the second call of task b."""
    await ask(session, "hello")
    if task["id"] == "b":
        question = {"role": "user", "content": [{"type": "text", "text": "and this?"}, IMAGE]}
        await ask(session, "hello", "ok", question)
        await ask(session, "another conversation")
    return 1.0


def test_a_session_with_media_is_refused_as_a_whole_by_name_and_counted(
    queue: FakeQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ledger, memory = tmp_path / "ledger.jsonl", MemorySink()
        sink = TransferQueueSink(queue=queue, ledger=ledger)
        config = RolloutConfig(n=2, export_policy=ExportPolicy(include_inexact=True))
        runners = {"": look, "twice": look}
        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, runners, sinks=[sink, memory], config=config, run_id="r")
            stats = await rollout.run(TASKS)
        assert {key.partition("_")[0] for key in queue.rows} == {"r-a"}
        assert stats.refused == {"TransferQueueSink: media": 2}
        assert stats.to_json()["refused"] == {"TransferQueueSink: media": 2}
        assert stats.finished == len(memory.results) == 4, "the other sinks have it"
        refused = next(one for one in memory.results if one.job.task.uid == "b")
        assert len(refused.samples) == 2
        (key,) = [key for key, one in zip(refused.sample_keys, refused.samples, strict=True) if one.media]
        with pytest.raises(SessionRefusedError) as error:
            make_rows(refused)
        assert str(error.value) == (
            f"session {refused.session}: sample {key}: got 1 media (image), expected none: rows of "
            "TransferQueue carry no media yet; use a JsonlSink or a ParquetSink, or tasks without media"
        )
        assert str(error.value) in caplog.text
        # A task without any row is no task that a trainer can train.
        assert (queue.tags["r-a"]["status"], queue.tags["r-b"]["status"]) == ("finished", "failure")
        assert [json.loads(line)["uid"] for line in ledger.read_text().splitlines()] == ["r-a", "r-a"]
        assert not sink.contains(refused.session)

    run(test)


def test_a_task_with_cleared_rows_stays_finished_after_a_resume(queue: FakeQueue, tmp_path: Path) -> None:
    async def test() -> None:
        ledger = tmp_path / "ledger.jsonl"
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            first = TransferQueueSink(queue=queue, ledger=ledger)
            await Rollout(gateway, answer, sinks=[first], run_id="r").run(TASKS[:1])
            queue.kv_clear(list(queue.tags))
            again = TransferQueueSink(queue=queue, ledger=ledger)
            await Rollout(gateway, answer, sinks=[again], resume=True, run_id="r").run(TASKS[:1])
        assert queue.tags["r-a"]["status"] == "finished"

    run(test)


def result_of(task: RolloutTask) -> SessionResult:
    """A finished session of a task."""
    memory = MemorySink()

    async def main() -> None:
        async with scripted_gateway() as gateway:
            await Rollout(gateway, answer, sinks=[memory]).run([{"id": "a", "prompt": "hello"}])

    run(main)
    (result,) = memory.results
    return replace(result, job=replace(result.job, task=task))


def test_ids_with_underscores_are_in_keys_without_them(queue: FakeQueue) -> None:
    """verl splits keys at underscores: `{uid}_{session}_{index}`."""
    (row,) = make_rows(result_of(RolloutTask("django__11", {}, run="r")))
    assert row.key == "r-django.5F.5F11_0_0"
    assert row.fields["uid"] == row.tag["uid"] == "r-django.5F.5F11"

    async def test() -> None:
        async with scripted_gateway() as gateway:
            sink = TransferQueueSink(queue=queue)
            await Rollout(gateway, answer, sinks=[sink], run_id="r").run([{"id": "a_b", "prompt": "x"}])

    run(test)
    assert sorted(queue.tags) == ["r-a.5Fb", "r-a.5Fb_0_0"]
    assert queue.tags["r-a.5Fb"]["status"] == "finished"


@given(*[st.text(st.sampled_from("ab_-.5F2E"), max_size=9)] * 2)
def test_different_tasks_have_different_uids_in_the_queue(one: str, other: str) -> None:
    assert "_" not in queue_uid(one)
    assert (queue_uid(one) == queue_uid(other)) == (one == other)
    if "_" not in one and not re.search(r"\.(5F|2E)", one):
        assert queue_uid(one) == one


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (RolloutTask("a", "hello"), "columns of task a: got a str, expected an object"),
        (RolloutTask("a", {1: 2}), "columns of task a: got the name 1, expected a text"),
        (RolloutTask("a", {"at": object()}), "columns of task a: at: .* expected a JSON value"),
        (RolloutTask("a", {"half": "\ud83d"}), "columns of task a: half: .* expected a JSON value"),
        (
            RolloutTask("a", {"values": 1, "dataset_values": 2}),
            "columns of task a: got 'values' and 'dataset_values', expected one of them: 'values' is a field "
            "of verl's rows, so the column is written as 'dataset_values'",
        ),
    ],
)
def test_columns_that_a_row_cannot_carry_are_refused_by_name(task: RolloutTask, problem: str) -> None:
    with pytest.raises(SessionRefusedError, match=problem):
        make_rows(result_of(task))


@pytest.mark.parametrize("name", sorted(RESERVED_FIELDS - {"uid", "raw_prompt"}))
def test_no_column_overwrites_a_field_of_the_row(name: str) -> None:
    plain, named = (make_rows(result_of(RolloutTask("a", row)))[0] for row in ({}, {name: "mine"}))
    assert named.fields[f"dataset_{name}"] == "mine"
    for field, value in plain.fields.items():
        assert np.array_equal(named.fields[field], value), field
    assert set(named.fields) == {*plain.fields, f"dataset_{name}"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"uid": "a"}, {}),
        ({"uid": "other"}, {"dataset_uid": "other"}),
        ({"raw_prompt": "text"}, {"dataset_raw_prompt": "text"}),
        ({"prompt": [{"role": "user", "content": "q"}]}, {"raw_prompt": [{"role": "user", "content": "q"}]}),
        (
            {"messages": [{"role": "user", "content": "q"}], "prompt": "q"},
            {"raw_prompt": [{"role": "user", "content": "q"}], "prompt": "q"},
        ),
        ({"index": 3, "extra_info": {"index": 4}}, {"index": 3, "extra_info": {"index": 4}}),
        ({"extra_info": {"index": 4}}, {"index": 4, "extra_info": {"index": 4}}),
        ({"data_source": None, "extra_info": None}, {"data_source": "", "extra_info": {}}),
        ({"agent_name": "x", "ability": "math"}, {"agent_name": "", "ability": "math"}),
        ({"score": float("inf"), "ü": {"a": [1, None]}}, {"score": float("inf"), "ü": {"a": [1, None]}}),
    ],
)
def test_columns_have_the_names_that_verl_uses(row: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = make_rows(result_of(RolloutTask("a", {})))[0].fields
    fields = make_rows(result_of(RolloutTask("a", row)))[0].fields
    assert {name: fields[name] for name in expected} == expected
    assert set(fields) == set(plain) | set(expected)


def test_rows_share_nothing_with_the_task() -> None:
    row = {"extra_info": {"index": 1}, "tags": ["x"]}
    (made, *_) = make_rows(result_of(RolloutTask("a", row)))
    made.fields["extra_info"]["index"] = 2
    made.fields["tags"].append("y")
    assert row == {"extra_info": {"index": 1}, "tags": ["x"]}


def test_rewards_of_turns_and_tools_are_in_extra_fields(queue: FakeQueue) -> None:
    async def test() -> None:
        async def agent(task: Mapping[str, Any], session: Any) -> list[dict[str, Any]]:
            await ask(session, "hello")
            await ask(session, "hello", "ok", "more")
            return [{"score": 0.25, "turn": 1}, {"score": 0.75, "turn": 2}, {"score": 1.0, "format": 1}]

        async with scripted_gateway() as gateway:
            sink = TransferQueueSink(queue=queue)
            await Rollout(gateway, agent, sinks=[sink], run_id="r").run(TASKS[:1])
        extra = queue.rows["r-a_0_0"]["extra_fields"]
        assert extra["turn_scores"] == [0.25, 0.75]
        assert extra["tool_rewards"] == []
        assert extra["reward_extra_info"] == {"format": 1}

    run(test)


def test_a_sample_that_no_reader_would_take_is_refused_with_its_session() -> None:
    result = result_of(RolloutTask("t", {"prompt": "q"}))
    (sample, *others) = result.samples
    broken = replace(sample, response_mask=np.full_like(sample.response_mask, 2))
    result = replace(result, trajectory=replace(result.trajectory, samples=(broken, *others)))
    with pytest.raises(SessionRefusedError, match=r"response_mask\[0\]: got 2, expected 0 and 1"):
        make_rows(result)
