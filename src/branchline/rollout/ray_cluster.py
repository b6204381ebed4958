"""A rollout past one machine: gateways and agents in processes of a Ray cluster.

Ray only provides the processes: it starts them on its nodes, and again when they die. The rollout itself is
that of one machine, with a `GatewayPool` as its gateway and `RayRunner`s as its runners. Gateways are spread
over the nodes, and each has a journal on its node's own disk, so a dead one is started again on that node:
its sessions continue. If the node is gone, they end as `node_lost` and are run again elsewhere.

    async with RayCluster(make_engine, RayConfig(folder=Path("runs/first"), gateways=4)) as cluster:
        rollout = Rollout(cluster.pool, cluster.runner(run), reward=reward, config=RolloutConfig(n=8))
        stats = await rollout.run(tasks)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from branchline.core.errors import GatewayError, InputError
from branchline.core.extras import requires_extra
from branchline.core.reward import RewardData
from branchline.export.jsonl import replace_file
from branchline.gateway.config import GatewayConfig
from branchline.loop.timeouts import finish_despite_cancel
from branchline.rollout.gateway_pool import GatewayPool
from branchline.rollout.ray_actors import (
    AgentAddress,
    GatewayActor,
    GatewaySettings,
    MakeEngine,
    RunnerActor,
)
from branchline.rollout.runners import Runner, RunnerSpec, make_runner
from branchline.rollout.session_gateway import AgentSession
from branchline.rollout.session_result import EndCause, RunnerError, SessionEnd
from branchline.rollout.tasks import RolloutTask

log = logging.getLogger("branchline.rollout")

GATEWAYS_FILE = "gateways.json"
JOURNALS_FOLDER = "journals"
_PORTS = range(20_000, 30_000)
"""Below the ports that systems give to outgoing connections: one of those could take a dead gateway's."""
_PORT_ATTEMPTS = 5
_MAX_RESTARTS = 100
_AGENTS_PER_RUNNER = 1_000
_CANCEL_S = 4.0
"""How long a cancelled agent may take to end in its process."""
_STOP_S = 10.0
_RESTART_POLL_S = 0.1
_OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Of a Ray that is started here: only tasks and rewards pass through it."""


@dataclass(frozen=True)
class RayConfig:
    """Which cluster, and how many processes."""

    folder: Path
    """The folder of the run; a resumed run finds there which node has which journal."""
    address: str = "auto"
    """`auto`: the cluster of this machine, or a new one on it; else the address of a cluster, HOST:PORT."""
    gateways: int | None = None
    """None: one for each node, or as many as the run had before."""
    runners: int | None = None
    """Processes that run agents; None: as many as gateways."""
    journal_folder: Path | None = None
    """On a disk of each node; None: `journals` in `folder`."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the gateways, such as keys of engines."""

    def __post_init__(self) -> None:
        for name in ("gateways", "runners"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: got {value}, expected 1 or more")
        if "://" in self.address:
            raise InputError(f"address: got {self.address!r}, expected auto or HOST:PORT")


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster."""

    id: str
    ip: str


@dataclass(frozen=True)
class _StartedGateway:
    url: str
    actor: Any
    served: asyncio.Future[None]
    """Ends when the gateway was stopped, or fails when Ray has given it up."""


class RayCluster:
    """The gateways and runners of a rollout, while the block runs."""

    def __init__(self, make_engine: MakeEngine, config: RayConfig) -> None:
        """`make_engine` is called in the process of each gateway. Raises MissingExtraError without ray."""
        with requires_extra():
            import ray
        self._ray = ray
        self._make_engine = make_engine
        self._config = config
        key = config.gateway.admin_key or "ak-bl-" + secrets.token_urlsafe(24)
        self._gateway_config = replace(config.gateway, admin_key=key)
        self._owns_ray = False
        self._gateways: list[_StartedGateway] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._runners = RunnerActors()
        self._pool: GatewayPool | None = None

    @property
    def pool(self) -> GatewayPool:
        """The gateways, for a `Rollout`."""
        if self._pool is None:
            raise InputError("RayCluster: got no start, expected `async with RayCluster(…) as cluster`")
        return self._pool

    def runner(self, spec: RunnerSpec) -> RayRunner:
        """Returns a runner that runs an agent in the processes of the cluster."""
        return RayRunner(self._runners, make_runner(spec))

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await finish_despite_cancel(self.stop())

    async def _start(self) -> None:
        config = self._config
        self._connect()
        nodes = self._nodes()
        placed = place_gateways(nodes, config.gateways, config.folder / GATEWAYS_FILE)
        ports = random.sample(_PORTS, len(placed) * _PORT_ATTEMPTS)
        started = await asyncio.gather(
            *(
                self._start_gateway(index, node, ports[index :: len(placed)])
                for index, node in enumerate(placed)
            ),
            return_exceptions=True,
        )
        self._gateways = [one for one in started if isinstance(one, _StartedGateway)]
        for error in started:
            if isinstance(error, BaseException):
                raise error
        _write_placement(config.folder / GATEWAYS_FILE, placed)
        admin_key = self._gateway_config.admin_key
        self._pool = GatewayPool([gateway.url for gateway in self._gateways], admin_key)
        self._watchers = [asyncio.create_task(self._watch(gateway)) for gateway in self._gateways]
        for index in range(config.runners or len(placed)):
            # Softly: an agent needs no files of its node, so a lost node's runner starts on another.
            options = self._actor_options(nodes[index % len(nodes)], is_soft=True)
            actor = self._ray.remote(RunnerActor).options(max_concurrency=_AGENTS_PER_RUNNER, **options)
            self._runners.actors.append(actor.remote(os.getcwd()))
        await self._runners.wait_until_started()

    def _connect(self) -> None:
        """Connects to the cluster, unless this process is connected; `auto` starts one if there is none."""
        ray, address = self._ray, self._config.address
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # The rule of later releases: an actor without GPUs sees those of its node.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._owns_ray = True
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            if address != "auto":
                raise InputError(
                    f"address: got {address!r}, expected a Ray cluster that answers: {error}"
                ) from error
            ray.init(
                address="local",
                include_dashboard=False,
                logging_level=logging.WARNING,
                object_store_memory=_OBJECT_STORE_BYTES,
            )

    def _nodes(self) -> list[ClusterNode]:
        """The nodes that run actors; those with the same address stay next to each other."""
        alive = [
            ClusterNode(node["NodeID"], node["NodeManagerAddress"])
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) > 0
        ]
        if not alive:
            raise InputError("ray: got a cluster without CPUs, expected a node that can run gateways")
        return sorted(alive, key=lambda node: (node.ip, node.id))

    def _actor_options(self, node: ClusterNode, *, is_soft: bool) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=is_soft)
        return {"num_cpus": 0, "max_restarts": _MAX_RESTARTS, "scheduling_strategy": strategy}

    async def _start_gateway(self, index: int, node: ClusterNode, ports: Sequence[int]) -> _StartedGateway:
        """Starts a gateway on a node, on the first of the ports that is free there."""
        folder = self._config.journal_folder or self._config.folder / JOURNALS_FOLDER
        options = self._actor_options(node, is_soft=False)
        for attempt, port in enumerate(ports):
            settings = GatewaySettings(
                self._make_engine,
                self._gateway_config,
                node.ip,
                port,
                folder.absolute() / f"gateway-{index}",
                self._config.environment,
            )
            actor = self._ray.remote(GatewayActor).options(max_task_retries=-1, **options).remote(settings)
            served = asyncio.ensure_future(_result(actor.serve.remote()))
            started = asyncio.ensure_future(_result(actor.wait_until_started.remote()))
            await asyncio.wait({served, started}, return_when=asyncio.FIRST_COMPLETED)
            if not served.done():
                return _StartedGateway(f"http://{node.ip}:{port}", actor, served)
            started.cancel()
            error = served.exception()
            self._ray.kill(actor)
            if attempt == len(ports) - 1 or "Address already in use" not in str(error):
                break
        raise GatewayError(f"gateway {index} on {node.ip}: not started: {_describe(error)}")

    async def _watch(self, gateway: _StartedGateway) -> None:
        """Tells the pool when Ray has given a gateway up, with its node for example."""
        try:
            await asyncio.shield(gateway.served)
        except Exception as error:
            await self.pool.mark_lost(gateway.url, _describe(error))

    async def stop(self) -> None:
        """Stops all processes that were started; a Ray that was started here, too."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._pool is not None:
            await self._pool.close()
        if self._ray.is_initialized():
            await self._runners.stop()
            for gateway in self._gateways:
                gateway.actor.stop.remote()
            served = [gateway.served for gateway in self._gateways]
            if served:
                await asyncio.wait(served, timeout=self._gateway_config.drain_s + _STOP_S)
            for gateway in self._gateways:
                with suppress(Exception):  # of a gateway that was lost
                    self._ray.kill(gateway.actor)
                if gateway.served.done() and not gateway.served.cancelled():
                    gateway.served.exception()  # Read, so that asyncio does not log it.
        self._gateways = []
        if self._owns_ray and self._ray.is_initialized():
            self._ray.shutdown()

    async def processes(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the process ids of gateways and runners, and the CPU seconds that each has used."""
        gateways = [_result(gateway.actor.process.remote()) for gateway in self._gateways]
        runners = [_result(actor.process.remote()) for actor in self._runners.actors]
        return {"gateways": await asyncio.gather(*gateways), "runners": await asyncio.gather(*runners)}


class RunnerActors:
    """The processes that run agents; a new agent goes to the one with the fewest."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self._running: Counter[int] = Counter()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        """Waits for processes that died; they get no agents meanwhile."""

    async def wait_until_started(self) -> None:
        await asyncio.gather(*(_result(actor.process.remote()) for actor in self.actors))

    async def run(
        self, runner: Runner, task: RolloutTask, address: AgentAddress
    ) -> tuple[RewardData | None, SessionEnd]:
        """Runs an agent; cancels it if the caller is cancelled. Raises RunnerError if its process dies."""
        import ray

        index = await self._choose()
        self._running[index] += 1
        try:
            ref = self.actors[index].run.remote(runner, task, address)
            running = asyncio.ensure_future(_result(ref))
            try:
                reward, end = await asyncio.shield(running)
            except asyncio.CancelledError:
                ray.cancel(ref)
                await asyncio.wait({running}, timeout=_CANCEL_S)
                running.cancel()
                raise
            return reward, end
        except ray.exceptions.RayActorError as error:
            if index not in self._restarts:
                self._restarts[index] = asyncio.create_task(self._wait_for_restart(index))
            raise RunnerError(EndCause.NODE_LOST, f"the agent's process died: {_describe(error)}") from error
        finally:
            self._running[index] -= 1

    async def _choose(self) -> int:
        """Returns the process with the fewest agents, of those that did not die or were started again."""
        while True:
            ready = [index for index in range(len(self.actors)) if index not in self._restarts]
            if ready:
                return min(ready, key=lambda one: self._running[one])
            waiting = [restart for restart in self._restarts.values() if not restart.done()]
            if not waiting:
                raise RunnerError(EndCause.NODE_LOST, "no process is left that runs agents")
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_for_restart(self, index: int) -> None:
        """Waits until Ray has started a process again; one that Ray has given up stays in `_restarts`."""
        import ray

        while True:
            try:
                await self.actors[index].process.remote()
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_RESTART_POLL_S)
            except ray.exceptions.RayActorError as error:
                log.error("a process that runs agents is lost: %s", _describe(error))
                return
            else:
                del self._restarts[index]
                return

    async def stop(self) -> None:
        """Ends all processes."""
        import ray

        restarts = list(self._restarts.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


@dataclass(frozen=True)
class RayRunner:
    """Runs the agent of another runner in a process of the cluster."""

    processes: RunnerActors
    runner: Runner

    async def run(self, task: RolloutTask, session: AgentSession) -> RewardData | None:
        parts = urlsplit(session.base_url)
        url = f"{parts.scheme}://{parts.netloc}"
        address = AgentAddress(url, session.id, session.api_key, session.control_key)
        reward, end = await self.processes.run(self.runner, task, address)
        if end.cause is not None:
            raise RunnerError(end.cause, end.error, end.trace)
        return reward


def place_gateways(nodes: Sequence[ClusterNode], count: int | None, file: Path) -> list[ClusterNode]:
    """Returns the node of each gateway: that of the run before, which has its journal, else spread evenly.

    Raises InputError if the run before had another number of gateways.
    """
    known: list[str] = json.loads(file.read_text())["nodes"] if file.exists() else []
    if known and count is not None and count != len(known):
        raise InputError(f"gateways: got {count}, expected {len(known)}, as in {file}")
    placed: list[ClusterNode] = []
    used: Counter[str] = Counter()
    for index in range(len(known) or count or len(nodes)):
        candidates = [node for node in nodes if known and node.ip == known[index]]
        if known and not candidates:
            log.error("node %s is gone, with the journal of gateway %d", known[index], index)
        # The fewest gateways first, then the order of the nodes.
        node = min(candidates or nodes, key=lambda one: used[one.id])
        used[node.id] += 1
        placed.append(node)
    return placed


def _write_placement(file: Path, placed: Sequence[ClusterNode]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file) as opened:
        opened.write(json.dumps({"nodes": [node.ip for node in placed]}).encode() + b"\n")


async def _result(ref: Any) -> Any:
    return await ref


def _describe(error: BaseException | None) -> str:
    """The first line of an error: Ray's have the trace of the other process as text."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
