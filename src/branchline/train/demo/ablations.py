"""What inexact training data costs: the demo's task, trained on four versions of the same kind of sessions.

`exact`        the samples of the tree: every sampled token once, in its context
`re-encoded`   each conversation decoded and encoded again before training, as gateways that keep text do
`last branch`  only the sample that ends last; sub-agents and contexts before a deletion are dropped
`no shares`    every branch trained in full, so tokens on several branches count several times

All start from the same weights and get the same tasks. Sampling is exact in all of them: only what is trained
differs. The report has the reward curves and the measured drift, whatever they show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from branchline.chat.base import Codec
from branchline.core.errors import BranchlineError, InputError
from branchline.core.sample import Sample
from branchline.core.token_arrays import Ids
from branchline.export.packing import TrainingRow, pack_rows
from branchline.export.samples import ExportPolicy
from branchline.train.demo import MODEL_FOLDER
from branchline.train.demo.archive import CHANCE, ArchiveTask
from branchline.train.demo.curves import Curve, check_matplotlib, plot_curves
from branchline.train.demo.demo import (
    DemoSettings,
    archive_agent,
    create_client,
    demo_config,
)
from branchline.train.episodes import EpisodeGroup
from branchline.train.metrics import read_metrics
from branchline.train.packed_forward import forward_packed
from branchline.train.trainer import Trainer, describe_step

VARIANTS: dict[str, ExportPolicy | None] = {
    "exact": None,
    "re-encoded": None,
    "last branch": ExportPolicy(max_samples=1),
    "no shares": ExportPolicy(shares="all"),
}
_STEPS = 40


@dataclass
class Drift:
    """How the trained tokens of a run differ from the sampled ones."""

    sampled: int = 0
    delivered: int = 0
    """Sampled tokens of which at least one row trains something."""
    shares: float = 0.0
    """The sum of the shares of all tokens."""
    trained: int = 0
    """Trained tokens of all rows, those on several rows counted in each."""
    never_sampled: int = 0
    """Trained tokens that the model did not sample."""
    logprob_gap: float = 0.0
    """The mean difference, per answer token, of the trainer's logprob of a row and the engine's."""
    rows: int = 0

    @property
    def summary(self) -> dict[str, float]:
        return {
            "delivered": self.delivered / max(1, self.sampled),
            "never_sampled": self.never_sampled / max(1, self.trained),
            "share": self.shares / max(1, self.delivered),
            "logprob_gap": self.logprob_gap / max(1, self.rows),
        }


class AblationTrainer(Trainer[ArchiveTask]):
    """A trainer of one variant that measures its drift."""

    def __init__(self, variant: str, settings: DemoSettings, run_folder: Path, client: AsyncOpenAI) -> None:
        config = replace(
            demo_config(settings), export_policy=VARIANTS[variant], checkpoint_every=settings.steps
        )
        agent = archive_agent(client)
        super().__init__(MODEL_FOLDER, agent, ArchiveTask.draw, config, run_folder=run_folder)
        self._is_encoded_again = variant == "re-encoded"
        self.drift = Drift()

    def build_rows(self, groups: Sequence[EpisodeGroup]) -> list[TrainingRow]:
        sampled = rows = super().build_rows(groups)
        if self._is_encoded_again:
            pairs = [encode_again(self.codec, row) for row in sampled]
            rows = [row for row, _ in pairs]
            self.drift.never_sampled += sum(count for _, count in pairs)
        for group in groups:
            reports = [
                trajectory.report for trajectory in group.trajectories if trajectory.report is not None
            ]
            self.drift.sampled += sum(report.sampled_tokens for report in reports)
            self.drift.delivered += sum(report.trained_tokens for report in reports)
        self.drift.shares += sum(float(row.sample.shares.sum(dtype=np.float64)) for row in sampled)
        self.drift.trained += sum(int((row.weights != 0).sum()) for row in rows)
        self.drift.logprob_gap += sum(logprob_gaps(self.model, sampled, rows))
        self.drift.rows += len(rows)
        return rows


def encode_again(codec: Codec, row: TrainingRow) -> tuple[TrainingRow, int]:
    """Returns a row whose text is decoded and encoded again, and how many of its trained tokens were never
    sampled. The engine's logprobs do not fit other tokens, so the row has none."""
    sample = row.sample
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    padding = np.zeros(len(sample.prompt_ids), np.float32)
    weights, advantages = (np.concatenate([padding, values]) for values in (row.weights, row.advantages))
    changes = np.flatnonzero(np.diff(weights != 0)) + 1
    parts: list[tuple[Ids, float, float]] = []
    never_sampled = 0
    for start, end in pairwise([0, *changes.tolist(), len(ids)]):
        encoded = codec.encode(codec.decode(ids[start:end]))
        parts.append((encoded, float(weights[start:end].mean()), float(advantages[start])))
        if weights[start]:
            never_sampled += len(_byte_spans(codec, encoded) - _byte_spans(codec, ids[start:end]))
    new_weights, new_advantages = (
        np.concatenate([np.full(len(part[0]), part[place], np.float32) for part in parts]) for place in (1, 2)
    )
    new_ids = np.concatenate([part[0] for part in parts])
    prompt = int(np.flatnonzero(new_weights)[0])
    response = slice(prompt, None)
    is_trained = new_weights[response] != 0
    version = int(sample.response_versions.max())
    new_sample = Sample(
        prompt_ids=new_ids[:prompt],
        response_ids=new_ids[response],
        response_mask=is_trained.astype(np.int8),
        response_logprobs=np.where(is_trained, np.nan, 0).astype(np.float32),
        response_versions=np.where(is_trained, version, -1).astype(np.int32),
        shares=is_trained.astype(np.float32),
        exact=False,
    )
    return TrainingRow(new_sample, new_weights[response], new_advantages[response]), never_sampled


