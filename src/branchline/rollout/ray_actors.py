"""What runs in the processes of a Ray cluster: a gateway, and agents.

The classes are plain; `RayCluster` makes actors of them. A gateway actor has one port and one journal for
life: Ray starts a dead one again with the same arguments, so it comes back under the same URL with the same
sessions. An agent gets only the task and the address of its session, as in any other process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from branchline.chat.base import Codec
from branchline.client.async_client import AsyncClient
from branchline.core.errors import GatewayError
from branchline.core.reward import RewardData
from branchline.engines.base import Engine
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.config import GatewayConfig
from branchline.gateway.process import tune_gc
from branchline.gateway.server import Gateway
from branchline.gateway.uvicorn_server import bind_socket
from branchline.rollout.runners import Runner
from branchline.rollout.session_result import SessionEnd
from branchline.rollout.tasks import RolloutTask
from branchline.runtime.router import Router

MakeEngine = Callable[[], tuple[Codec, Engine | UpstreamChat | Router]]
"""Makes the codec and the engine of a gateway in its process; it is sent there."""
_BIND_TIMEOUT_S = 10.0
_BIND_RETRY_S = 0.1


@dataclass(frozen=True)
class GatewaySettings:
    """How a gateway is started, the first time and again."""

    make_engine: MakeEngine
    config: GatewayConfig
    host: str
    port: int
    journal: Path
    """A file on the node's own disk."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that `make_engine` reads, such as keys of engines."""


class GatewayActor:
    """A gateway in a process of its own."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._started = asyncio.Event()
        self._stop_requested = asyncio.Event()

    async def serve(self) -> None:
        """Serves until `stop`. Ray repeats this call if the process died before it returned."""
        settings = self._settings
        try:
            await self._serve(settings)
        except Exception as error:
            # One text: not every error can be sent to another process.
            raise GatewayError(f"gateway {settings.host}:{settings.port}: {error}") from None

    async def _serve(self, settings: GatewaySettings) -> None:
        os.environ.update(settings.environment)
        settings.journal.parent.mkdir(parents=True, exist_ok=True)
        codec, engine = await asyncio.to_thread(settings.make_engine)
        router = engine if isinstance(engine, Router) else Router(engine)
        await router.check_ready()
        await _wait_for_port(settings.host, settings.port)
        gateway = Gateway(
            engine=router,
            codec=codec,
            journal=settings.journal,
            host=settings.host,
            port=settings.port,
            config=settings.config,
        )
        async with gateway:
            tune_gc()
            self._started.set()
            await gateway.serve_until(self._stop_requested)

    async def wait_until_started(self) -> None:
        await self._started.wait()

    async def stop(self) -> None:
        """Makes `serve` stop the gateway and return."""
        self._stop_requested.set()

    async def process(self) -> tuple[int, float]:
        """Returns the id of the process and the CPU seconds that it has used."""
        return os.getpid(), time.process_time()


async def _wait_for_port(host: str, port: int) -> None:
    """Waits while another process has the port, which may be the dead gateway; raises OSError in the end."""
    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            bind_socket(host, port).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_BIND_RETRY_S)
        else:
            return


@dataclass(frozen=True)
class AgentAddress:
    """A session as it is sent to the process of its agent."""

    url: str
    session_id: str
    api_key: str = field(repr=False)
    control_key: str = field(repr=False)


class RunnerActor:
    """Runs agents, many at the same time in one event loop; commands are processes of their own."""

    def __init__(self, folder: str) -> None:
        """`folder` is the working directory, with the modules of agents; it may be missing on a node."""
        if os.path.isdir(folder):
            os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)

    async def run(
        self, runner: Runner, task: RolloutTask, address: AgentAddress
    ) -> tuple[RewardData | None, SessionEnd]:
        """Runs an agent until it is done; returns its reward, and how its run ended."""
        async with AsyncClient(address.url) as client:
            session = client.session(
                address.session_id, api_key=address.api_key, control_key=address.control_key
            )
            try:
                return await runner.run(task, session), SessionEnd()
            except Exception as error:
                return None, SessionEnd.from_error(error)

    async def process(self) -> tuple[int, float]:
        """Returns the id of the process and the CPU seconds that it has used."""
        return os.getpid(), time.process_time()
