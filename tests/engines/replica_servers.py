"""Several fake servers as one `Replicas`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from branchline.engines.client import ServerConfig
from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import round_trip
from tests.engines.fake_servers import FakeVllm


class ManualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def replica_servers(
    count: int, clock: ManualClock | None = None, **config: float
) -> AsyncGenerator[tuple[Replicas, list[FakeVllm]], None]:
    """Replicas named `0`, `1`, …, each with its own server; `config` are fields of its ServerConfig."""
    async with AsyncExitStack() as stack:
        servers = [FakeVllm() for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server)
        engines = [
            VllmEngine(ServerConfig(server.url, **config), name=str(i))  # type: ignore[arg-type]
            for i, server in enumerate(servers)
        ]
        replicas = Replicas(engines, clock=clock or ManualClock())
        yield replicas, servers
        await replicas.close()


def request_counts(servers: list[FakeVllm]) -> list[int]:
    """The number of generation requests of each server, without checks."""
    return [sum(len(body["prompt"]) > 1 for body in server.bodies) for server in servers]


async def wait_for_checks(replicas: Replicas) -> None:
    """Returns when no replica is being checked."""
    while tasks := [replica.check for replica in replicas._replicas.values() if replica.check]:
        await asyncio.wait(tasks)


async def wait_for_requests(replicas: Replicas) -> None:
    """Returns when everything sent to the servers has arrived."""
    for engine in replicas.engines:
        assert isinstance(engine, VllmEngine)
        await round_trip(engine)
