"""`branchline train`: trains a model on the rewards of an agent, with the embedded trainer."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from branchline.cli.agents import (
    AGENT_HELP,
    add_agent_options,
    build_reward,
    build_runners,
)
from branchline.cli.engine_options import parse_json_object
from branchline.core.errors import EpisodesFailedError, InputError

if TYPE_CHECKING:  # imported late below: it needs packages of the `train` extra
    from branchline.train.trainer import Trainer, TrainerConfig

T = TypeVar("T")
_DESCRIPTION = """\
Trains a model with GRPO on the rewards of an agent. The agent runs as it is: each session is a URL and a key.
Its calls are recorded as exact tokens, every sampled token is trained once, and the engine gets the new
weights after each step.
"""
_EPILOG = f"""\
examples:
  branchline train examples/rollout/records.jsonl --agent examples.rollout.script_agent:run \\
      --reward examples.rollout.records:score --steps 30
      the demo's model (0.56 million weights), on a CPU, in a minute or two
  branchline train tasks.jsonl --agent my_agent:run --reward my_agent:score --steps 200 \\
      --model Qwen/Qwen3-0.6B --learning-rate 1e-6
  branchline train … --run-folder runs/first --resume

{AGENT_HELP}
The run folder has metrics.jsonl, config.json and checkpoints that transformers and `branchline serve --model`
load. However a run ends, its last complete step is saved: by Ctrl-C, a failed agent, an error in an update.
--resume continues from it, with the same settings.

