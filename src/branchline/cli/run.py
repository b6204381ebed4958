"""`branchline run`: agents on tasks, recorded as exact tokens, scored, and written as each session ends."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from branchline.cli.agents import (
    AGENT_HELP,
    add_agent_options,
    add_judge_options,
    build_judge,
    build_reward,
    build_runners,
    parse_count,
)
from branchline.cli.engine_options import (
    add_embedded_engine_options,
    add_engine_options,
    default_max_tokens,
    parse_json_object,
)
from branchline.cli.engines import build_router, engine_keys
from branchline.cli.run_settings import describe_run
from branchline.cli.stats import render_stats
from branchline.core.errors import InputError
from branchline.gateway.config import GatewayConfig

if TYPE_CHECKING:  # imported late below: they need packages of the `serve` extra
    from branchline.chat.base import Codec
    from branchline.gateway.server import Gateway
    from branchline.rollout.gateway_pool import GatewayPool
    from branchline.rollout.ray_cluster import RayCluster
    from branchline.rollout.rollout import Rollout, RolloutConfig
    from branchline.rollout.run_folder import RunFolder
    from branchline.rollout.stats import RolloutStats
    from branchline.rollout.tasks import RolloutTask
    from branchline.runtime.router import Router

_DESCRIPTION = """\
Runs agents on tasks, n sessions for each. Every call of an agent goes through a gateway of this process and
is recorded as exact tokens. Each session is scored and written when it ends. An interrupted run continues
with --resume; no finished session is run again.
"""
_EPILOG = f"""\
examples:
  branchline run tasks.jsonl --agent my_agent:run --reward my_agent:score --n 8 --out runs/first
      the model in this process; see --engine
  branchline run tasks.jsonl --command 'pi -p "$BRANCHLINE_PROMPT"' --reward-command 'python check.py' \\
      --engine vllm --engine-url http://127.0.0.1:8000 --n 4 --timeout-s 600 --out runs/pi
      an external agent, a vLLM server, a verifier
  branchline run tasks.jsonl --agent my_agent:run --judge-url http://host/v1 --judge-model big --out runs/j
  branchline run tasks.jsonl --agent my_agent:run --out runs/first --resume
  branchline run tasks.jsonl --agent my_agent:run --out runs/big --ray auto --gateways 4 \\
      --engine vllm --engine-url http://10.0.0.9:8000
      gateways and agents in processes of a Ray cluster, spread over its machines

