"""Several fake servers behind one `Replicas`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from branchline.engines.replicas import Replicas
from branchline.engines.vllm import VllmEngine
from tests.engines.fake import FakeVllm
from tests.engines.model import round_trip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def farm(
    count: int, clock: Clock | None = None
) -> AsyncGenerator[tuple[Replicas, list[FakeVllm]], None]:
    """Replicas named `0`, `1`, … over as many servers."""
    async with AsyncExitStack() as stack:
        servers = [FakeVllm() for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server)
        engines = [VllmEngine(server.url, name=str(i)) for i, server in enumerate(servers)]
        replicas = Replicas(engines, clock=clock or Clock())
        yield replicas, servers
        await replicas.close()


def asked(servers: list[FakeVllm]) -> list[int]:
    return [len(server.bodies) for server in servers]


async def arrival(replicas: Replicas) -> None:
    """Whatever was sent has arrived."""
    for engine in replicas.engines:
        assert isinstance(engine, VllmEngine)
        await round_trip(engine)
