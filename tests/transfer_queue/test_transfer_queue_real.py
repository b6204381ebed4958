"""The real TransferQueue on a local Ray: rows of a rollout read back exactly. `make test-transfer-queue`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
tq = pytest.importorskip("transfer_queue")
ray = pytest.importorskip("ray")

from branchline.core.errors import InputError  # noqa: E402
from branchline.rollout.rollout import Rollout, RolloutConfig  # noqa: E402
from branchline.rollout.sinks import MemorySink  # noqa: E402
from branchline.rollout.transfer_queue import TENSOR_FIELDS, TransferQueueSink, make_rows  # noqa: E402
from tests.rollout.harness import ask, scripted_gateway  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def started_queue() -> Any:
    # Each storage unit and the controller need a CPU of Ray's; the machine may have fewer.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()


async def answer(task: Mapping[str, Any], session: Any) -> dict[str, Any]:
    await ask(session, str(task["prompt"]))
    if task["id"] == "b":
        await ask(session, str(task["prompt"]), "ok", "and more")
    if task["id"] == "c":
        raise ValueError("broken")
    return {"score": 0.5, "format": 1}


TASKS = [
    {
        "id": name,
        "prompt": f"question {name}",
        "data_source": "math",
        "extra_info": {"index": index},
        # What columns may be: null, nested, equal, of several lengths, named as a field of verl's rows.
        "hint": None,
        "steps": [{"at": step} for step in range(index)],
        "level": 2.5,
        "values": [1, 2],
    }
    for index, name in enumerate(("a", "b", "c"))
]


def run_rollout(partition: str, run_id: str = "r", **options: Any) -> MemorySink:
    memory = MemorySink()

    async def main() -> None:
        sink = TransferQueueSink(partition, global_steps=4, **options)
        async with scripted_gateway() as gateway:
            config = RolloutConfig(n=2)
            await Rollout(gateway, answer, sinks=[sink, memory], config=config, run_id=run_id).run(TASKS)

    asyncio.run(main())
    return memory


def test_rows_read_back_exactly() -> None:
    memory = run_rollout("train")
    listed = tq.kv_list(partition_id="train")["train"]
    expected = {row.key: row for result in memory.results for row in make_rows(result, 4)}
    assert set(listed) == {"r-a", "r-b", "r-c", *expected}
    assert [listed[name]["status"] for name in ("r-a", "r-b", "r-c")] == ["finished", "finished", "failure"]
    for key, row in expected.items():
        assert {name: listed[key][name] for name in row.tag} == dict(row.tag)
    keys = sorted(expected)
    read = tq.kv_batch_get(keys=keys, partition_id="train")
    for name in TENSOR_FIELDS:
        for key, tensor in zip(keys, read[name].unbind(), strict=True):
            array = np.asarray(tensor)
            assert array.dtype == expected[key].fields[name].dtype, name
            assert np.array_equal(array, expected[key].fields[name]), name
    for name in set(expected[keys[0]].fields) - set(TENSOR_FIELDS):
        values = read[name]
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        assert values == [expected[key].fields[name] for key in keys], name


def test_tasks_may_have_other_columns() -> None:
    """JSON lines need not have the same columns; each row reads back its own."""
    memory = MemorySink()
    tasks = [{"id": "a", "prompt": "one", "level": 1}, {"id": "b", "prompt": "two", "topic": {"x": [1]}}]

    async def main() -> None:
        async with scripted_gateway() as gateway:
            sink = TransferQueueSink("columns", global_steps=4)
            await Rollout(gateway, answer, sinks=[sink, memory], config=RolloutConfig(n=1)).run(tasks)

    asyncio.run(main())
    for result in memory.results:
        for row in make_rows(result, 4):
            read = tq.kv_batch_get(keys=[row.key], partition_id="columns")
            for name in set(row.fields) - set(TENSOR_FIELDS):
                values = read[name]
                (value,) = values.tolist() if hasattr(values, "tolist") else list(values)
                assert value == row.fields[name], name


def test_a_further_epoch_has_rows_of_its_own_and_a_run_is_not_written_twice() -> None:
    run_rollout("again")
    before = tq.kv_list(partition_id="again")["again"]
    with pytest.raises(InputError, match="run_id: got 'r', of which TransferQueueSink has session"):
        run_rollout("again")
    assert tq.kv_list(partition_id="again")["again"] == before
    run_rollout("again", "second")
    after = tq.kv_list(partition_id="again")["again"]
    assert len(after) == 2 * len(before)
    assert {key: after[key] for key in before} == before


def test_a_full_partition_holds_the_rollout_back() -> None:
    async def main() -> None:
        sink = TransferQueueSink("full", max_rows=1)
        taken: set[str] = set()
        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, answer, sinks=[sink], config=RolloutConfig(n=2))
            running = asyncio.create_task(rollout.run(TASKS[:2]))
            while len(taken) < 4:
                await asyncio.sleep(0.05)
                listed = await asyncio.to_thread(tq.kv_list, "full")
                rows = [key for key in listed.get("full", {}) if "_" in key]
                assert len(rows) <= 1
                taken.update(rows)
                if rows:
                    await asyncio.to_thread(tq.kv_clear, rows, "full")
            await running

    asyncio.run(main())
