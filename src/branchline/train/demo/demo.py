"""The demo: a tiny model learns the archive task in minutes on a CPU, through the gateway.

The run folder has everything: settings, metrics, checkpoints, a curve, transcripts before and after. An
interrupted run continues from it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from openai import AsyncOpenAI
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from branchline.core.errors import InputError
from branchline.engines.hf.scheduler import HfConfig
from branchline.gateway.config import GatewayConfig
from branchline.rollout.runners import RunnerFunction
from branchline.rollout.session_gateway import AgentSession
from branchline.runtime.call_record import CallObserver
from branchline.runtime.managed_session import SessionObserver
from branchline.train.demo import MODEL_FOLDER
from branchline.train.demo.archive import CHANCE, ArchiveTask, run_archive_agent
from branchline.train.demo.curves import Curve, check_matplotlib, plot_curves
from branchline.train.demo.evaluation import Evaluation, evaluate, session_client
from branchline.train.demo.settings import DemoSettings as DemoSettings
from branchline.train.metrics import read_metrics
from branchline.train.policy_update import UpdateConfig
from branchline.train.trainer import StepResult, Trainer, TrainerConfig, describe_step

_LEARNED_GAIN = 0.3
"""The rise of the reward from which on a run counts as learned."""
_EVALUATION_TASKS = 64
_SETTINGS_FILE = "demo.json"


@dataclass(frozen=True)
class DemoResult:
    """The outcome of a run; `--json` prints it."""

    first_reward: float
    """The mean over the first tenth of all steps."""
    last_reward: float
    """The mean over the last tenth."""
    steps: int
    seconds: float
    """The time of all steps, without loading and evaluating."""
    sampled_tokens: int
    delivered_tokens: int
    """Sampled tokens that were trained."""
    learned: bool
    score_before: float
    score_after: float
    """Scores on new tasks."""
    run_folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def archive_agent(client: AsyncOpenAI) -> RunnerFunction:
    """Returns the agent for a trainer. All sessions share the connections of the client."""

    async def run(task: ArchiveTask, session: AgentSession) -> float:
        return task.score(await run_archive_agent(session_client(client, session), task))

    return run


def demo_config(settings: DemoSettings) -> TrainerConfig:
    """Returns the settings of the trainer, chosen for two CPU cores."""
    return TrainerConfig(
        steps=settings.steps,
        groups_per_step=4,
        group_size=8,
        seed=settings.seed,
        # Dividing by a group's deviation would weigh lucky guesses most, and a higher learning rate loses
        # skills of the warm start to the noise of the first steps.
        group_std="none",
        # Small batches: the cost of dense attention grows with the square of a batch's tokens.
        update=UpdateConfig(learning_rate=5e-4, schedule="linear", max_batch_tokens=384),
        engine=HfConfig(logprob_kind="processed", prefill_tokens=2048),
    )


def run_demo(
    settings: DemoSettings | None,
    run_folder: Path,
    console: Console,
    *,
    resume: bool = False,
    gateway: GatewayConfig | None = None,
    observers: Sequence[CallObserver] = (),
    on_session_end: Sequence[SessionObserver] = (),
) -> DemoResult:
    """Runs the demo, or continues it, and returns its outcome. `settings` of a resumed run are its own.

    `gateway` and the observers are those of the gateway in training. A KeyboardInterrupt leaves a run folder
    that can be resumed.
    """
    check_matplotlib()
    settings = choose_settings(settings or DemoSettings(), run_folder, resume=resume)
    # A second thread makes an update a third shorter on idle cores, and many times longer on busy ones.
    torch.set_num_threads(1)
    client = create_client()
    trainer = Trainer(
        MODEL_FOLDER,
        archive_agent(client),
        ArchiveTask.draw,
        demo_config(settings),
        run_folder=run_folder,
        resume=resume,
        gateway=gateway,
        observers=observers,
        on_session_end=on_session_end,
    )
    (run_folder / _SETTINGS_FILE).write_text(json.dumps(asdict(settings)) + "\n")
    return asyncio.run(_run(trainer, client, settings, console))


def choose_settings(settings: DemoSettings, run_folder: Path, *, resume: bool) -> DemoSettings:
    """Returns the settings of a new run, or those that a resumed one has. Raises InputError for a folder that
    has no run to resume, or has one and none is resumed."""
    file = run_folder / _SETTINGS_FILE
    if resume:
        if not file.exists():
            raise InputError(f"run_folder: got {run_folder}, expected the folder of an earlier demo")
        return DemoSettings(**json.loads(file.read_text()))
    if file.exists():
        raise InputError(
            f"run_folder: got {run_folder}, which has a run; continue it with --resume, or name another one"
        )
    return settings


def create_client() -> AsyncOpenAI:
    """Returns a client without an address, whose copies for sessions share its connections."""
    return AsyncOpenAI(api_key="-", base_url="http://127.0.0.1")


async def _run(
    trainer: Trainer[ArchiveTask], client: AsyncOpenAI, settings: DemoSettings, console: Console
) -> DemoResult:
    folder = trainer.run_folder
    before = await _evaluate_once(trainer, settings, folder / "before.json")
    console.print(f"warm start: {before.score:.0%} of {_EVALUATION_TASKS} new tasks; chance is {CHANCE:.0%}")
    async with client, aclosing(trainer.steps()) as steps:
        await _show_steps(steps, settings.steps, console)
    after = await _evaluate_once(trainer, settings, folder / "after.json")
    metrics = read_metrics(folder / "metrics.jsonl")
    result = summarise(metrics, before.score, after.score, folder)
    _write_outcome(folder, metrics, before, after)
    console.print(f"\n[bold]before[/bold]\n{before.transcript}", highlight=False)
    console.print(f"\n[bold]after[/bold]\n{after.transcript}\n", highlight=False)
    console.print(describe_result(result), highlight=False)
    return result


async def _evaluate_once(trainer: Trainer[ArchiveTask], settings: DemoSettings, file: Path) -> Evaluation:
    """Evaluates the model, or returns what was found before the run was interrupted."""
    if file.exists():
        return Evaluation(**json.loads(file.read_text()))
    evaluation = await evaluate(trainer.model, trainer.codec, _EVALUATION_TASKS, seed=settings.seed)
    file.write_text(json.dumps(asdict(evaluation)) + "\n")
    return evaluation


async def _show_steps(steps: AsyncGenerator[StepResult, None], total: int, console: Console) -> None:
    """Shows a live table on a terminal, and a line for each step elsewhere."""
    causes: Counter[str] = Counter()
    started_at = time.monotonic()
    sampled = delivered = 0.0
    rewards: list[float] = []
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        async for result in steps:
            metrics = result.metrics
            causes += result.causes
            sampled += metrics["sampled_tokens"]
            delivered += metrics["delivered_tokens"]
            rewards.append(metrics["reward"])
            if not console.is_terminal or result.step == 1:
                live.console.print(describe_step(metrics), highlight=False)
            if not console.is_terminal:
                continue
            table = Table.grid(padding=(0, 2))
            table.add_row("step", f"{result.step} of {total}, {time.monotonic() - started_at:.0f} s")
            table.add_row("reward", f"{metrics['reward']:.2f}  {_sparkline(rewards)}")
            table.add_row("forks", ", ".join(f"{cause} {count}" for cause, count in causes.most_common()))
            table.add_row("tokens", f"{sampled:,.0f} sampled, {delivered:,.0f} delivered to the trainer")
            table.add_row("tree reuse", f"{metrics.get('tree_reuse', 1):.2f} × the tokens computed")
            live.update(Group(ProgressBar(total, result.step), table))
        if not console.is_terminal:
            live.update(Text(""))


def _sparkline(values: Sequence[float], width: int = 60) -> str:
    """Returns values from 0 to 1 as a row of bars; long rows show the mean of neighbours."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(value * 8))] for value in means)