Exit codes: 0 trained, 1 no episode of a step finished, 2 bad input, 130 interrupted.
"""
_DEMO_LEARNING_RATE, _LEARNING_RATE = 5e-4, 1e-6
_DEMO_MAX_BATCH_TOKENS, _MAX_BATCH_TOKENS = 384, 4096


def add_train(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train a model on the rewards of an agent",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_agent_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, required=True, metavar="N", help="training steps")
    group.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="a folder or a Hugging Face name (default: the demo's small model)",
    )
    group.add_argument("--run-folder", type=Path, metavar="DIR", help="(default: runs/train-TIME)")
    group.add_argument(
        "--resume", action="store_true", help="continue the run in --run-folder, as what it was"
    )
    group.add_argument(
        "--n",
        type=int,
        default=8,
        metavar="N",
        help="sessions of a task, compared with each other (default: 8)",
    )
    group.add_argument(
        "--tasks-per-step", type=int, default=4, metavar="N", help="tasks drawn for each step (default: 4)"
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help=f"(default: {_DEMO_LEARNING_RATE:g} for the demo's model, else {_LEARNING_RATE:g})",
    )
    group.add_argument(
        "--max-batch-tokens",
        type=int,
        metavar="N",
        help="tokens of one forward pass; less needs less memory, and a longer row has a pass of its own "
        f"(default: {_DEMO_MAX_BATCH_TOKENS} for the demo's model, else {_MAX_BATCH_TOKENS})",
    )
    group.add_argument(
        "--layout",
        choices=("auto", "tree", "rows"),
        default="auto",
        help="how rows are computed: as packed trees, which share prefixes, or one by one; auto: as trees, "
        "unless the model cannot follow them (default: auto)",
    )
    group.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        metavar="N",
        help="let sessions of the next steps run during an update, on weights N versions old (default: 0)",
    )
    group.add_argument(
        "--sampling",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help="overrides sampling parameters of the agent: '{\"max_tokens\": 200}'",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of tasks and sampling (default: 0)"
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="runs with one seed are equal bit for bit on one CPU; several times slower (without it they "
        "differ by rounding)",
    )
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str | tuple[str, int]:
    """Trains; a line for each step goes to stdout, or to stderr with --json."""
    from branchline.rollout.runners import DispatchRunner, select_runner
    from branchline.rollout.tasks import read_tasks
    from branchline.train.demo import MODEL_FOLDER
    from branchline.train.trainer import Trainer

    if options.resume and options.run_folder is None:
        raise InputError("--resume: got no --run-folder, expected the folder of the run to continue")
    if not options.model:
        import torch

        # A second thread makes an update of so small a model a third shorter on idle cores, and many times
        # longer on busy ones.
        torch.set_num_threads(1)
    tasks = read_tasks(options.tasks)
    runners = build_runners(options)
    for index, task in enumerate(tasks):
        try:
            select_runner(runners, task.agent_name)
        except InputError as error:
            raise InputError(f"tasks[{index}].{error}") from error
    folder = options.run_folder or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    trainer: Trainer[Any] = Trainer(
        options.model or MODEL_FOLDER,
        DispatchRunner(runners),
        [task.row for task in tasks],
        _config(options),
        run_folder=folder,
        reward=build_reward(options),
        resume=options.resume,
        device=options.device or (None if options.model else "cpu"),
    )
    console = Console(file=sys.stderr if options.json else None)
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
    if options.json:
        return json.dumps(outcome) + "\n"
    return (
        f"reward {outcome['first_reward']:.3f} → {outcome['last_reward']:.3f} "
        f"(first and last tenth of {outcome['steps']} steps)\n"
        f"{outcome['sampled_tokens']:,} tokens sampled, {outcome['delivered_tokens']:,} trained\n"
        f"run folder: {folder}\n"
    )


def _config(options: argparse.Namespace) -> TrainerConfig:
    from branchline.engines.hf.scheduler import HfConfig
    from branchline.train.policy_update import UpdateConfig
    from branchline.train.trainer import TrainerConfig

    common: dict[str, Any] = {
        "steps": options.steps,
        "groups_per_step": options.tasks_per_step,
        "group_size": options.n,
        "max_staleness": options.max_staleness,
        "sampling": options.sampling,
        "episode_timeout_s": options.timeout_s,
        "seed": options.seed,
        "deterministic": options.deterministic,
    }
    if options.model:
        return TrainerConfig(
            update=UpdateConfig(
                learning_rate=_value(options.learning_rate, _LEARNING_RATE),
                max_batch_tokens=_value(options.max_batch_tokens, _MAX_BATCH_TOKENS),
                layout=options.layout,
            ),
            **common,
        )
    return TrainerConfig(
        # As in the demo: chosen for two CPU cores and half a million weights.
        group_std="none",
        update=UpdateConfig(
            learning_rate=_value(options.learning_rate, _DEMO_LEARNING_RATE),
            schedule="linear",
            max_batch_tokens=_value(options.max_batch_tokens, _DEMO_MAX_BATCH_TOKENS),
            layout=options.layout,
        ),
        engine=HfConfig(logprob_kind="processed", prefill_tokens=2048, threads=1),
        **common,
    )


def _value(given: T | None, default: T) -> T:
    return default if given is None else given


async def _run(trainer: Trainer[Any], console: Console) -> list[dict[str, float]]:
    """Runs the remaining steps; returns the metrics of all steps of the run."""
    from branchline.train.metrics import METRICS_FILE, read_metrics
    from branchline.train.trainer import describe_step

    async with aclosing(trainer.steps()) as steps:
        async for result in steps:
            console.print(describe_step(result.metrics), highlight=False)
    return read_metrics(trainer.run_folder / METRICS_FILE)


def _summarise(metrics: Sequence[dict[str, float]], folder: Path) -> dict[str, Any]:
    rewards = [line["reward"] for line in metrics]
    size = max(1, len(rewards) // 10)
    return {
        "steps": len(metrics),
        "first_reward": sum(rewards[:size]) / size if rewards else 0.0,
        "last_reward": sum(rewards[-size:]) / size if rewards else 0.0,
        "sampled_tokens": int(sum(line["sampled_tokens"] for line in metrics)),
        "delivered_tokens": int(sum(line["delivered_tokens"] for line in metrics)),
        "run_folder": str(folder),
    }
