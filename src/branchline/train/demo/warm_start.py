"""Makes the model that the demo starts from: a tiny decoder, trained on demonstrations of mixed quality.

Each batch also has practice rows, in which only the tokens are trained that copy something from the context:
they teach the model to find keys, and nothing about which step to take. `make warm-start` writes the folder
that ships with the package; it takes about an hour on two cores and some minutes on a GPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from branchline.core.sample import Sample
from branchline.core.token_arrays import as_ids
from branchline.export.packing import TrainingRow, pack_rows
from branchline.train.demo.archive import ANIMALS, CLERK_SYSTEM, COLORS, WINDOW_TOKENS, ArchiveTask
from branchline.train.packed_forward import forward_packed

_EPISODES_PER_STEP = 32
_PRACTICE_WEIGHT = 0.5
_PRACTICE_TOKENS = 150
_WARM_UP_STEPS = 50
_HELD_OUT = 100
"""Episodes that measure the loss and are not trained."""


@dataclass(frozen=True)
class TrainingStage:
    """A part of the training, with its own decay of the learning rate."""

    steps: int
    episodes: int
    """Demonstrations to draw from."""
    practice_rows: int
    """Practice rows in each step."""
    clerk_fraction: float
    """The fraction of them that are a clerk's first answer; the others have a catalog."""


STAGES = (TrainingStage(2500, 3_000, 24, 0.0), TrainingStage(3000, 12_000, 32, 0.6))


def create_model() -> Any:
    """Returns a decoder with 0.56 million random weights."""
    config = LlamaConfig(
        vocab_size=520,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=WINDOW_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    create: Any = LlamaForCausalLM
    return create(config)


def load_demonstrations(path: Path) -> list[list[Sample]]:
    """Returns the samples of each episode of a file that `demonstrations` wrote."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    prompt_lengths, lengths = data["prompt_lengths"].tolist(), data["lengths"].tolist()
    episodes: dict[int, list[Sample]] = {}
    start = share_start = 0
    for episode, prompt, length in zip(data["episodes"].tolist(), prompt_lengths, lengths, strict=True):
        ids = data["ids"][start : start + length]
        shares = data["shares"][share_start : share_start + length - prompt]
        episodes.setdefault(episode, []).append(_sample(ids[:prompt], ids[prompt:], shares))
        start, share_start = start + length, share_start + length - prompt
    return list(episodes.values())


def practice_row(tokenizer: Tokenizer, rng: Random, clerk_fraction: float) -> Sample:
    """Returns a row that trains copying: keys from a catalog, or the key of a clerk's task."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    if rng.random() < clerk_fraction:
        key = f"{rng.choice(COLORS)}-{rng.choice(ANIMALS)}"
        prompt = encode(
            "<|im_start|>tools\nlookup(key)\n<|im_end|>\n"
            f"<|im_start|>system\n{CLERK_SYSTEM}<|im_end|>\n<|im_start|>user\nfind {key}<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "lookup", "arguments": {"key": "'
        )
        response = encode(f'{key}"}}}}\n</tool_call><|im_end|>')
        return _sample(prompt, response, [1.0] * len(response))
    task = ArchiveTask.draw(rng)
    prompt = encode(f"<|im_start|>tool\n<tool_response>\n{task.catalog}\n</tool_response>")
    response, shares = [], []
    while len(prompt) + len(response) < _PRACTICE_TOKENS:
        item, key = rng.choice(list(task.keys.items()))
        question, answer = rng.choice([
            (f"of the {item}?\n", f'<tool_call>\n{{"note": "{item} {key}"}}}}'),
            (f"of the {item}?\n", f'<tool_call>\n{{"note": "{item} {key}"}}}}'),
            (f"find {key}\n", f'"find {key}"}}}}'),
            (f"find {key}\n", f'{{"key": "{key}"}}}}'),
        ])  # fmt: skip
        for text, share in ((question, 0.0), (answer, 1.0)):
            ids = encode(text)
            response += ids
            shares += [share] * len(ids)
    return _sample(prompt, response, shares)


def _sample(prompt: Any, response: Any, shares: Any) -> Sample:
    shares = np.asarray(shares, np.float32)
    zeros = np.zeros(len(shares), np.float32)
    mask, versions = (shares > 0).astype(np.int8), zeros.astype(np.int32)
    return Sample(as_ids(prompt), as_ids(response), mask, zeros, versions, shares)


def supervised_loss(model: Any, rows: list[TrainingRow], max_tokens: int, *, train: bool) -> float:
    """Returns −log p of the trained tokens, as a weighted mean; adds its gradient if `train` is set."""
    total = float(sum(row.weights.sum(dtype=np.float64) for row in rows))
    value = 0.0
    for batch in pack_rows(rows, max_tokens):
        outputs = forward_packed(model, batch)
        weights = torch.from_numpy(batch.weights[outputs.places.cpu().numpy()]).to(outputs.logprobs)
        loss: Any = -(weights * outputs.logprobs).sum() / total
        if train:
            loss.backward()
        value += loss.item()
    return value


def train_warm_start(folder: Path, stages: Sequence[TrainingStage], learning_rate: float, seed: int) -> None:
    """Trains a model on the demonstrations in a folder and writes it there, in half precision."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    rng = Random(seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    episodes = load_demonstrations(folder / "demonstrations.npz")
    held_out, episodes = episodes[:_HELD_OUT], episodes[_HELD_OUT:]
    model = create_model().to(device)
    for stage in stages:
        print(stage, flush=True)
        _train_stage(model, stage, episodes[: stage.episodes], held_out, tokenizer, rng, learning_rate)
    # The demo trains in single precision; half precision only makes the file small.
    model.half().save_pretrained(folder)


def _train_stage(
    model: Any,
    stage: TrainingStage,
    episodes: list[list[Sample]],
    held_out: list[list[Sample]],
    tokenizer: Tokenizer,
    rng: Random,
    learning_rate: float,
) -> None:
    max_tokens = 4096 if model.device.type == "cuda" else 384
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started_at = time.monotonic()
    order: list[int] = []
    for step in range(stage.steps):
        decay = 0.05 + 0.475 * (1 + math.cos(math.pi * step / stage.steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * decay * min(1, (step + 1) / _WARM_UP_STEPS)
        if len(order) < _EPISODES_PER_STEP:
            order = rng.sample(range(len(episodes)), len(episodes))
        batch = [episodes[order.pop()] for _ in range(min(_EPISODES_PER_STEP, len(order)))]
        practice = [practice_row(tokenizer, rng, stage.clerk_fraction) for _ in range(stage.practice_rows)]
        rows = _rows(chain(*batch), 1.0) + _rows(practice, _PRACTICE_WEIGHT)
        optimizer.zero_grad()
        loss = supervised_loss(model, rows, max_tokens, train=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == stage.steps - 1:
            with torch.no_grad():
                held_out_loss = supervised_loss(model, _rows(chain(*held_out), 1.0), max_tokens, train=False)
            elapsed_s = round(time.monotonic() - started_at)
            print(f"step {step}: loss {loss:.4f}, held out {held_out_loss:.4f}, {elapsed_s} s", flush=True)


def _rows(samples: Iterable[Sample], weight: float) -> list[TrainingRow]:
    return [
        TrainingRow(sample, sample.shares * np.float32(weight), np.ones_like(sample.shares))
        for sample in samples
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's model on recorded demonstrations.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train_warm_start(options.folder, STAGES, options.learning_rate, options.seed)


if __name__ == "__main__":
    main()
