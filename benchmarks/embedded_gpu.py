"""The embedded engine on a GPU, beside plain batched `generate` of transformers in the same run.

    python -m benchmarks.embedded_gpu --out embedded_gpu.md

A Qwen3 of 0.6 billion random weights in bf16 samples at temperature 1. The reference gets all prompts of a
round in one batch, with cuDNN's attention off, as the engine has it: cuDNN plans a kernel for every length.
The engine gets them as concurrent requests with default limits and buffers tokens as a call that is not
streamed does. In the last workload all prompts of a round share a prefix, which the engine computes once. The
ratio is the engine's tokens per second over those of `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import BUFFERED_FLUSH_S, SamplingParams
from branchline.engines.hf import HfEngine

VOCABULARY = 151_936
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
HEADER = (
    "| concurrent | prompt | shared prefix | output | generate | engine | ratio |\n"
    "|---|---|---|---|---|---|---|"
)


def create_model() -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.Qwen3ForCausalLM._from_config(
            transformers.Qwen3Config(**SHAPE), attn_implementation="sdpa", dtype=torch.bfloat16
        ).eval()


def create_prompts(count: int, length: int, shared: int, seed: int) -> list[Ids]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCABULARY, shared)
    return [
        as_ids(np.concatenate([prefix, rng.integers(0, VOCABULARY, length - shared)])) for _ in range(count)
    ]


def generate_s(model: Any, prompts: Sequence[Ids], tokens: int) -> float:
    """Returns the seconds that `generate` takes for a batch of prompts of one length."""
    batch = torch.from_numpy(np.stack(prompts).astype(np.int64)).cuda()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    assert output.shape[1] == batch.shape[1] + tokens
    return time.perf_counter() - start


async def engine_s(engine: HfEngine, prompts: Sequence[Ids], tokens: int) -> float:
    """Returns the seconds that the engine takes for concurrent requests."""
    params = SamplingParams(max_tokens=tokens, flush_s=BUFFERED_FLUSH_S)

    async def run(prompt: Ids) -> int:
        return sum([len(chunk.ids) async for chunk in engine.generate(prompt, params)])

    start = time.perf_counter()
    counts = await asyncio.gather(*map(run, prompts))
    assert counts == [tokens] * len(prompts)
    return time.perf_counter() - start


async def measure(model: Any, out: Path | None) -> None:
    lines = [f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {date.today()}", "", HEADER]
    torch.backends.cuda.enable_cudnn_sdp(False)
    workloads = [(64, 256, 0, 256), (256, 256, 0, 256), (64, 2304, 2048, 256)]
    reference = {}
    for workload in workloads:
        count, length, shared, tokens = workload
        seconds = [
            generate_s(model, create_prompts(count, length, shared, seed), tokens) for seed in range(2)
        ]
        reference[workload] = min(seconds)
        print(f"generate {workload}: {seconds}", flush=True)
    torch.cuda.empty_cache()
    engine = HfEngine(model)
    print(engine._scheduler.limits, flush=True)
    for workload in workloads:
        count, length, shared, tokens = workload
        seconds = [
            await engine_s(engine, create_prompts(count, length, shared, 10 + seed), tokens)
            for seed in range(2)
        ]
        ours, theirs = count * tokens / min(seconds), count * tokens / reference[workload]
        line = (
            f"| {count} | {length} | {shared} | {tokens} | {theirs:,.0f} tokens/s | {ours:,.0f} tokens/s "
            f"| **{ours / theirs:.2f}** |"
        )
        lines.append(line)
        print(seconds, line, flush=True)
        if out is not None:
            out.write_text("\n".join(lines) + "\n")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the table to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.embedded_gpu: needs a CUDA GPU, and PyTorch sees none")
    asyncio.run(measure(create_model(), arguments.out))


if __name__ == "__main__":
    main()
