"""A small GRPO trainer: an agent's sessions in, checkpoints of a better model out.

The life of a step: `episodes` runs groups of sessions through a gateway, with the model in an embedded
engine; `export/batches` turns their trajectories into rows with advantages and weights; `policy_update` packs
the rows as trees and changes the weights; the engine gets the new weights under the next policy version.

Policy version n is the policy after n steps. The episodes of step n start at version n − `max_staleness` or
later: with 0, episodes and updates alternate; with more, the episodes of the next steps run during an update.

    async def run(task, session):           # any agent that can set a base URL and a key
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        return reward

    Trainer("Qwen/Qwen3-0.6B", run, tasks, run_folder="runs/first").run()
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
import transformers
from rich.console import Console

from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import EpisodesFailedError, InputError
from branchline.core.model_folder import MODEL_FILES, find_model_folder, model_name
from branchline.engines.hf.devices import choose_device
from branchline.export.batches import training_rows
from branchline.export.credit import GroupStatistics, GroupStd, group_statistics
from branchline.export.packing import TrainingRow
from branchline.export.trajectory import Trajectory
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.loop.timeouts import finish_despite_cancel
from branchline.rollout.failures import own_place
from branchline.rollout.rewards import RewardFunction, VerifierCommand
from branchline.rollout.run_folder import LOGS_FOLDER
from branchline.rollout.run_settings import (
    RUN_FILE,
    describe_reward,
    describe_runner,
    keep_settings,
    name_function,
)
from branchline.rollout.runners import RunnerSpec, make_runner
from branchline.runtime.call_record import CallObserver
from branchline.runtime.managed_session import SessionObserver
from branchline.train.checkpoints import (
    CheckpointState,
    find_checkpoint,
    load_optimizer,
    load_state,
    save_checkpoint,
)
from branchline.train.config import TrainerConfig as TrainerConfig
from branchline.train.episodes import EpisodeGroup, EpisodeRunner
from branchline.train.held_out import GREEDY, SAMPLED, evaluate, is_evaluation
from branchline.train.layouts import FLEX
from branchline.train.metrics import METRICS_FILE, MetricsLog, read_metrics
from branchline.train.policy_update import PolicyUpdater
from branchline.train.seeded_engine import SeededEngine

T = TypeVar("T")
UNTRUNCATED: Mapping[str, None] = dict.fromkeys(
    ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
     "min_tokens", "allowed_token_ids", "seed")
)  # fmt: skip
"""Sampling parameters of the agent that a run removes. The trainer's log-probabilities are those of the whole
distribution, and with a seed of the agent's all episodes of a group would be the same."""
MAY_CHANGE = frozenset(
    {"steps", "max_staleness", "engine", "episode_timeout_s", "reward_timeout_s", "checkpoint_every",
     "keep_checkpoints", "eval_every", "report_to", "learning_rate", "schedule", "passes", "max_grad_norm",
     "max_batch_tokens"}
)  # fmt: skip
"""Fields of TrainerConfig and of its `update` that a resumed run may have otherwise."""
log = logging.getLogger("branchline.train")


@dataclass(frozen=True)
class StepResult:
    """A completed step."""

    step: int
    """From 1 on; also the policy version after the step."""
    metrics: dict[str, float]
    groups: Sequence[EpisodeGroup]

    @property
    def causes(self) -> Counter[str]:
        """The forks of the step's sessions by cause."""
        return sum((group.causes for group in self.groups), Counter[str]())


