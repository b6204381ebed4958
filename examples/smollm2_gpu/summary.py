"""The settings and the outcome of a run: a table of rewards, scores and an account of all sampled tokens."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from branchline.core.errors import InputError
from branchline.train.demo.curves import Curve, plot_curves
from branchline.train.metrics import METRICS_FILE, read_metrics

_GAP = "sampling/sampling_logp_difference"
_COUNTS = ("episodes", "failed_episodes", "sampled_tokens", "delivered_tokens", "trained_tokens",
           "tokens_without_advantage")  # fmt: skip


@dataclass(frozen=True)
class ShopSettings:
    """What a run is defined by."""

    steps: int = 120
    groups: int = 8
    group_size: int = 8
    learning_rate: float = 1e-5
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
    """Sampled tokens of groups whose episodes all have the same reward: they cannot change the weights."""
    dropped_tokens: int
    first_gap_mean: float | None
    first_gap_max: float | None
    gap_max: float | None
    """Differences between the log-probabilities of engine and trainer, before the update of a step. The first
    is that of the first step in which a group has an advantage."""
    warm_start_seconds: float
    training_seconds: float
    seconds: float
    """Everything, from the start of the script."""

    @property
    def unaccounted_tokens(self) -> int:
        """Sampled tokens that are in none of the counts; 0 unless there is a fault."""
        accounted = self.trained_tokens + self.tokens_without_advantage + self.dropped_tokens
        return self.sampled_tokens - accounted


def summarise(
    settings: ShopSettings, metrics: Sequence[dict[str, float]], device: str, **measured: Any
) -> RunSummary:
    """Returns the outcome from the metrics of the steps done; `measured` has all that they do not."""
    counts = {name: round(sum(line[name] for line in metrics)) for name in _COUNTS}
    rewards = [line["reward"] for line in metrics]
    size = max(1, len(rewards) // 10)
    gaps = [line[f"{_GAP}/max"] for line in metrics if f"{_GAP}/max" in line]
    first = next((line for line in metrics if f"{_GAP}/mean" in line), {})
    return RunSummary(
        device=_describe_device(device),
        software=f"PyTorch {torch.__version__}, transformers {transformers.__version__}, float32",
        date=datetime.now(UTC).date().isoformat(),
        settings=settings,
        steps=len(metrics),
        first_reward=sum(rewards[:size]) / size,
        last_reward=sum(rewards[-size:]) / size,
        dropped_tokens=counts["sampled_tokens"] - counts.pop("delivered_tokens"),
        first_gap_mean=first.get(f"{_GAP}/mean"),
        first_gap_max=first.get(f"{_GAP}/max"),
        gap_max=max(gaps, default=None),
        **counts,
        **measured,
    )


def _describe_device(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def write_summary(out: Path, summary: RunSummary) -> None:
    """Writes `summary.json` and `table.md`."""
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    (out / "table.md").write_text(describe_summary(summary) + "\n")


def describe_summary(summary: RunSummary) -> str:
    """Returns the outcome as a Markdown table."""

    def percent(score: float | None) -> str:
        return "not measured" if score is None else f"{score:.1%}"

    def number(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.1e}"

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
        "logprobs of engine and trainer differ by": f"{number(summary.first_gap_mean)} (mean) and "
        f"{number(summary.first_gap_max)} (max) in the first step, {number(summary.gap_max)} (max) in all",
        "seconds": f"{summary.seconds:.0f} in all, {summary.warm_start_seconds:.0f} for the warm start, "
        f"{summary.training_seconds:.0f} for the steps",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def plot(folder: Path) -> Path:
    """Draws the curve of a run from its metrics."""
    metrics = read_metrics(folder / METRICS_FILE)
    if not metrics:
        raise InputError(f"--plot: got {folder}, expected a folder with {METRICS_FILE}")
    curve = Curve("mean reward of a step", [line["reward"] for line in metrics])
    path = folder / "curve.png"
    plot_curves(path, "SmolLM2-135M learns to use two tools", [curve], window=10)
    return path
