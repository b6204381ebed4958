"""What tree-packed training saves on a GPU: forward and backward passes beside those of single paths.

    python -m benchmarks.tree_packing --models 0.6b 1.7b --out tree_packing.md

Both sides train the same rows with the same loss, kernel (FlexAttention), checkpointing and token limit per
batch. The reference packs the merged samples of every path one after the other with a document mask; the
tree-packed side stores shared prefixes once. The bound is the ratio of the FLOPs of both sides: linear layers
count tokens, attention counts pairs of tokens, the output layer counts trained tokens. A workload without
shared prefixes is the control. Needs a GPU, PyTorch and transformers; weights are random.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from branchline.core.sample import Sample
from branchline.core.token_arrays import as_ids
from branchline.export.packing import PackedBatch, TrainingRow, pack_rows
from branchline.train.losses import LossConfig
from branchline.train.packed_forward import forward_packed
from branchline.train.policy_loss import policy_loss

VOCABULARY = 151_936
MODELS: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_heads": 32},
}
"""The shapes of Qwen3; all have 8 key and value heads of size 128."""
HEAD_SIZE = 128
KV_HEADS = 8
LINEAR_PASSES = 4.0
"""Forward, forward again in the backward pass, and twice that for the gradients."""
ATTENTION_PASSES = 4.5
"""The same; the backward pass of attention computes five products in place of two."""
_MAX_REPEATS = 3


# -- workloads -------------------------------------------------------------------------------------------


class RowBuilder:
    """Builds rows of random ids. `span` returns new ids; a row trains the spans that it is told to."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def span(self, length: int) -> NDArray[np.int32]:
        return self._rng.integers(0, VOCABULARY, length).astype(np.int32)

    def row(self, prompt: NDArray[np.int32], response: NDArray[np.int32], share: float = 1.0) -> TrainingRow:
        count = len(response)
        weights = np.full(count, share, np.float32)
        sample = Sample(
            prompt_ids=as_ids(prompt),
            response_ids=as_ids(response),
            response_mask=np.ones(count, np.int8),
            response_logprobs=np.full(count, -1.0, np.float32),
            response_versions=np.zeros(count, np.int32),
            shares=weights,
        )
        return TrainingRow(sample, weights, np.full(count, self._rng.choice([-1.0, 1.0]), np.float32))


def stripped_turns(turns: int, trees: int) -> list[TrainingRow]:
    """Conversations whose template removes the reasoning of earlier turns: each turn is a leaf of its own."""
    builder, rows = RowBuilder(), []
    for _ in range(trees):
        context = builder.span(3000)
        for _ in range(turns):
            rows.append(builder.row(context, builder.span(400)))
            context = np.concatenate([context, builder.span(700)])
    return rows


def best_of_8(trees: int) -> list[TrainingRow]:
    builder, rows = RowBuilder(), []
    for _ in range(trees):
        prompt = builder.span(8192)
        rows += [builder.row(prompt, builder.span(512)) for _ in range(8)]
    return rows


def tree_search(trees: int) -> list[TrainingRow]:
    """Three continuations after each of four steps; every step is trained in all leaves below it."""
    builder, rows = RowBuilder(), []
    for _ in range(trees):
        prompt = builder.span(1280)
        paths = [np.zeros(0, np.int32)]
        for _ in range(4):
            paths = [np.concatenate([path, builder.span(512)]) for path in paths for _ in range(3)]
        rows += [builder.row(prompt, path, 1 / len(paths)) for path in paths]
    return rows


def tree_search_calls(trees: int) -> list[TrainingRow]:
    """The same search with one row for each call instead of one for each path."""
    builder, rows = RowBuilder(), []
    for _ in range(trees):
        contexts = [builder.span(1280)]
        for _ in range(4):
            outputs = [(context, builder.span(512)) for context in contexts for _ in range(3)]
            rows += [builder.row(context, output) for context, output in outputs]
            contexts = [np.concatenate(pair) for pair in outputs]
    return rows


def no_sharing(count: int) -> list[TrainingRow]:
    builder = RowBuilder()
    return [builder.row(builder.span(3584), builder.span(512)) for _ in range(count)]


