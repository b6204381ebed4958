"""Rollouts on a real local Ray: two gateways, agents in other processes, killed actors. `make test-ray`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")

from branchline.core.errors import GatewayError, InputError  # noqa: E402
from branchline.gateway.config import GatewayConfig  # noqa: E402
from branchline.rollout.ray_cluster import RayCluster, RayConfig  # noqa: E402
from branchline.rollout.rollout import Rollout, RolloutConfig  # noqa: E402
from branchline.rollout.runners import CommandRunner, RunnerSpec  # noqa: E402
from branchline.rollout.sinks import MemorySink  # noqa: E402
from tests.ray_cluster import agents  # noqa: E402

N = 2


@pytest.fixture(scope="module", autouse=True)
def started_ray() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024 * 1024)
    yield
    ray.shutdown()


def make_tasks(tmp_path: Path, count: int = 4, **fields: Any) -> list[dict[str, Any]]:
    shared = {"turns": 3, "file": str(tmp_path / "notes"), **fields}
    return [
        {"id": str(index), "prompt": f"question {index}", "score": index, **shared} for index in range(count)
    ]


def cluster(tmp_path: Path, **fields: Any) -> RayCluster:
    config = RayConfig(folder=tmp_path, gateways=2, gateway=GatewayConfig(drain_s=1.0), **fields)
    return RayCluster(fields.pop("make_engine", agents.make_engine), config)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def check_notes(tmp_path: Path, sink: MemorySink) -> None:
    """Every answer that an agent received is in the history of its session."""
    contents = {
        result.session: [message["content"] for message in result.line["histories"][0]["messages"]]
        for result in sink.results
        if result.line["histories"]
    }
    noted = agents.read_notes(tmp_path / "notes")
    assert noted
    for session, _, content, _ in noted:
        assert content in contents[session]


def test_a_rollout_uses_all_gateways_and_runners(tmp_path: Path) -> None:
    async def test() -> None:
        sink = MemorySink()
        async with cluster(tmp_path, runners=2) as started:
            processes = await started.processes()
            rollout = Rollout(
                started.pool, started.runner(agents.converse), sinks=[sink], config=RolloutConfig(n=N)
            )
            stats = await rollout.run(make_tasks(tmp_path))
        assert (stats.sessions, stats.finished) == (8, 8)
        assert stats.sampled_tokens == stats.delivered_tokens > 0
        check_notes(tmp_path, sink)
        noted = agents.read_notes(tmp_path / "notes")
        places = Counter(url.partition("/sessions")[0] for _, url, _, _ in noted)
        assert sorted(places.values()) == [12, 12]
        assert {pid for *_, pid in noted} == {pid for pid, _ in processes["runners"]}
        assert os.getpid() not in {pid for pid, _ in (*processes["gateways"], *processes["runners"])}
        assert {"gateway-0", "gateway-1"} <= {file.name for file in (tmp_path / "journals").iterdir()}
        assert sorted(stats.rewards) == [0, 0, 1, 1, 2, 2, 3, 3]

    run(test)


def test_a_gateway_that_is_killed_continues_its_sessions_and_loses_no_acknowledged_token(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        sink = MemorySink()
        async with cluster(tmp_path) as started:
            before = (await started.processes())["gateways"]
            tasks = make_tasks(tmp_path, turns=8, sleep_s=0.05)
            rollout = Rollout(
                started.pool, started.runner(agents.converse), sinks=[sink], config=RolloutConfig(n=N)
            )
            running = asyncio.create_task(rollout.run(tasks))
            while len(agents.read_notes(tmp_path / "notes")) < 12:
                await asyncio.sleep(0.02)
            for pid, _ in before:
                os.kill(pid, signal.SIGKILL)
            stats = await running
            after = (await started.processes())["gateways"]
        assert {pid for pid, _ in before}.isdisjoint({pid for pid, _ in after}), "both were started again"
        assert (stats.sessions, stats.finished) == (8, 8)
        check_notes(tmp_path, sink)
        counts = Counter(session for session, *_ in agents.read_notes(tmp_path / "notes"))
        assert set(counts.values()) == {8}, "no session began again"
        for result in sink.results:
            answers = [m for m in result.line["histories"][0]["messages"] if m["role"] == "assistant"]
            assert len(answers) == 8
            trained = sum(sample.trained_tokens for sample in result.samples)
            assert trained == result.delivered_tokens == sum(len(a["content"]) + 1 for a in answers)

    run(test)


def test_the_sessions_of_a_dead_runner_are_run_again(tmp_path: Path) -> None:
    async def test() -> None:
        sink = MemorySink()
        async with cluster(tmp_path, runners=1) as started:
            runner = started.runner(agents.die_once)
            rollout = Rollout(started.pool, runner, sinks=[sink], run_id="r")
            stats = await rollout.run(make_tasks(tmp_path, 1))
        found = {result.session: (result.status, str(result.end.cause or "")) for result in sink.results}
        assert found == {"r-0-0": ("aborted", "node_lost"), "r-0-0-r1": ("finished", "")}
        assert stats.finished == 1

    run(test)


def test_errors_timeouts_and_commands_of_agents_end_their_sessions_only(tmp_path: Path) -> None:
    async def test() -> None:
        sink = MemorySink()
        command = CommandRunner('echo "$BRANCHLINE_TASK" >&2; exit 3', tmp_path / "logs")
        async with cluster(tmp_path) as started:
            named: dict[str, RunnerSpec] = {
                "hang": agents.hang,
                "fail": agents.fail,
                "": agents.converse,
                "shell": command,
            }
            runners = {name: started.runner(spec) for name, spec in named.items()}
            tasks = make_tasks(tmp_path)
            for task, name in zip(tasks, ("hang", "fail", "", "shell"), strict=True):
                task["agent_name"] = name
            config = RolloutConfig(timeout_s=3.0)
            await Rollout(started.pool, runners, sinks=[sink], config=config, run_id="r").run(tasks)
            notes = agents.read_notes(tmp_path / "notes")
            assert ["ended", "r-0-0"] in notes, "a cancelled agent is cancelled in its process"
        found = {result.session: str(result.end.cause or "") for result in sink.results}
        assert found == {"r-0-0": "timeout", "r-1-0": "runner_error", "r-2-0": "", "r-3-0": "exit_code"}
        errors = {result.session: result.end.error for result in sink.results}
        assert errors["r-1-0"] == "LookupError: nothing for 1"
        assert errors["r-3-0"].startswith("exit code 3\n")
        assert '"id":"3"' in (tmp_path / "logs" / "r-3-0.log").read_text()

    run(test)


def test_a_run_that_is_resumed_finds_the_sessions_of_its_journals(tmp_path: Path) -> None:
    async def test() -> None:
        tasks = make_tasks(tmp_path)
        async with cluster(tmp_path) as started:
            runner, config = started.runner(agents.converse), RolloutConfig(n=N)
            await Rollout(started.pool, runner, config=config, run_id="r").run(tasks)
        noted = agents.read_notes(tmp_path / "notes")
        sink = MemorySink()
        async with cluster(tmp_path) as started:
            rollout = Rollout(
                started.pool,
                started.runner(agents.converse),
                sinks=[sink],
                config=RolloutConfig(n=N),
                resume=True,
                run_id="r",
            )
            stats = await rollout.run(tasks)
        assert stats.finished == 8
        assert agents.read_notes(tmp_path / "notes") == noted, "no agent ran again"
        check_notes(tmp_path, sink)
        with pytest.raises(InputError, match="gateways: got 1, expected 2, as in"):
            async with RayCluster(agents.make_engine, RayConfig(folder=tmp_path, gateways=1)):
                pass

    run(test)


def test_a_gateway_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        config = RayConfig(folder=tmp_path, gateways=1, environment={"BRANCHLINE_TEST_NAME": "given"})
        with pytest.raises(GatewayError, match=r"gateway 0 on .*: not started: .*no engine: given"):
            async with RayCluster(agents.make_no_engine, config):
                pass

    run(test)