def summarise(
    metrics: Sequence[dict[str, float]], score_before: float, score_after: float, run_folder: Path
) -> DemoResult:
    """Returns the outcome of a run from the metrics of its steps."""
    rewards = [line["reward"] for line in metrics]
    size = max(1, len(rewards) // 10)
    first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
    return DemoResult(
        first_reward=first,
        last_reward=last,
        steps=len(metrics),
        seconds=round(sum(line["step_time"] for line in metrics), 1),
        sampled_tokens=int(sum(line["sampled_tokens"] for line in metrics)),
        delivered_tokens=int(sum(line["delivered_tokens"] for line in metrics)),
        learned=last - first >= _LEARNED_GAIN,
        score_before=score_before,
        score_after=score_after,
        run_folder=str(run_folder),
    )


def describe_result(result: DemoResult) -> str:
    """Returns the outcome in words."""
    verdict = "learned" if result.learned else f"did not learn (a rise of {_LEARNED_GAIN} was expected)"
    return (
        f"{verdict}: reward {result.first_reward:.2f} → {result.last_reward:.2f} (first and last tenth of "
        f"{result.steps} steps), {result.score_before:.0%} → {result.score_after:.0%} of new tasks, "
        f"in {result.seconds:.0f} s\n"
        f"{result.sampled_tokens:,} tokens sampled, {result.delivered_tokens:,} delivered to the trainer\n"
        f"run folder: {result.run_folder} (metrics.jsonl, reward.png, transcripts.md, checkpoints)"
    )


def _write_outcome(
    folder: Path, metrics: Sequence[dict[str, float]], before: Evaluation, after: Evaluation
) -> None:
    plot_curves(
        folder / "reward.png",
        "Reward of the archive task",
        [Curve("mean reward of a step", [line["reward"] for line in metrics])],
        chance=CHANCE,
    )
    (folder / "transcripts.md").write_text(
        f"# Before\n\n```\n{before.transcript}\n```\n\n# After\n\n```\n{after.transcript}\n```\n"
    )
