"""From trees to batches: `python -m benchmarks.export [--tokens N]`.

Each workload is measured at two sizes, so that a cost which is not linear in the tokens shows. Tokens are
those of the samples: a token on k paths counts k times, as for a trainer that shares nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.measure import BenchmarkTable, best_cpu_s
from branchline import (
    Generation,
    Message,
    Request,
    Session,
    ToyCodec,
    Trajectory,
    TrajectoryGroup,
    Tree,
    pack_rows,
    pad_rows,
    training_rows,
    write_jsonl,
    write_parquet,
)
from branchline.export.packing import TrainingRow

MAX_TOKENS = 65_536
GROUP_SIZE = 8
LINEAR_LIMIT = 1.5
"""The most that a token may cost in the large workload, compared with the small one."""


@dataclass
class Episode:
    """A session with answers of 400 and observations of 600 tokens, about the sizes of tool-using agents."""

    session: Session
    number: int = 0

    @classmethod
    def open(cls, *, strip_thinking: bool = False) -> Episode:
        return cls(Session("s", ToyCodec.chatml(strip_thinking=strip_thinking)))

    def ask(self, messages: list[Message], tokens: int = 400) -> list[Message]:
        """Samples an answer; returns the messages of the next call."""
        turn = self.session.prepare(Request(tuple(messages)))
        self.number += 1
        thinking, content = f"thinking {self.number} ".ljust(tokens // 2, "t"), f"answer {self.number} "
        answer = Message("assistant", content.ljust(tokens // 2, "a"), reasoning_content=thinking)
        ids = self.session.codec.encode_reply(answer)
        logprobs = np.linspace(-2, 0, len(ids), dtype=np.float32)
        call = self.session.commit(turn, Generation(ids, logprobs, message=answer)).call
        self.session.record_delivery(call)
        return [*messages, answer, Message("user", f"observation {self.number} ".ljust(600, "o"))]


def question(number: int, tokens: int = 3000) -> list[Message]:
    """The first messages of an episode; episodes with other numbers share no prompt."""
    return [Message("system", f"episode {number} ".ljust(tokens, "s")), Message("user", "What now?")]


def growing_turns(number: int, turns: int = 24) -> Tree:
    episode, messages = Episode.open(), question(number)
    for _ in range(turns):
        messages = episode.ask(messages)
    return episode.session.tree


def stripped_turns(number: int, turns: int = 24) -> Tree:
    episode, messages = Episode.open(strip_thinking=True), question(number)
    for _ in range(turns):
        messages = episode.ask(messages)
    return episode.session.tree


def best_of(number: int, count: int = 8) -> Tree:
    episode, messages = Episode.open(), question(number, 8000)
    for _ in range(count):
        episode.ask(messages, 512)
    return episode.session.tree


def search_tree(number: int, width: int = 3, depth: int = 4) -> Tree:
    episode, level = Episode.open(), [question(number)]
    for _ in range(depth):
        level = [episode.ask(messages) for messages in level for _ in range(width)]
    return episode.session.tree


WORKLOADS: dict[str, Callable[[int], Tree]] = {
    "24 growing turns": growing_turns,
    "24 stripped turns": stripped_turns,
    "best of 8": best_of,
    "tree search 3⁴": search_tree,
}


def export_rows(trees: Sequence[Tree]) -> list[TrainingRow]:
    """From trees to training rows: causes, samples, credit."""
    trajectories = [
        Trajectory.from_tree(tree, session=str(index), reward=float(index % 2))
        for index, tree in enumerate(trees)
    ]
    groups = [
        TrajectoryGroup(trajectories[start : start + GROUP_SIZE])
        for start in range(0, len(trajectories), GROUP_SIZE)
    ]
    return training_rows(groups)


def to_tensors(batches: Sequence[Any]) -> object:
    """The arrays of batches as tensors, if torch is installed."""
    arrays = [value for batch in batches for value in vars(batch).values() if isinstance(value, np.ndarray)]
    if not find_spec("torch"):
        return arrays
    import torch

    return [torch.from_numpy(array) for array in arrays]


def table(tokens: int) -> BenchmarkTable:
    report = BenchmarkTable(
        f"Export: from trees to batches of at most {MAX_TOKENS:,} tokens",
        [
            "workload", "trees", "samples", "tokens", "samples/s", "rows", "padded", "packed", "tree",
            "JSONL", "Parquet", "tree tokens", "target",
        ],
        [
            "Million tokens of samples a second on one core. rows: trees to training rows (causes, samples,",
            "credit). padded, packed, tree: trees to tensors that way. JSONL, Parquet: samples to a file.",
            "tree tokens: those of tree-packed batches. Target: a token of the large workload costs at most",
            f"{LINEAR_LIMIT} times what one of the small workload costs, from trees to tree-packed tensors.",
        ],
    )  # fmt: skip
    for name, build in WORKLOADS.items():
        per_tree = sum(map(len, export_rows([build(0)])))
        small_cost = 0.0
        for size in (tokens // 4, tokens):
            trees = [build(number) for number in range(max(1, round(size / per_tree)))]
            cost = _measure(report, name, trees, small_cost)
            small_cost = small_cost or cost
    return report


def _measure(report: BenchmarkTable, name: str, trees: Sequence[Tree], small_cost: float) -> float:
    """Adds a row and returns the seconds per token from trees to tree-packed tensors."""
    rows = export_rows(trees)
    count = sum(map(len, rows))
    packings: list[Callable[[Sequence[TrainingRow]], Sequence[Any]]] = [
        partial(pad_rows, max_tokens=MAX_TOKENS),
        partial(pack_rows, max_tokens=MAX_TOKENS, share_prefixes=False),
        partial(pack_rows, max_tokens=MAX_TOKENS),
    ]
    with TemporaryDirectory() as folder:
        samples = [row.sample for row in rows]
        to_rows, padded, packed, tree_packed, jsonl, parquet = best_cpu_s(
            lambda: export_rows(trees),
            *(partial(lambda pack: to_tensors(pack(export_rows(trees))), pack) for pack in packings),
            lambda: write_jsonl(samples, f"{folder}/samples.jsonl"),
            lambda: write_parquet(samples, f"{folder}/samples.parquet"),
            repeats=3,
        )
    tree_tokens = sum(map(len, pack_rows(rows, MAX_TOKENS)))
    cost = tree_packed / count
    target = ""
    if small_cost:
        target = report.target_cell(f"{cost / small_cost:.2f}×", cost <= LINEAR_LIMIT * small_cost)
    rates = [f"{count / spent / 1e6:.1f}" for spent in (to_rows, padded, packed, tree_packed, jsonl, parquet)]
    report.add_row(
        name, len(trees), f"{len(rows):,}", f"{count:,}", f"{len(rows) / tree_packed:,.0f}", *rates,
        f"{tree_tokens:,}", target,
    )  # fmt: skip
    return cost


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.export", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of the large workloads")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    start = time.perf_counter()
    report = table(options.tokens)
    report.print(console)
    elapsed_s = time.perf_counter() - start
    met, targets = sum(report.targets_met), len(report.targets_met)
    console.print(f"{met} of {targets} targets met, in {elapsed_s:.0f} s.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