class Trainer(Generic[T]):
    """Trains a model on the rewards of an agent."""

    def __init__(
        self,
        model: str | Path,
        agent: RunnerSpec,
        tasks: Sequence[T] | Callable[[Random], T],
        config: TrainerConfig | None = None,
        *,
        run_folder: str | Path,
        reward: RewardFunction | VerifierCommand | None = None,
        resume: bool = False,
        device: str | None = None,
        gateway: GatewayConfig | None = None,
        observers: Sequence[CallObserver] = (),
        on_session_end: Sequence[SessionObserver] = (),
        eval_tasks: Sequence[T] = (),
        on_evaluation: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        """`model` is a folder or a Hugging Face name. `agent` is a function of (task, session), another
        runner of `rollout/runners.py`, or the name of one. `tasks` is a sequence to draw from, or a function
        that draws one. `reward` is a function of (task, trajectory), for agents that return no reward. A run
        folder that has a checkpoint is continued with `resume` and refused without. `gateway` and the
        observers are those of the gateway that records the sessions. `eval_tasks` are those on which the
        policy is evaluated every `eval_every` steps; `on_evaluation` gets the metrics of each evaluation."""
        self._eval_tasks, self._on_evaluation = tuple(eval_tasks), on_evaluation
        self._gateway_config = gateway or GatewayConfig()
        self._observers, self._on_session_end = tuple(observers), tuple(on_session_end)
        self.config = config = config or TrainerConfig()
        self.run_folder = Path(run_folder)
        self.device = choose_device(device)
        self._agent = make_runner(agent)
        self._tasks, self._reward = tasks, reward
        self._model_folder = find_model_folder(model, MODEL_FILES)
        checkpoint = find_checkpoint(self.run_folder)
        if not resume and (checkpoint is not None or (self.run_folder / METRICS_FILE).exists()):
            raise InputError(
                f"run_folder: got {self.run_folder}, which has a run; resume it, or name another folder"
            )
        is_resumed = checkpoint is not None or (self.run_folder / METRICS_FILE).exists()
        self.run_folder.mkdir(parents=True, exist_ok=True)
        keep_settings(self.run_folder / RUN_FILE, self._settings(), resume=is_resumed)
        self.codec = GenericCodec.open(self._model_folder)
        reference = self._load(self._model_folder) if config.update.loss.reference_kl_coefficient else None
        self._updater = PolicyUpdater(self._load(checkpoint or self._model_folder), config.update, reference)
        self._state = CheckpointState(0, config.seed, 0)
        self._metrics = MetricsLog(self._create_run_folder(), config.report_to)
        if checkpoint is not None:
            self._state = load_state(checkpoint)
            if self._state.seed != config.seed:
                raise InputError(f"seed: got {config.seed}, expected {self._state.seed}, as in {checkpoint}")
            load_optimizer(checkpoint, self._updater.optimizer)
        self._metrics.truncate(self._state.step)

    @property
    def model(self) -> Any:
        """The model that is trained; the engine has a copy of its own."""
        return self._updater.model

    @property
    def step(self) -> int:
        """The number of completed steps, which is the policy version."""
        return self._state.step

    def run(self) -> list[dict[str, float]]:
        """Trains until the last step and prints a line for each; returns the metrics of all steps."""

        async def run_all() -> list[dict[str, float]]:
            console, lines = Console(), []
            async with aclosing(self.steps()) as steps:
                async for result in steps:
                    lines.append(result.metrics)
                    console.print(describe_step(result.metrics), highlight=False)
            return lines

        return asyncio.run(run_all())

    async def steps(self) -> AsyncGenerator[StepResult, None]:
        """Runs the remaining steps and yields each when it is complete.

        Whenever it ends, also by a cancellation, a failed agent or an error in an update, the last complete
        step is saved as a checkpoint, unless `checkpoint_every` is None.
        """
        config = self.config
        engine_config = config.engine
        if config.deterministic:
            # What is computed for a reply then depends on its prompt and seed only.
            engine_config = replace(engine_config, max_batch=1, cache_bytes=0)
        model = deepcopy(self.model)
        if model.config._attn_implementation == FLEX:  # Made for long packed batches, not for decoding.
            model.set_attn_implementation("sdpa")
        engine = SeededEngine(model, engine_config, name="policy", version=self.step, run_seed=config.seed)
        batches: deque[asyncio.Task[list[EpisodeGroup]]] = deque()
        try:
            async with Gateway(
                engine=engine,
                codec=self.codec,
                config=self._gateway_config,
                observers=self._observers,
                on_session_end=self._on_session_end,
            ) as gateway:
                sampling = {**UNTRUNCATED, "temperature": config.update.temperature, **config.sampling}
                make_episodes = partial(
                    EpisodeRunner,
                    gateway,
                    self._agent,
                    reward=self._reward,
                    export_policy=config.export_policy,
                    timeout_s=config.episode_timeout_s,
                    log_folder=self.run_folder / LOGS_FOLDER,
                    reward_timeout_s=config.reward_timeout_s,
                )
                runner = make_episodes(sampling=sampling)
                evaluations = {
                    GREEDY: make_episodes(sampling={**sampling, "temperature": 0.0}, is_evaluation=True),
                    SAMPLED: make_episodes(sampling=sampling, is_evaluation=True),
                }
                await self._evaluate(evaluations)
                try:
                    while self.step < config.steps:
                        started_at = time.perf_counter()
                        last = min(self.step + config.max_staleness, config.steps - 1)
                        for index in range(self.step + len(batches), last + 1):
                            batches.append(asyncio.create_task(self._run_episodes(runner, index)))
                        groups = await batches[0]
                        batches.popleft()
                        episodes_s = time.perf_counter() - started_at
                        metrics = await finish_despite_cancel(self._complete_step(engine, groups, started_at))
                        yield StepResult(self.step, {**metrics, "episodes_time": episodes_s}, groups)
                        await self._evaluate(evaluations)
                finally:
                    for batch in batches:
                        batch.cancel()
                    await asyncio.gather(*batches, return_exceptions=True)
        finally:
            try:
                self._save_last()
            finally:
                self._metrics.close()

    async def _evaluate(self, runners: Mapping[str, EpisodeRunner]) -> None:
        """Evaluates the policy if that is due after this step, and was not done before an interruption."""
        is_due = self.step % self.config.eval_every == 0 or self.step == self.config.steps
        if not self._eval_tasks or not is_due:
            return
        lines = read_metrics(self._metrics.path)
        if any(is_evaluation(line) and line["step"] == self.step for line in lines):
            return
        metrics = await evaluate(runners, self._eval_tasks, self.step)
        self._metrics.write(metrics)
        if self._on_evaluation is not None:
            self._on_evaluation(metrics)

    async def _run_episodes(self, runner: EpisodeRunner, index: int) -> list[EpisodeGroup]:
        """Runs the groups of a step. Its tasks depend on the seed and the step only."""
        rng = Random(f"{self.config.seed} {index}")
        tasks = [
            self._tasks(rng) if callable(self._tasks) else rng.choice(self._tasks)
            for _ in range(self.config.groups_per_step)
        ]
        groups = await asyncio.gather(
            *(
                runner.run_group(task, f"step{index}-group{number}", self.config.group_size)
                for number, task in enumerate(tasks)
            )
        )
        errors = [error for group in groups for error in group.errors]
        if len(errors) == self.config.groups_per_step * self.config.group_size:
            first = f"{type(errors[0]).__name__}: {errors[0]}{own_place(errors[0])}"
            raise EpisodesFailedError(
                f"step {index}: all episodes failed, the first with {first}"
            ) from errors[0]
        return groups

    async def _complete_step(
        self, engine: SeededEngine, groups: Sequence[EpisodeGroup], started_at: float
    ) -> dict[str, float]:
        """Updates the policy and the engine, and records the step."""
        rows = self.build_rows(groups)
        divisor = None
        if self.config.constant_length is not None:
            divisor = float(sum(len(group.trajectories) for group in groups) * self.config.constant_length)
        progress = self.step / self.config.steps
        updated = await asyncio.to_thread(self._updater.update, rows, progress, divisor=divisor)
        version = self.step + 1
        sampled = sum(sum(group.answer_lengths) for group in groups)
        self._state = CheckpointState(version, self.config.seed, self._state.num_tokens + sampled)
        # From here on the step is complete, whatever becomes of the engine.
        metrics = {
            "step": float(version),
            **_episode_metrics(groups, self.config.group_std),
            **_advantage_metrics(rows),
            **updated,
            "total_sampled_tokens": float(self._state.num_tokens),
            "staleness": float(version - 1 - _oldest_version(rows, version - 1)),
        }
        try:
            await engine.update_weights(self.model.state_dict(), version)
        finally:
            metrics["step_time"] = time.perf_counter() - started_at
            self._metrics.write(metrics)
        if self.config.checkpoint_every is not None and version % self.config.checkpoint_every == 0:
            await asyncio.to_thread(self._save)
        return metrics

    def build_rows(self, groups: Sequence[EpisodeGroup]) -> list[TrainingRow]:
        """Returns the rows that a step trains."""
        return training_rows(
            [group.trajectories for group in groups],
            normaliser=self.config.normaliser,
            credit=self.config.credit,
            group_std=self.config.group_std,
        )

    def _load(self, folder: Path) -> Any:
        auto: Any = transformers.AutoModelForCausalLM
        logs: Any = transformers.utils.logging
        logs.disable_progress_bar()
        return auto.from_pretrained(str(folder), dtype=torch.float32).to(self.device)

    def _save_last(self) -> None:
        """Saves the last complete step at the end of a run, and says so if others are missing."""
        if not self.step or self.config.checkpoint_every is None:
            return
        if not self._updater.is_whole:
            last = find_checkpoint(self.run_folder)
            log.error(
                "the optimizer failed in step %d and left some weights changed and others not, so the "
                "weights of step %d are lost; the last checkpoint is %s",
                self.step + 1,
                self.step,
                last or "none",
            )
            return
        try:
            self._save()
        except Exception as error:
            log.error("step %d could not be saved: %s: %s", self.step, type(error).__name__, error)
            raise
        if self.step < self.config.steps:
            log.warning(
                "the run ended after step %d of %d, which is saved in %s; resume the run to continue",
                self.step,
                self.config.steps,
                find_checkpoint(self.run_folder),
            )

    def _save(self) -> None:
        save_checkpoint(
            self.run_folder,
            self.model,
            self._updater.optimizer,
            self._state,
            tokenizer_folder=self._model_folder,
            keep=self.config.keep_checkpoints,
        )

    def _settings(self) -> dict[str, Any]:
        """Returns what the run is: what a resumed one must have again."""
        config = json.loads(json.dumps(asdict(self.config), default=sorted))
        update = {name: value for name, value in config.pop("update").items() if name not in MAY_CHANGE}
        return {
            "model": model_name(self._model_folder),
            "agent": describe_runner(self._agent),
            "reward": describe_reward(self._reward),
            "tasks": _describe_tasks(self._tasks),
            **({"eval_tasks": _describe_tasks(self._eval_tasks)} if self._eval_tasks else {}),
            **{name: value for name, value in config.items() if name not in MAY_CHANGE},
            **{f"update.{name}": value for name, value in update.items()},
        }

    def _create_run_folder(self) -> Path:
        settings = json.dumps(asdict(self.config), indent=1, default=sorted)
        (self.run_folder / "config.json").write_text(settings + "\n")
        return self.run_folder


def _describe_tasks(tasks: Sequence[Any] | Callable[[Random], Any]) -> str:
    """Returns the name of a function that draws tasks, else the number of tasks and, of JSON values, their
    digest."""
    if callable(tasks):
        return name_function(tasks)
    try:
        data = msgspec.json.encode(list(tasks), order="deterministic")
    except (TypeError, ValueError):
        return f"{len(tasks)} tasks"
    return f"{len(tasks)} tasks, {hashlib.blake2b(data, digest_size=8).hexdigest()}"


_DESCRIBED = (
    ("reward", "reward", ".3f"),
    ("loss", "loss", "+.4f"),
    ("entropy", "entropy", ".3f"),
    ("kl to sampler", "kl/sampler", ".1e"),
)
"""What the line of a step shows: label, metric and format."""


def describe_step(metrics: dict[str, float], steps: int | None = None) -> str:
    """Returns one line about a step, of `steps` if they are known, with "-" for what is not known. That of
    the first has the difference of engine and trainer."""
    parts = [f"step {metrics['step']:3.0f}" + (f"/{steps}" if steps is not None else "")]
    for label, key, style in _DESCRIBED:
        parts.append(f"{label} {format(metrics[key], style) if key in metrics else '-'}")
    line = "  ".join([*parts, f"{metrics['step_time']:.1f} s"])
    name = "sampling/sampling_logp_difference"
    if metrics["step"] == 1 and f"{name}/mean" in metrics:
        mean, largest = metrics[f"{name}/mean"], metrics[f"{name}/max"]
        line += f"\nlogprobs of engine and trainer differ by {mean:.1e} (mean) and {largest:.1e} (max)"
    return line


def _episode_metrics(groups: Sequence[EpisodeGroup], group_std: GroupStd) -> dict[str, float]:
    statistics = [group_statistics(group.trajectories, group_std=group_std) for group in groups]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    delivered = [trajectory for trajectory in trajectories if not trajectory.failed]
    lengths = [length for group in groups for length in group.answer_lengths]
    causes: Counter[str] = sum((group.causes for group in groups), Counter())
    overridden: Counter[str] = sum((group.overridden for group in groups), Counter())
    return {
        **_reward_metrics(statistics, [trajectory.episode_reward for trajectory in delivered]),
        **(
            {
                "replies/mean_length": sum(lengths) / len(lengths),
                "replies/truncated_ratio": sum(group.truncated_answers for group in groups) / len(lengths),
            }
            if lengths
            else {}
        ),
        "episodes": float(len(trajectories)),
        "failed_episodes": float(len(trajectories) - len(delivered)),
        "calls": float(sum(group.calls for group in groups)),
        "samples": float(sum(len(trajectory.samples) for trajectory in trajectories)),
        "sampled_tokens": float(_count_tokens(trajectories, "sampled_tokens")),
        "delivered_tokens": float(_count_tokens(delivered, "trained_tokens")),
        **{f"forks/{cause}": float(count) for cause, count in sorted(causes.items())},
        **{f"overridden/{name}": float(count) for name, count in sorted(overridden.items())},
    }


def _reward_metrics(
    statistics: Sequence[GroupStatistics], episode_rewards: Sequence[float | None]
) -> dict[str, float]:
    """As in TRL: mean and standard deviation over all episodes that did not fail, and the share of these in
    groups of equal rewards; absent where there are too few."""
    rewards = np.array([reward for reward in episode_rewards if reward is not None], np.float64)
    equal = sum(entry.episodes for entry in statistics if entry.episodes > 1 and entry.has_equal_rewards)
    metrics: dict[str, float] = {}
    if len(rewards):
        metrics |= {"reward": float(rewards.mean()), "frac_reward_zero_std": equal / len(rewards)}
    if len(rewards) > 1:
        metrics["reward_std"] = float(rewards.std(ddof=1))
    return metrics


def _count_tokens(trajectories: Sequence[Trajectory], name: str) -> int:
    return sum(
        getattr(trajectory.report, name) for trajectory in trajectories if trajectory.report is not None
    )


def _advantage_metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Divides the delivered tokens into those that change the weights and those that cannot: episodes that
    are as good as the mean of their group have no advantage."""
    shares = [row.sample.shares.astype(np.float64) for row in rows]
    trained = sum(float(share[row.advantages != 0].sum()) for share, row in zip(shares, rows, strict=True))
    total = sum(float(share.sum()) for share in shares)
    return {"trained_tokens": round(trained, 1), "tokens_without_advantage": round(total - trained, 1)}


def _oldest_version(rows: Sequence[TrainingRow], default: int) -> int:
    trained = [row.sample.response_versions[row.weights != 0] for row in rows if row.weights.any()]
    return min((int(versions.min()) for versions in trained), default=default)
