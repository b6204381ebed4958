"""`branchline run`: agents on tasks, recorded as exact tokens, scored, and written as each session ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from branchline.cli.agents import build_judge, build_reward, build_runners, check_tasks
from branchline.cli.commands.run import RunOptions
from branchline.cli.engine_options import default_max_tokens
from branchline.cli.engines import build_router, engine_keys
from branchline.cli.observability import Observability, configure_observability
from branchline.cli.progress import shown_progress
from branchline.cli.run_folders import keep_config, new_run_folder
from branchline.cli.run_settings import describe_run
from branchline.cli.stats import render_stats
from branchline.core.errors import InputError
from branchline.gateway.config import GatewayConfig
from branchline.rollout.config import RolloutConfig

if TYPE_CHECKING:  # imported late below: they need packages of the `serve` extra
    from branchline.chat.base import Codec
    from branchline.gateway.server import Gateway
    from branchline.rollout.gateway_pool import GatewayPool
    from branchline.rollout.judge import RelativeJudge
    from branchline.rollout.ray_cluster import RayCluster
    from branchline.rollout.rewards import RewardFunction, VerifierCommand
    from branchline.rollout.run_folder import RunFolder
    from branchline.rollout.runners import Runner
    from branchline.rollout.stats import RolloutStats
    from branchline.rollout.tasks import RolloutTask
    from branchline.rollout.trackers import Trackers
    from branchline.runtime.router import Router

    Agents = tuple[Mapping[str, Runner], RewardFunction | VerifierCommand | None, RelativeJudge | None]


def run(options: RunOptions) -> tuple[str, int]:
    """Runs the tasks; progress and logs go to stderr."""
    from branchline.gateway.process import run_server
    from branchline.rollout.run_folder import LOGS_FOLDER, RunFolder, check_run_folder
    from branchline.rollout.tasks import read_tasks
    from branchline.rollout.trackers import Trackers

    tasks = read_tasks(options.agents.tasks)[: options.limit]
    if options.cluster.ray and options.engines.engine == "hf":
        raise InputError(
            "--ray: got --engine hf, expected --engine vllm, sglang or openai with --engine-url: an embedded "
            "model belongs to one process"
        )
    path = options.run_folder or new_run_folder("run")
    check_run_folder(path, resume=options.resume)
    runners = build_runners(options.agents, tasks, path.absolute() / LOGS_FOLDER)
    reward, judge = build_reward(options.agents), build_judge(options.judging)
    if reward is not None and judge is not None:
        raise InputError("--judge-url: got a judge and a reward, expected one of them")
    check_tasks(runners, tasks)
    trackers = Trackers(options.report_to, path.name)
    engine = None if options.cluster.ray else build_router(options.engines)
    folder = RunFolder.create(
        path,
        tasks,
        options.rollout.n,
        resume=options.resume,
        is_ray=options.cluster.ray is not None,
        samples=options.sample_format,
        settings=describe_run(options, runners, reward, judge, None if engine is None else engine[0]),
    )
    if not options.resume:
        keep_config(folder.path, options)
    observability = configure_observability(options.logs)
    try:
        agents = runners, reward, judge
        stats = run_server(_run(options, tasks, agents, folder, engine, observability, trackers))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted; continue with: branchline run … --run-folder {path} --resume", file=sys.stderr)
        raise KeyboardInterrupt from None
    finally:
        observability.close()
    if options.json:
        return msgspec.json.encode(stats.to_json()).decode() + "\n", int(not stats.finished)
    return render_stats(stats.to_json(), path), int(not stats.finished)


def _rollout_config(options: RunOptions) -> RolloutConfig:
    config = options.rollout
    return replace(
        config,
        retries={**({"connection": 2} if options.cluster.ray else {}), **config.retries},
        session={"agent_reward": options.agent_reward, **config.session},
    )


async def _run(
    options: RunOptions,
    tasks: list[RolloutTask],
    agents: Agents,
    folder: RunFolder,
    engine: tuple[Codec, Router] | None,
    observability: Observability,
    trackers: Trackers,
) -> RolloutStats:
    """`engine` is None if gateways of a Ray cluster make their own."""
    from branchline.rollout.rollout import Rollout

    _cancel_on_sigterm()
    runners, reward, judge = agents
    async with AsyncExitStack() as stack:
        if engine is None:
            cluster = await stack.enter_async_context(_make_cluster(options, folder))
            _cancel_on_sigterm()  # Ray has set a handler of its own.
            gateway: Gateway | GatewayPool = cluster.pool
            runners = {name: cluster.runner(runner) for name, runner in runners.items()}
        else:
            gateway = await stack.enter_async_context(
                await _make_gateway(options, folder, *engine, observability)
            )
        sinks, stats = folder.open_sinks()
        rollout = Rollout(
            gateway,
            runners,
            reward=reward,
            judge=judge,
            sinks=sinks,
            config=_rollout_config(options),
            resume=options.resume,
            stats=stats,
            run_id=folder.run_id,
            log_folder=folder.log_folder,
        )
        wanted = min(len(tasks), options.rollout.stop_after or len(tasks))
        async with shown_progress(rollout, wanted * options.rollout.n, trackers):
            return await rollout.run(tasks)


def _cancel_on_sigterm() -> None:
    """Makes SIGTERM cancel the task that called this."""
    main = asyncio.current_task()
    assert main is not None
    with suppress(NotImplementedError):  # on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)


def _gateway_config(options: RunOptions) -> GatewayConfig:
    return replace(options.gateway, default_max_tokens=default_max_tokens(options.engines, options.gateway))


async def _make_gateway(
    options: RunOptions, folder: RunFolder, codec: Codec, router: Router, observability: Observability
) -> Gateway:
    from branchline.gateway.server import Gateway

    await router.check_ready()
    return Gateway(
        engine=router,
        codec=codec,
        journal=folder.journal_path,
        config=_gateway_config(options),
        observers=observability.observers,
        on_session_end=observability.on_end,
    )


def _make_cluster(options: RunOptions, folder: RunFolder) -> RayCluster:
    from branchline.rollout.ray_cluster import RayCluster, RayConfig

    cluster = options.cluster
    assert cluster.ray is not None
    config = RayConfig(
        folder=folder.path,
        address=cluster.ray,
        gateways=cluster.gateways,
        runners=cluster.ray_runners,
        journal_folder=cluster.ray_journals,
        gateway=_gateway_config(options),
        environment=engine_keys(),
    )
    return RayCluster(partial(build_router, options.engines), config)