{AGENT_HELP}
DIR gets trajectories.jsonl (a line for each session: task, agent_name, session, status, reward, histories,
metrics), samples.jsonl or samples/*.parquet, stats.json, the journal, and logs of commands. The status of a
session is finished, failed (the agent, the reward or the judge broke) or aborted (stopped early, too old,
interrupted). Failed and aborted sessions keep their histories and have no samples.

Exit codes: 0 at least one session finished, 1 none did, 2 bad input, 130 interrupted.
"""


def add_run(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run agents on tasks; record, score and write every session",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_agent_options(parser)
    add_judge_options(parser)
    _add_run_options(parser.add_argument_group("run"))
    _add_ray_options(parser.add_argument_group("more than one process or machine (needs ray)"))
    add_engine_options(parser.add_argument_group("engine"))
    add_embedded_engine_options(parser.add_argument_group("embedded engine (--engine hf)"))
    parser.set_defaults(run=run)


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of the run")
    group.add_argument("--n", type=int, default=1, metavar="N", help="sessions of each task (default: 1)")
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in DIR, with the same tasks, agents, reward, engine and formats",
    )
    group.add_argument("--limit", type=int, metavar="N", help="run the first N tasks only")
    group.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="sessions at the same time (default: 64)"
    )
    group.add_argument(
        "--agent-concurrency",
        type=parse_count,
        action="append",
        default=[],
        metavar="NAME=N",
        help="the same for the agent of a name; repeatable",
    )
    group.add_argument(
        "--retry",
        type=parse_count,
        action="append",
        default=[],
        metavar="CAUSE=N",
        help="run a session again that ended for a cause: timeout, connection, no_calls, exit_code, "
        "runner_error, reward_error, stale, …; repeatable",
    )
    group.add_argument(
        "--oversample",
        type=int,
        default=0,
        metavar="N",
        help="sessions of each task beyond --n; when --n have finished, the others are aborted",
    )
    group.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop when N tasks are finished; abort the others, which --resume runs again",
    )
    group.add_argument(
        "--max-staleness",
        type=int,
        metavar="N",
        help="abort a session whose oldest token is more than N policy versions old when it ends",
    )
    group.add_argument(
        "--reward-workers", type=int, default=8, metavar="N", help="rewards at the same time (default: 8)"
    )
    group.add_argument(
        "--reward-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of a reward function, verifier or judge, for each session or task (default: 600)",
    )
    group.add_argument(
        "--session-options",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help='options of every session: \'{"sampling": {"temperature": 1}, "limits": {"calls": 50}}\'',
    )
    group.add_argument(
        "--samples", choices=("jsonl", "parquet"), default="jsonl", help="format of samples (default: jsonl)"
    )
    group.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def _add_ray_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray",
        metavar="auto|HOST:PORT",
        help="run gateways and agents in processes of a Ray cluster; auto: the cluster of this machine, or a "
        "new one on it. A gateway that dies is started again and continues its sessions; agents whose "
        "connection failed meanwhile are run again (--retry connection=2 is the default here)",
    )
    group.add_argument(
        "--gateways", type=int, metavar="N", help="gateways in the cluster (default: one for each machine)"
    )
    group.add_argument(
        "--ray-runners",
        type=int,
        metavar="N",
        help="processes in the cluster that run agents, up to 1000 each (default: as many as gateways)",
    )
    group.add_argument(
        "--ray-journals",
        type=Path,
        metavar="DIR",
        help="a folder on each machine's own disk for journals (default: journals in --out)",
    )


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Runs the tasks; progress goes to stderr."""
    from branchline.gateway.process import run_server
    from branchline.rollout.run_folder import RunFolder
    from branchline.rollout.tasks import read_tasks

    tasks = read_tasks(options.tasks)[: options.limit]
    _check_ray_options(options)
    runners = build_runners(options, options.out.absolute() / "logs")
    reward, judge = build_reward(options), build_judge(options)
    if reward is not None and judge is not None:
        raise InputError("--judge-url: got a judge and a reward, expected one of them")
    _check_names(runners, tasks)
    config = _config(options)
    engine = None if options.ray else build_router(options)
    folder = RunFolder.create(
        options.out,
        tasks,
        options.n,
        resume=options.resume,
        is_ray=options.ray is not None,
        samples=options.samples,
        settings=describe_run(options, runners, reward, judge, None if engine is None else engine[0]),
    )
    try:
        stats = run_server(_run(options, config, tasks, (runners, reward, judge), folder, engine))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted; continue with: branchline run … --out {options.out} --resume", file=sys.stderr)
        raise KeyboardInterrupt from None
    if options.json:
        return msgspec.json.encode(stats.to_json()).decode() + "\n", int(not stats.finished)
    text = render_stats(stats.to_json(), options.out)
    return text, int(not stats.finished)


def _check_ray_options(options: argparse.Namespace) -> None:
    if options.ray and options.engine == "hf":
        raise InputError(
            "--ray: got --engine hf, expected --engine vllm, sglang or openai with --engine-url: an embedded "
            "model belongs to one process"
        )
    for name in ("gateways", "ray_runners", "ray_journals"):
        value = getattr(options, name)
        if value is not None and not options.ray:
            raise InputError(f"--{name.replace('_', '-')}: got {value}, expected --ray with it")


def _check_names(runners: Any, tasks: list[RolloutTask]) -> None:
    """Raises InputError for an unknown agent before a model is loaded."""
    from branchline.rollout.runners import select_runner

    for index, task in enumerate(tasks):
        try:
            select_runner(runners, task.agent_name)
        except InputError as error:
            raise InputError(f"tasks[{index}].{error}") from error


def _config(options: argparse.Namespace) -> RolloutConfig:
    from branchline.rollout.rollout import RolloutConfig

    return RolloutConfig(
        n=options.n,
        concurrency=options.concurrency,
        runner_concurrency=dict(options.agent_concurrency),
        timeout_s=options.timeout_s,
        retries={**({"connection": 2} if options.ray else {}), **dict(options.retry)},
        oversample=options.oversample,
        stop_after=options.stop_after,
        max_staleness=options.max_staleness,
        reward_workers=options.reward_workers,
        reward_timeout_s=options.reward_timeout_s,
        session={"agent_reward": options.agent_reward, **options.session_options},
    )


async def _run(
    options: argparse.Namespace,
    config: RolloutConfig,
    tasks: list[RolloutTask],
    agents: tuple[Any, Any, Any],
    folder: RunFolder,
    engine: tuple[Codec, Router] | None,
) -> RolloutStats:
    """`engine` is None if gateways of a Ray cluster make their own."""
    from branchline.rollout.rollout import Rollout

    _cancel_on_sigterm()
    runners, reward, judge = agents
    async with AsyncExitStack() as stack:
        if engine is None:
            cluster = await stack.enter_async_context(_make_cluster(options))
            _cancel_on_sigterm()  # Ray has set a handler of its own.
            gateway: Gateway | GatewayPool = cluster.pool
            runners = {name: cluster.runner(runner) for name, runner in runners.items()}
        else:
            gateway = await stack.enter_async_context(await _make_gateway(options, folder, *engine))
        sinks, stats = folder.open_sinks()
        rollout = Rollout(
            gateway,
            runners,
            reward=reward,
            judge=judge,
            sinks=sinks,
            config=config,
            resume=options.resume,
            stats=stats,
            run_id=folder.run_id,
        )
        progress = asyncio.create_task(_show_progress(rollout, len(tasks) * options.n))
        try:
            return await rollout.run(tasks)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)


def _cancel_on_sigterm() -> None:
    """Makes SIGTERM cancel the task that called this."""
    main = asyncio.current_task()
    assert main is not None
    with suppress(NotImplementedError):  # on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)


def _gateway_config(options: argparse.Namespace) -> GatewayConfig:
    return GatewayConfig(
        max_in_flight=options.max_in_flight, default_max_tokens=default_max_tokens(options), drain_s=1.0
    )


async def _make_gateway(
    options: argparse.Namespace, folder: RunFolder, codec: Codec, router: Router
) -> Gateway:
    from branchline.gateway.server import Gateway

    await router.check_ready()
    return Gateway(engine=router, codec=codec, journal=folder.journal_path, config=_gateway_config(options))


def _make_cluster(options: argparse.Namespace) -> RayCluster:
    from branchline.rollout.ray_cluster import RayCluster, RayConfig

    # Without `run`: a process of the cluster needs no commands.
    engine_options = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "run"})
    config = RayConfig(
        folder=options.out,
        address=options.ray,
        gateways=options.gateways,
        runners=options.ray_runners,
        journal_folder=options.ray_journals,
        gateway=_gateway_config(options),
        environment=engine_keys(),
    )
    return RayCluster(partial(build_router, engine_options), config)


async def _show_progress(rollout: Rollout, total: int) -> None:
    """Shows a bar on a terminal until it is cancelled."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    text = TextColumn("{task.fields[text]}")
    columns = (TextColumn("sessions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total, text="")
        while True:
            stats = rollout.stats
            mean = stats.reward_mean
            shown = f"{stats.failed} failed, {stats.aborted} aborted, {stats.sampled_tokens:,} tokens"
            shown += "" if mean is None else f", reward {mean:.3f}"
            progress.update(bar, completed=min(total, stats.finished + stats.failed), text=shown)
            await asyncio.sleep(0.2)