WORKLOADS: dict[str, Callable[[], list[TrainingRow]]] = {
    "8 stripped turns, 4 trees": lambda: stripped_turns(8, 4),
    "24 stripped turns, 2 trees": lambda: stripped_turns(24, 2),
    "best of 8, 8k prompt, 4 trees": lambda: best_of_8(4),
    "tree search 3^4": lambda: tree_search(1),
    "tree search 3^4, per-call rows": lambda: tree_search_calls(1),
    "no sharing (control)": lambda: no_sharing(16),
}


# -- measurement -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: float
    loss: float
    peak_gib: float
    tokens: int


def flops(batches: Sequence[PackedBatch], shape: dict[str, int]) -> float:
    """Returns the FLOPs of a forward and a backward pass with checkpointing."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_heads"]
    attention_size, kv_size = heads * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    weights = hidden * (2 * attention_size + 2 * kv_size + 3 * inner)
    total = 0.0
    for batch in batches:
        pairs = float((batch.positions.astype(np.int64) + 1).sum())
        total += shape["num_hidden_layers"] * LINEAR_PASSES * 2 * weights * len(batch)
        total += shape["num_hidden_layers"] * ATTENTION_PASSES * 4 * attention_size * pairs
        total += LINEAR_PASSES * 2 * hidden * VOCABULARY * float((batch.weights != 0).sum())
    return total


def create_model(shape: dict[str, int]) -> Any:
    transformers: Any = importlib.import_module("transformers")
    sizes = {name: value for name, value in shape.items() if name != "num_heads"}
    config = transformers.Qwen3Config(
        **sizes,
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM._from_config(
            config, attn_implementation="flex_attention", dtype=torch.bfloat16
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measure(model: Any, batches: Sequence[PackedBatch], deadline: float) -> Measured:
    """Returns the fastest of up to three steps, after one that compiles."""
    config = LossConfig()
    seconds, loss = [], 0.0
    torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + _MAX_REPEATS):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start, loss = time.perf_counter(), 0.0
        for batch in batches:
            outputs = forward_packed(model, batch)
            batch_loss: Any = policy_loss(outputs, batch, config, normalizer=1000.0).loss
            batch_loss.backward()
            loss += batch_loss.item()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) > 1 and time.monotonic() > deadline:
            break
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Measured(min(seconds[1:]), loss, peak, sum(map(len, batches)))


HEADER = (
    "| model | workload | path tokens | tree tokens | FLOP bound | per path | tree-packed | speed-up "
    "| of the bound | peak memory, path / tree | loss, path / tree |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def compare(name: str, workload: str, model: Any, max_tokens: int, deadline: float) -> str:
    """Returns a line of the table."""
    rows = WORKLOADS[workload]()
    tree = pack_rows(rows, max_tokens)
    paths = pack_rows(rows, max_tokens, share_prefixes=False)
    bound = flops(paths, MODELS[name]) / flops(tree, MODELS[name])
    packed, single = measure(model, tree, deadline), measure(model, paths, deadline)
    speed_up = single.seconds / packed.seconds
    return (
        f"| {name} | {workload} | {single.tokens:,} | {packed.tokens:,} | {bound:.2f} "
        f"| {single.seconds * 1000:,.0f} ms | {packed.seconds * 1000:,.0f} ms | **{speed_up:.2f} ×** "
        f"| {speed_up / bound:.0%} | {single.peak_gib:.1f} / {packed.peak_gib:.1f} GiB "
        f"| {single.loss:.5f} / {packed.loss:.5f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.6b"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--max-tokens", type=int, default=65_536, help="tokens per batch, on both sides")
    parser.add_argument("--limit-s", type=float, default=540, help="start no further line after this time")
    parser.add_argument("--out", type=Path, default=None, help="write the table to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.tree_packing: needs a CUDA GPU, and PyTorch sees none")
    start = time.monotonic()
    torch._dynamo.config.recompile_limit = 64
    lines = [f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {date.today()}", "", HEADER]
    for name in arguments.models:
        model = create_model(MODELS[name])
        for workload in arguments.workloads:
            if time.monotonic() - start > arguments.limit_s:
                print(f"skipped {name}, {workload}: over the time limit", flush=True)
                continue
            line = compare(name, workload, model, arguments.max_tokens, start + arguments.limit_s)
            lines.append(line)
            print(f"{time.monotonic() - start:6.0f} s  {line}", flush=True)
            if arguments.out is not None:
                arguments.out.write_text("\n".join(lines) + "\n")
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