def _byte_spans(codec: Codec, ids: Ids) -> set[tuple[int, int]]:
    """Returns the first and last byte of each token in the text of all."""
    edges = np.cumsum([0, *(len(codec.token_bytes(token)) for token in ids.tolist())]).tolist()
    return set(pairwise(edges))


def logprob_gaps(model: Any, sampled: Sequence[TrainingRow], trained: Sequence[TrainingRow]) -> list[float]:
    """Returns for each row the difference, per token, between the trainer's logprob of what it trains and
    the engine's of what it sampled."""
    gaps: list[float] = []
    for batch in pack_rows(trained, 384, share_prefixes=False):
        with torch.no_grad():
            outputs = forward_packed(model, batch)
        found = np.zeros(len(batch))
        found[outputs.places.numpy()] = outputs.logprobs.numpy()
        for index, path in zip(batch.rows, batch.paths, strict=True):
            row = sampled[index]
            is_trained = row.weights != 0
            engine = float(row.sample.response_logprobs[is_trained].sum(dtype=np.float64))
            gaps.append(abs(float(found[path].sum()) - engine) / int(is_trained.sum()))
    return gaps


async def run_variant(variant: str, settings: DemoSettings, folder: Path) -> dict[str, Any]:
    """Trains one variant; returns its rewards and its drift."""
    run_folder = folder / f"{variant.replace(' ', '-')}-seed{settings.seed}"
    async with create_client() as client:
        trainer = AblationTrainer(variant, settings, run_folder, client)
        async with aclosing(trainer.steps()) as steps:
            async for result in steps:
                print(f"{variant}, seed {settings.seed}: {describe_step(result.metrics)}", flush=True)
    rewards = [line["reward"] for line in read_metrics(run_folder / "metrics.jsonl")]
    outcome = {"variant": variant, **asdict(settings), "rewards": rewards, **trainer.drift.summary}
    (run_folder / "outcome.json").write_text(json.dumps(outcome) + "\n")
    return outcome


def plot_outcomes(path: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """Draws the mean curve of each variant, with the range of its seeds."""
    curves: list[Curve] = []
    for variant in VARIANTS:
        runs = [outcome for outcome in outcomes if outcome["variant"] == variant]
        if not runs:
            continue
        rewards = np.array([outcome["rewards"] for outcome in runs])
        gap, foreign = (np.mean([run[name] for run in runs]) for name in ("logprob_gap", "never_sampled"))
        label = f"{variant}: {foreign:.1%} never sampled, logprob gap {gap:.0e}"
        low, high = (rewards.min(0), rewards.max(0)) if len(runs) > 1 else ((), ())
        curves.append(Curve(label, rewards.mean(0).tolist(), low=list(low), high=list(high)))
    plot_curves(path, "The archive task, trained on four versions of its sessions", curves, chance=CHANCE)


def describe_outcomes(outcomes: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of the variants."""
    lines = [
        "| variant | reward, last tenth | delivered | share of a token | never sampled | logprob gap |",
        "|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        runs = [outcome for outcome in outcomes if outcome["variant"] == variant]
        if runs:
            size = max(1, len(runs[0]["rewards"]) // 10)
            last = [sum(run["rewards"][-size:]) / size for run in runs]
            values = {name: np.mean([run[name] for run in runs]) for name in Drift().summary}
            lines.append(
                f"| {variant} | {' '.join(f'{value:.2f}' for value in last)} | {values['delivered']:.0%} | "
                f"{values['share']:.2f} | {values['never_sampled']:.1%} | {values['logprob_gap']:.1e} |"
            )
    return "\n".join(lines)


def draw_outcomes(folder: Path) -> str:
    """Draws the figure of all runs in a folder, also those of earlier calls; returns their table."""
    outcomes = [json.loads(file.read_text()) for file in sorted(folder.glob("*/outcome.json"))]
    if not outcomes:
        raise InputError(f"--folder: got {folder}, expected runs with outcome.json")
    lengths = sorted({len(outcome["rewards"]) for outcome in outcomes})
    if len(lengths) > 1:
        raise InputError(f"steps: got {' and '.join(map(str, lengths))}, expected runs of one length")
    plot_outcomes(folder / "ablations.png", outcomes)
    table = describe_outcomes(outcomes)
    (folder / "ablations.md").write_text(table + "\n")
    return table


_EPILOG = """\
Variants can run apart, on several cores or machines, and be drawn together:
  python -m branchline.train.demo.ablations --variants exact --seeds 0 --no-figure
  python -m branchline.train.demo.ablations --variants re-encoded --seeds 0 --no-figure
  python -m branchline.train.demo.ablations --figure-only
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds of each variant (default: 0)"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/ablations"), help="folder of the runs")
    figure = parser.add_mutually_exclusive_group()
    figure.add_argument("--no-figure", action="store_true", help="train only: needs no matplotlib")
    figure.add_argument("--figure-only", action="store_true", help="draw the runs in the folder, train none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if not options.no_figure:
            check_matplotlib()
        for variant in options.variants if not options.figure_only else ():
            for seed in options.seeds:
                asyncio.run(run_variant(variant, DemoSettings(seed, options.steps), options.folder))
        if not options.no_figure:
            print(f"{draw_outcomes(options.folder)}\n\n{options.folder / 'ablations.png'}")
    except BranchlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
