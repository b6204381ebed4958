"""A cluster of two nodes, of which one is lost: its sessions are run again at the other. `make test-ray`."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")

from branchline.gateway.config import GatewayConfig  # noqa: E402
from branchline.rollout.ray_cluster import RayCluster, RayConfig  # noqa: E402
from branchline.rollout.rollout import Rollout, RolloutConfig  # noqa: E402
from branchline.rollout.sinks import MemorySink  # noqa: E402
from tests.ray_cluster import agents  # noqa: E402


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    memory = {"object_store_memory": 100 * 1024 * 1024}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    started.lost = started.add_node(num_cpus=1, **memory)
    ray.init(address=started.address, log_to_driver=False)
    started.wait_for_nodes()
    yield started
    ray.shutdown()
    started.shutdown()


def test_the_sessions_of_a_lost_node_are_aborted_and_run_again(tmp_path: Path, cluster: Any) -> None:
    async def test() -> None:
        sink = MemorySink()
        notes = tmp_path / "notes"
        shared = {"turns": 6, "sleep_s": 0.1, "file": str(notes), "score": 1}
        tasks = [{"id": str(index), "prompt": f"question {index}", **shared} for index in range(4)]
        config = RayConfig(tmp_path, gateway=GatewayConfig(drain_s=1.0))
        async with RayCluster(agents.make_engine, config) as started:
            assert len(started.pool.urls) == 2, "one gateway for each node"
            rollout = Rollout(
                started.pool,
                started.runner(agents.converse),
                sinks=[sink],
                config=RolloutConfig(retries={"connection": 2}),
            )
            running = asyncio.create_task(rollout.run(tasks))
            while len(agents.read_notes(notes)) < 8:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(cluster.remove_node, cluster.lost, allow_graceful=False)
            stats = await running
            assert len(started.pool.urls) == 1
        assert stats.prompts == {str(index): "finished" for index in range(4)}
        causes = Counter(str(result.end.cause or "") for result in sink.results)
        assert causes[""] == 4
        assert causes["node_lost"] >= 2, "two sessions were at its gateway"
        assert set(causes) == {"", "node_lost"}
        sessions = [result.session for result in sink.results]
        assert len(set(sessions)) == len(sessions), "every session is written once"
        for result in sink.results:
            if result.status == "finished":
                noted = [line[2] for line in agents.read_notes(notes) if line[0] == result.session]
                assert len(noted) == 6
                told = json.dumps(result.line["histories"])
                assert all(json.dumps(content)[1:-1] in told for content in noted)

    asyncio.run(asyncio.wait_for(test(), 150))
