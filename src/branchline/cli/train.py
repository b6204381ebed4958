"""`branchline train`: trains a model on the rewards of an agent, with the embedded trainer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from branchline.cli.agents import build_reward, build_runners, check_tasks
from branchline.cli.commands.train import TrainOptions
from branchline.cli.observability import Observability, configure_observability
from branchline.cli.progress import describe_time
from branchline.cli.run_folders import keep_config, new_run_folder
from branchline.core.errors import EpisodesFailedError, InputError, MissingExtraError
from branchline.engines.hf_config import HfConfig
from branchline.train.config import TrainerConfig

if TYPE_CHECKING:  # imported late below: it needs packages of the `train` extra
    from branchline.rollout.runners import Runner
    from branchline.train.trainer import Trainer


def run(options: TrainOptions) -> str | tuple[str, int]:
    """Trains; a line for each step goes to stdout, or to stderr with --json."""
    from branchline.rollout.run_folder import check_run_folder
    from branchline.rollout.tasks import read_tasks

    if not options.model:
        import torch

        # A second thread makes an update of so small a model a third shorter on idle cores, and many times
        # longer on busy ones.
        torch.set_num_threads(1)
    tasks = read_tasks(options.agents.tasks)
    try:
        held_out = [] if options.eval is None else read_tasks(options.eval)
    except InputError as error:
        text = str(error)
        raise InputError(text.replace("tasks:", "eval:", 1) if text.startswith("tasks:") else text) from error
    runners = build_runners(options.agents, [*tasks, *held_out])
    check_tasks(runners, tasks)
    check_tasks(runners, held_out, "eval")
    rows, held_out_rows = ([task.row for task in part] for part in (tasks, held_out))
    folder = options.run_folder or new_run_folder("train")
    check_run_folder(folder, resume=options.resume)
    observability = configure_observability(options.logs)
    try:
        return _train(options, folder, runners, rows, held_out_rows, observability)
    finally:
        observability.close()


def _train(
    options: TrainOptions,
    folder: Path,
    runners: Mapping[str, Runner],
    tasks: Sequence[dict[str, Any]],
    eval_tasks: Sequence[dict[str, Any]],
    observability: Observability,
) -> str | tuple[str, int]:
    from branchline.rollout.runners import DispatchRunner
    from branchline.train.demo import MODEL_FOLDER
    from branchline.train.held_out import describe_evaluation
    from branchline.train.trainer import Trainer

    console = Console(file=sys.stderr if options.json else None)
    trainer: Trainer[Any] = Trainer(
        options.model or MODEL_FOLDER,
        DispatchRunner(runners),
        tasks,
        _config(options),
        run_folder=folder,
        reward=build_reward(options.agents),
        resume=options.resume,
        device=options.device or (None if options.model else "cpu"),
        gateway=options.gateway,
        observers=observability.observers,
        on_session_end=observability.on_end,
        eval_tasks=eval_tasks,
        on_evaluation=lambda metrics: console.print(describe_evaluation(metrics), highlight=False),
    )
    if not options.resume:
        keep_config(folder, options)
    try:
        metrics = asyncio.run(_run(trainer, console))
    except EpisodesFailedError as error:
        print(f"branchline: error: {error}", file=sys.stderr)
        return "", 1
    except KeyboardInterrupt:
        command = f"branchline train … --run-folder {folder} --resume"
        console.print(f"interrupted; continue with: {command}", highlight=False)
        raise
    outcome = _summarise(metrics, folder)
    _draw(metrics, folder)
    if options.json:
        return json.dumps(outcome) + "\n"
    return (
        f"reward {outcome['first_reward']:.3f} → {outcome['last_reward']:.3f} "
        f"(first and last tenth of {outcome['steps']} steps)\n"
        f"{outcome['sampled_tokens']:,} tokens sampled, {outcome['delivered_tokens']:,} trained\n"
        f"run folder: {folder}\n"
    )


def _config(options: TrainOptions) -> TrainerConfig:
    config = replace(options.training, update=options.update_config())
    if options.model:
        return config
    # As in the demo: chosen for two CPU cores and half a million weights.
    engine = HfConfig(logprob_kind="processed", prefill_tokens=2048, threads=1)
    return replace(config, group_std="none", engine=engine)


async def _run(trainer: Trainer[Any], console: Console) -> list[dict[str, float]]:
    """Runs the remaining steps; returns the metrics of all steps of the run."""
    from branchline.train.metrics import METRICS_FILE, read_metrics
    from branchline.train.trainer import describe_step

    first, total, started_at = trainer.step, trainer.config.steps, time.monotonic()
    async with aclosing(trainer.steps()) as steps:
        async for result in steps:
            times = describe_time(time.monotonic() - started_at, result.step - first, total - result.step)
            line, *more = describe_step(result.metrics, total).splitlines()
            console.print("\n".join((f"{line}  {times}", *more)), highlight=False, soft_wrap=True)
    return read_metrics(trainer.run_folder / METRICS_FILE)


def _summarise(metrics: Sequence[dict[str, float]], folder: Path) -> dict[str, Any]:
    from branchline.train.held_out import GREEDY, SAMPLED, is_evaluation

    evaluations = [line for line in metrics if is_evaluation(line)]
    metrics = [line for line in metrics if not is_evaluation(line)]
    rewards = [line["reward"] for line in metrics]
    size = max(1, len(rewards) // 10)
    scores = (
        {
            name: {key: line[key] for key in (GREEDY, SAMPLED) if key in line}
            for name, line in (("first_eval", evaluations[0]), ("last_eval", evaluations[-1]))
        }
        if evaluations
        else {}
    )
    return {
        "steps": len(metrics),
        "first_reward": sum(rewards[:size]) / size if rewards else 0.0,
        "last_reward": sum(rewards[-size:]) / size if rewards else 0.0,
        "sampled_tokens": int(sum(line["sampled_tokens"] for line in metrics)),
        "delivered_tokens": int(sum(line["delivered_tokens"] for line in metrics)),
        **scores,
        "run_folder": str(folder),
    }


def _draw(metrics: Sequence[dict[str, float]], folder: Path) -> None:
    """Draws the rewards of the steps and of the evaluations, if matplotlib is there."""
    from branchline.train.demo.curves import Curve, plot_curves
    from branchline.train.held_out import GREEDY, SAMPLED, is_evaluation

    rewards = [line["reward"] for line in metrics if not is_evaluation(line)]
    curves = [Curve("mean reward of a step", rewards)]
    for name, key in (("eval, greedy", GREEDY), ("eval, as sampled", SAMPLED)):
        if points := [(line["step"], line[key]) for line in metrics if key in line]:
            steps, values = zip(*points, strict=True)
            curves.append(Curve(name, values, steps=steps))
    with suppress(MissingExtraError):
        plot_curves(folder / "reward.png", folder.name, curves)
