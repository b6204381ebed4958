"""Rollouts over the same tasks again: each has sessions and keys of its own; none is skipped or doubled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import read_jsonl, read_parquet
from branchline.cli.main import main
from branchline.core.errors import InputError, SessionError
from branchline.rollout import transfer_queue
from branchline.rollout.gateway_pool import GatewayPool
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.run_folder import RunFolder
from branchline.rollout.session_gateway import session_options
from branchline.rollout.session_result import SessionJob
from branchline.rollout.sinks import JsonlSink, MemorySink, ParquetSink, Sink, read_lines
from branchline.rollout.stats import RolloutStats
from branchline.rollout.tasks import RolloutTask, new_run_id, read_tasks
from branchline.rollout.transfer_queue import TransferQueueSink
from branchline.runtime.session_store import _is_valid_id
from tests.rollout.harness import ask_once, run, scripted_gateway
from tests.rollout.test_transfer_queue import FakeQueue

TASKS = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"}]
EPOCHS = 3
BROKEN = "runner_error: ValueError: broken"


def without_places(errors: Mapping[str, str]) -> dict[str, str]:
    return {name: error.partition(" (")[0] for name, error in errors.items()}


N = 2


@pytest.mark.parametrize("is_one_rollout", [False, True])
def test_a_further_epoch_writes_its_own_sessions_to_every_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_rollout: bool
) -> None:
    # Tensors need torch and tensordict; tests/transfer_queue has them.
    monkeypatch.setattr(transfer_queue, "to_tensordict", lambda rows: rows)

    async def test() -> None:
        queue, memory = FakeQueue(), MemorySink()
        sinks: list[Sink] = [
            memory,
            JsonlSink(tmp_path),
            ParquetSink(tmp_path / "samples"),
            TransferQueueSink(queue=queue, ledger=tmp_path / "ledger.jsonl"),
        ]
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            rollouts = [
                Rollout(gateway, ask_once, sinks=sinks, config=RolloutConfig(n=N)) for _ in range(EPOCHS)
            ]
            for epoch in range(EPOCHS):
                rollout = rollouts[0 if is_one_rollout else epoch]
                stats = await rollout.run(TASKS)
                assert stats.finished == len(TASKS) * N
        count = EPOCHS * len(TASKS) * N
        sessions = {result.session for result in memory.results}
        assert len(memory.results) == len(sessions) == count
        lines = list(read_lines(tmp_path / "trajectories.jsonl"))
        assert Counter(line["session"] for line in lines) == Counter(sessions)
        assert len({line["run"] for line in lines}) == EPOCHS
        assert {line["uid"] for line in lines} == {"a", "b"}
        assert Counter(line["group"] for line in lines) == {
            f"{line['run']}-{line['uid']}": N for line in lines
        }
        for samples in (
            list(read_jsonl(tmp_path / "samples.jsonl")),
            [row for file in (tmp_path / "samples").glob("*.parquet") for row in read_parquet(file)],
        ):
            assert Counter(sample.session for sample in samples) == Counter(sessions)
        keys = [line["key"] for line in read_lines(tmp_path / "samples.jsonl")]
        assert len(set(keys)) == len(keys) == count
        assert set(keys) == set(queue.rows), "the rows of an epoch do not replace those of another"
        prompts = {key for key, tag in queue.tags.items() if tag["is_prompt"]}
        assert len(prompts) == EPOCHS * len(TASKS)
        assert {queue.tags[key]["uid"] for key in queue.rows} == prompts, "a group is of one epoch"
        stats_file = json.loads((tmp_path / "stats.json").read_text())
        assert (stats_file["sessions"], stats_file["samples"]) == (count, count)

    run(test)


def test_a_folder_that_is_opened_again_takes_a_further_epoch(tmp_path: Path) -> None:
    async def test() -> None:
        for epoch in range(2):
            async with scripted_gateway(journal=tmp_path / "journal") as gateway:
                sinks: list[Sink] = [JsonlSink(tmp_path), ParquetSink(tmp_path / "samples")]
                stats = await Rollout(gateway, ask_once, sinks=sinks).run(TASKS)
            assert stats.finished == 2
            assert len(list(read_lines(tmp_path / "trajectories.jsonl"))) == 2 * (epoch + 1)
            assert len(list((tmp_path / "samples").glob("*.parquet"))) == epoch + 1

    run(test)


def test_two_sinks_on_one_folder_replace_no_file_of_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            sinks = [ParquetSink(tmp_path) for _ in range(2)]
            for sink in sinks:
                await Rollout(gateway, ask_once, sinks=[sink]).run(TASKS)
        rows = [row.session for file in tmp_path.glob("*.parquet") for row in read_parquet(file)]
        assert len(set(rows)) == len(rows) == 4

    run(test)


def test_a_run_id_that_a_pool_has_is_refused() -> None:
    async def test() -> None:
        async with scripted_gateway() as one, scripted_gateway() as other:
            for gateway in (one, other):
                await gateway.session(id="step1-a-0")
                async with GatewayPool([gateway.url], gateway.admin_key) as pool:
                    with pytest.raises(
                        InputError, match="of which the gateway has session step1-a-0 already"
                    ):
                        await Rollout(pool, ask_once, run_id="step1").run(TASKS)

    run(test)


def test_a_second_run_of_a_rollout_waits_for_the_first() -> None:
    async def test() -> None:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def work(task: Mapping[str, Any], session: Any) -> float:
            started.set()
            await go_on.wait()
            return await ask_once(task, session)

        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, work)
            first = asyncio.create_task(rollout.run([{"id": "a", "prompt": "p"}]))
            await started.wait()
            with pytest.raises(InputError, match="this rollout is running"):
                await rollout.run([{"id": "b", "prompt": "p"}])
            go_on.set()
            assert (await first).finished == 1
            assert (await rollout.run([{"id": "b", "prompt": "p"}])).finished == 1

    run(test)


def test_stop_after_counts_the_tasks_of_each_epoch() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, ask_once, config=RolloutConfig(stop_after=2))
            for _ in range(2):
                stats = await rollout.run(TASKS)
                assert (stats.finished, stats.aborted) == (2, 0)

    run(test)


def test_each_run_of_a_rollout_has_figures_of_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        sink, found = JsonlSink(tmp_path), list[RolloutStats]()

        async def agent(task: Mapping[str, Any], session: Any) -> float:
            await ask_once(task, session)
            if len(found) == 1:
                raise ValueError("broken")
            return float(len(found))

        async with scripted_gateway() as gateway:
            rollout = Rollout(gateway, agent, sinks=[sink], config=RolloutConfig(n=N))
            for _ in range(EPOCHS):
                found.append(await rollout.run(TASKS))
                assert rollout.stats is found[-1]
        # Read after the last run: the figures of a run do not change when the next one begins.
        for epoch, stats in enumerate(found):
            is_failed = epoch == 1
            assert (stats.sessions, stats.failed) == (len(TASKS) * N, len(TASKS) * N if is_failed else 0)
            assert stats.prompts == dict.fromkeys(("a", "b"), "failure" if is_failed else "finished")
            assert without_places(stats.errors) == (dict.fromkeys(("a", "b"), BROKEN) if is_failed else {})
            assert stats.reward_mean == (None if is_failed else float(epoch))
        # The folder has all runs: a task that failed in one is not hidden by another.
        runs = [name.removesuffix("-a") for name in sink.stats.prompts if name.endswith("-a")]
        assert len(runs) == EPOCHS
        statuses = {f"{run}-{uid}": sink.stats.prompts[f"{run}-{uid}"] for run in runs for uid in "ab"}
        assert sink.stats.prompts == statuses
        assert list(statuses.values()) == ["finished"] * 2 + ["failure"] * 2 + ["finished"] * 2
        assert without_places(sink.stats.errors) == {f"{runs[1]}-{uid}": BROKEN for uid in "ab"}

    run(test)


def test_the_figures_of_a_folder_with_several_runs_count_the_tasks_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async def fail(task: Mapping[str, Any], session: Any) -> None:
            raise ValueError("broken")

        async with scripted_gateway() as gateway:
            for agent in (ask_once, fail):
                await Rollout(gateway, agent, sinks=[JsonlSink(tmp_path)]).run(TASKS)

    run(test)
    assert main(["stats", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "stats.json").read_text())
    assert (shown["runs"], shown["prompts"]) == (2, {"finished": 2, "failure": 2})
    assert set(without_places(shown["errors"]).values()) == {BROKEN}
    lines = read_lines(tmp_path / "trajectories.jsonl")
    assert set(shown["errors"]) == {line["group"] for line in lines if line["status"] == "failed"}
    main(["stats", str(tmp_path)])
    table = " ".join(capsys.readouterr().out.split())
    assert "runs 2" in table
    assert "tasks 2 finished, 2 failed" in table


def test_a_resumed_rollout_continues_the_figures_of_its_run_only(tmp_path: Path) -> None:
    async def test() -> None:
        folder = RunFolder(tmp_path, "one")
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            for run_id in ("one", "two"):
                await Rollout(gateway, ask_once, sinks=[JsonlSink(tmp_path)], run_id=run_id).run(TASKS[:1])
            sinks, known = folder.open_sinks()
            assert (known.sessions, known.prompts) == (1, {"a": "finished"})
            rollout = Rollout(gateway, ask_once, sinks=sinks, stats=known, resume=True, run_id="one")
            first = await rollout.run(TASKS)
            assert (first.sessions, first.prompts) == (2, {"a": "finished", "b": "finished"})
            assert known.sessions == 1, "figures that were given stay as they are"
            assert await rollout.run(TASKS) == first
            assert rollout.stats is not first
            everything = JsonlSink(tmp_path).stats
            with pytest.raises(InputError, match="stats: got sessions of the runs 'one', 'two', expected"):
                Rollout(gateway, ask_once, stats=everything, resume=True, run_id="one")
            with pytest.raises(InputError, match="stats: got sessions of the runs 'one', expected none"):
                Rollout(gateway, ask_once, stats=known, run_id="one")

    run(test)


def test_a_session_that_only_a_sink_knows_is_not_run_again(tmp_path: Path) -> None:
    """Its result would be in no file, and its figures those of another one."""

    async def test() -> None:
        runs: list[str] = []

        async def agent(task: Mapping[str, Any], session: Any) -> float:
            runs.append(session.id)
            return await ask_once(task, session)

        folder = tmp_path / "folder"
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            await Rollout(gateway, agent, sinks=[JsonlSink(folder)], run_id="r").run(TASKS[:1])
            # The journal says how the session ended.
            again = JsonlSink(folder)
            await Rollout(gateway, agent, sinks=[again], resume=True, run_id="r").run(TASKS[:1])
            assert len(runs) == 1
        written = (folder / "trajectories.jsonl").read_text()
        async with scripted_gateway() as gateway:
            known = JsonlSink(folder)
            rollout = Rollout(gateway, agent, sinks=[MemorySink(), known], resume=True, run_id="r")
            expected = "session r-a-0: JsonlSink has it, and neither `stats` nor the journal say how"
            with pytest.raises(InputError, match=expected):
                await rollout.run(TASKS)
            assert len(runs) == 1
            assert (folder / "trajectories.jsonl").read_text() == written
            sink = JsonlSink(folder)
            rollout = Rollout(gateway, agent, sinks=[sink], stats=sink.stats, resume=True, run_id="r")
            stats = await rollout.run(TASKS)
            assert (stats.sessions, runs) == (2, ["r-a-0", "r-b-0"])

    run(test)


def test_a_run_id_that_a_sink_has_is_refused_before_anything_runs(tmp_path: Path) -> None:
    async def test() -> None:
        runs: list[str] = []

        async def agent(task: Mapping[str, Any], session: Any) -> float:
            runs.append(session.id)
            return await ask_once(task, session)

        sink = MemorySink()
        async with scripted_gateway(journal=tmp_path / "journal") as gateway:
            await Rollout(gateway, agent, sinks=[sink], run_id="step1").run(TASKS)
            with pytest.raises(
                InputError, match=r"run_id: got 'step1', of which MemorySink has .* step1-a-0"
            ):
                await Rollout(gateway, agent, sinks=[MemorySink(), sink], run_id="step1").run(TASKS)
            assert len(runs) == 2
            # Another sink knows nothing, but the journal does.
            with pytest.raises(InputError, match="of which the gateway has session step1-a-0 already"):
                await Rollout(gateway, agent, run_id="step1").run(TASKS)
            assert len(runs) == 2
            # Other tasks come first.
            with pytest.raises(SessionError, match="session step1-b-0 exists already"):
                await Rollout(gateway, agent, run_id="step1").run([{"id": "c", "prompt": "x"}, *TASKS[1:]])
            assert runs.count("step1-b-0") == 1
            await Rollout(gateway, agent, sinks=[sink], run_id="step2").run(TASKS)
        assert {*runs} - {"step1-c-0"} == {"step1-a-0", "step1-b-0", "step2-a-0", "step2-b-0"}
        assert len(sink.results) == 4

    run(test)


def test_a_rollout_is_resumed_under_its_run_id() -> None:
    async def test() -> None:
        async with scripted_gateway() as gateway:
            with pytest.raises(InputError, match="run_id: got none, expected that of the rollout to resume"):
                Rollout(gateway, ask_once, resume=True)
            for name in ("a-b", "a_b", "a/b", "ä", "a" * 17):
                with pytest.raises(
                    InputError, match=r"run_id: got .*, expected at most 16 letters and digits"
                ):
                    Rollout(gateway, ask_once, run_id=name)

    run(test)


def test_a_folder_keeps_its_run_id_when_it_is_resumed(tmp_path: Path) -> None:
    tasks = read_tasks(TASKS)
    first, other = (RunFolder.create(tmp_path / name, tasks, 1).run_id for name in ("first", "other"))
    assert first != other
    assert RunFolder.create(tmp_path / "first", tasks, 1, resume=True).run_id == first


def test_a_folder_of_an_older_version_is_resumed_with_its_ids(tmp_path: Path) -> None:
    async def test() -> None:
        folder, tasks = tmp_path / "run", read_tasks(TASKS)

        async def rollout(run_id: str, *, resume: bool) -> None:
            async with scripted_gateway(journal=folder / "journal") as gateway:
                sinks, stats = RunFolder(folder, run_id).open_sinks()
                await Rollout(gateway, ask_once, sinks=sinks, stats=stats, resume=resume, run_id=run_id).run(
                    tasks
                )

        RunFolder.create(folder, tasks, 1)
        settings = json.loads((folder / "run.json").read_text())
        older = {name: settings[name] for name in ("tasks", "tasks_digest", "n", "ray")}
        (folder / "run.json").write_text(json.dumps(older))
        await rollout("", resume=False)
        resumed = RunFolder.create(folder, tasks, 1, resume=True)
        assert resumed.run_id == ""
        await rollout(resumed.run_id, resume=True)
        lines = [line["session"] for line in read_lines(folder / "trajectories.jsonl")]
        assert sorted(lines) == ["a-0", "b-0"]

    run(test)


def test_the_metadata_of_a_session_name_its_task_and_run() -> None:
    options = session_options(SessionJob(RolloutTask("a", {}, run="r1"), 2, 1), {})
    assert (options["id"], options["group"]) == ("r1-a-2-r1", "r1-a")
    assert options["metadata"] == {"uid": "a", "run": "r1", "slot": 2, "attempt": 1, "agent_name": ""}


@pytest.mark.parametrize("uid", ["a/b", "ä", "", "-a", "a b", "x" * 97, "a\n"])
def test_a_uid_that_cannot_be_part_of_ids_is_refused_by_name(uid: str) -> None:
    with pytest.raises(InputError, match=r"tasks\[0\].uid: got .*, expected at most 96 of the characters"):
        read_tasks([RolloutTask(uid, {})])


uids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9.-]{0,95}\Z") | st.sampled_from(
    ["a", "a-0", "a-0-r1", "0", "r1"]
)
run_ids = st.from_regex(r"\A[A-Za-z0-9]{1,16}\Z") | st.sampled_from(["a", "0", "r1"])
jobs = st.builds(
    SessionJob,
    st.builds(RolloutTask, uids, st.just({}), st.just(""), run_ids),
    st.integers(0, 20) | st.integers(0, 99_999),
    st.integers(0, 3) | st.integers(0, 999),
)


@given(jobs, jobs)
def test_sessions_and_samples_of_all_runs_have_names_of_their_own(one: SessionJob, other: SessionJob) -> None:
    for job in (one, other):
        assert _is_valid_id(job.session_id)
        assert f"{job.task.group}_{job.slot}_0".count("_") == 2
    assert (one.session_id == other.session_id) == (one == other)
    slots = [(job.task.run, job.task.uid, job.slot) for job in (one, other)]
    groups = [f"{job.task.group}_{job.slot}" for job in (one, other)]
    assert (groups[0] == groups[1]) == (slots[0] == slots[1])


@given(st.lists(st.text(max_size=120) | st.integers() | st.none() | st.booleans(), min_size=1, max_size=6))
def test_rows_with_any_ids_get_distinct_valid_uids(ids: list[Any]) -> None:
    tasks = read_tasks([{"id": name} for name in ids])
    assert len({task.uid for task in tasks}) == len(ids)
    assert [task.row["id"] for task in tasks] == ids
    assert read_tasks([RolloutTask(task.uid, {}) for task in tasks])
    assert tasks == read_tasks([{"id": name} for name in ids]), "the same rows have the same uids"


def test_generated_run_ids_differ() -> None:
    assert len({new_run_id() for _ in range(100)}) == 100
