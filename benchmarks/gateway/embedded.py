"""The embedded engine with a tiny model: concurrent sessions compared with `generate`, prefix reuse, memory.

Everything is greedy and on one CPU thread, so both sides of a ratio do the same work on the same core and
their ids can be compared. The model is random: its output has no meaning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import BenchmarkTable, best_cpu_s, format_ms
from branchline.core.extras import install_line
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import SamplingParams

if TYPE_CHECKING:
    from branchline.engines.hf import HfEngine

_VOCAB, _LAYERS, _KEY_HEADS, _HEAD = 8192, 4, 2, 32
_TOKEN_BYTES = _LAYERS * 2 * _KEY_HEADS * _HEAD * 4
_SESSIONS, _OUTPUT_TOKENS, _ROUNDS = 8, 128, 5
_PROMPT_TOKENS = 64
_MIXED_PROMPT_TOKENS = tuple(16 + 16 * index for index in range(_SESSIONS))
_TARGET_BATCH_SPEEDUP, _TARGET_GENERATE_RATIO = 4.0, 1.0
_TURNS, _FIRST_PROMPT_TOKENS, _REPLY_TOKENS, _NEW_TOKENS = 10, 512, 32, 96
_CACHED_SESSIONS, _CACHED_PROMPT_TOKENS = 16, 256
_MIB = 2**20


def tables() -> list[BenchmarkTable]:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        report = BenchmarkTable("The embedded engine", ["not measured"])
        report.add_row(f"{' and '.join(missing)} not installed: {install_line('train')}")
        return [report]
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_throughput_table(), _turns_table(), _memory_table()]
    finally:
        torch.set_num_threads(threads)


def _model() -> Any:
    """A Qwen3 of 5 million weights, the same in every run."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=_KEY_HEADS,
        head_dim=_HEAD,
        max_position_embeddings=8192,
        initializer_range=0.1,  # So that outputs are not repetitive.
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config).eval()


def _engine(*, cache_tokens: int = 0) -> HfEngine:
    from branchline.engines.hf import HfConfig, HfEngine

    return HfEngine(_model(), HfConfig(cache_bytes=cache_tokens * _TOKEN_BYTES))


def _prompt(seed: int, size: int) -> Ids:
    return as_ids(np.random.default_rng(seed).integers(0, _VOCAB, size))


@dataclass(frozen=True)
class ServedReply:
    """The ids of a reply, and the CPU seconds until the first."""

    ids: list[int]
    first_s: float


def _serve_all(engine: HfEngine, prompts: Sequence[Ids], tokens: int) -> list[ServedReply]:
    """Generates for all prompts concurrently."""
    params = SamplingParams(max_tokens=tokens, temperature=0, flush_s=0.02)

    async def serve(prompt_ids: Ids) -> ServedReply:
        ids: list[int] = []
        start, first_s = time.process_time(), 0.0
        async for chunk in engine.generate(prompt_ids, params):
            first_s = first_s or time.process_time() - start
            ids += chunk.ids.tolist()
        return ServedReply(ids, first_s)

    async def serve_all() -> list[ServedReply]:
        return await asyncio.gather(*map(serve, prompts))

    return asyncio.run(serve_all())


def _generate_batch(model: Any, prompts: Sequence[Ids], tokens: int) -> list[list[int]]:
    """The ids of transformers' `generate` for all prompts as one left-padded batch."""
    import torch

    width = max(map(len, prompts))
    ids_b_t = np.zeros((len(prompts), width), np.int64)
    mask_b_t = np.zeros_like(ids_b_t)
    for row, prompt_ids in enumerate(prompts):
        ids_b_t[row, width - len(prompt_ids) :] = prompt_ids
        mask_b_t[row, width - len(prompt_ids) :] = 1
    with torch.inference_mode():
        output = model.generate(
            torch.from_numpy(ids_b_t),
            attention_mask=torch.from_numpy(mask_b_t),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [list(row) for row in output[:, width:].tolist()]


def _throughput_table() -> BenchmarkTable:
    model = _model()
    size_m = sum(weight.numel() for weight in model.parameters()) / 1e6
    report = BenchmarkTable(
        f"Embedded engine: {_OUTPUT_TOKENS} tokens for each of {_SESSIONS} sessions, a Qwen3 of "
        f"{size_m:.1f} M weights",
        ["prompts", "one, tok/s", "eight, tok/s", "generate, tok/s", "eight to one", "target",
         "to generate", "target", "ids equal"],
        [
            f"Seconds are CPU seconds of this process, the best of {_ROUNDS} rounds, prompts included; the "
            "three alternate.",
            "One: one session. Eight: eight tasks of one event loop, streaming, with logprobs.",
            "Generate: transformers, the same prompts as one batch, without streaming and logprobs.",
            "The engine admits requests as they arrive, not all in the same step; prefix reuse is off.",
        ],
    )  # fmt: skip
    engine = _engine()
    for name, sizes in (
        (f"of {_PROMPT_TOKENS} ids", (_PROMPT_TOKENS,) * _SESSIONS),
        (f"of {_MIXED_PROMPT_TOKENS[0]} to {_MIXED_PROMPT_TOKENS[-1]} ids", _MIXED_PROMPT_TOKENS),
    ):
        prompts = [_prompt(seed, size) for seed, size in enumerate(sizes)]
        middle = prompts[_SESSIONS // 2]
        served: list[list[int]] = []
        reference: list[list[int]] = []

        def eight(prompts: Sequence[Ids] = prompts, served: list[list[int]] = served) -> None:
            served[:] = [reply.ids for reply in _serve_all(engine, prompts, _OUTPUT_TOKENS)]

        def batch(prompts: Sequence[Ids] = prompts, reference: list[list[int]] = reference) -> None:
            reference[:] = _generate_batch(model, prompts, _OUTPUT_TOKENS)

        def one(prompt_ids: Ids = middle) -> None:
            _serve_all(engine, [prompt_ids], _OUTPUT_TOKENS)

        for warm_up in (one, eight, batch):
            warm_up()
        one_s, eight_s, batch_s = best_cpu_s(one, eight, batch, repeats=_ROUNDS)
        speedup, ratio = _SESSIONS * one_s / eight_s, batch_s / eight_s
        equal = sum(ours == theirs for ours, theirs in zip(served, reference, strict=True))
        report.add_row(
            name,
            f"{_OUTPUT_TOKENS / one_s:,.0f}",
            f"{_SESSIONS * _OUTPUT_TOKENS / eight_s:,.0f}",
            f"{_SESSIONS * _OUTPUT_TOKENS / batch_s:,.0f}",
            f"{speedup:.1f}×",
            report.target_cell(f"≥ {_TARGET_BATCH_SPEEDUP:.0f}×", speedup >= _TARGET_BATCH_SPEEDUP),
            f"{ratio:.2f}×",
            report.target_cell(f"≥ {_TARGET_GENERATE_RATIO:.1f}×", ratio >= _TARGET_GENERATE_RATIO),
            report.target_cell(f"{equal} of {_SESSIONS}", equal == _SESSIONS),
        )
    asyncio.run(engine.close())
    return report


@dataclass(frozen=True)
class MeasuredTurn:
    """One turn of a conversation."""

    prompt_tokens: int
    computed_tokens: int
    first_s: float
    ids: list[int]


def _conversation(engine: HfEngine, seed: int) -> list[MeasuredTurn]:
    ids = _prompt(1000 * seed, _FIRST_PROMPT_TOKENS).tolist()
    turns: list[MeasuredTurn] = []
    for turn in range(_TURNS):
        before = engine.stats
        (reply,) = _serve_all(engine, [as_ids(ids)], _REPLY_TOKENS)
        computed = engine.stats.computed_tokens - before.computed_tokens
        turns.append(MeasuredTurn(len(ids), computed, reply.first_s, reply.ids))
        ids = [*ids, *reply.ids, *_prompt(1000 * seed + turn + 1, _NEW_TOKENS).tolist()]
    return turns


def _turns_table() -> BenchmarkTable:
    report = BenchmarkTable(
        f"Embedded engine: a conversation of {_TURNS} turns, the prompt of each",
        ["turn", "prompt ids", "computed", "first id, ms", "without reuse", "first id, ms", "target",
         "ids equal"],
        [
            f"Prompt: {_FIRST_PROMPT_TOKENS} ids. Each turn: {_REPLY_TOKENS} sampled, {_NEW_TOKENS} new ids.",
            f"First id: CPU time from the request to the first id, the best of {_ROUNDS} conversations.",
            "Computed: prompt ids that went through the model. The last id of a reply was never an input, so "
            "it counts as new.",
            "Without reuse: the same conversation without a prefix cache.",
        ],
    )  # fmt: skip
    cached, uncached = (_engine(cache_tokens=size) for size in (100_000, 0))
    sides: list[list[list[MeasuredTurn]]] = [[], []]
    for seed in range(_ROUNDS + 1):
        for side, engine in zip(sides, (cached, uncached), strict=True):
            side.append(_conversation(engine, seed))
    for engine in (cached, uncached):
        asyncio.run(engine.close())
    with_reuse, without_reuse = ([list(turns) for turns in zip(*side[1:], strict=True)] for side in sides)
    for index in (0, 1, _TURNS // 2 - 1, _TURNS - 1):
        ours, theirs = with_reuse[index], without_reuse[index]
        equal = sum(left.ids == right.ids for left, right in zip(ours, theirs, strict=True))
        report.add_row(
            index + 1,
            f"{ours[0].prompt_tokens:,}",
            ours[0].computed_tokens,
            format_ms(min(turn.first_s for turn in ours)),
            f"{theirs[0].computed_tokens:,}",
            format_ms(min(turn.first_s for turn in theirs)),
            report.target_cell(f"≤ {_NEW_TOKENS + 1} computed", ours[0].computed_tokens <= _NEW_TOKENS + 1)
            if index
            else "",
            report.target_cell(f"{equal} of {_ROUNDS}", equal == _ROUNDS),
        )
    totals = [sum(turns[0].computed_tokens for turns in side) for side in (with_reuse, without_reuse)]
    first_s = [
        sum(min(turn.first_s for turn in turns) for turns in side) for side in (with_reuse, without_reuse)
    ]
    report.add_row(
        "all", "", f"{totals[0]:,}", format_ms(first_s[0]), f"{totals[1]:,}", format_ms(first_s[1]), "", ""
    )
    return report


def _memory_table() -> BenchmarkTable:
    sizes = [
        _CACHED_PROMPT_TOKENS + _REPLY_TOKENS - 1 + turn * (_REPLY_TOKENS + _NEW_TOKENS) for turn in (0, 1)
    ]
    full_size = _CACHED_SESSIONS * sizes[1]
    report = BenchmarkTable(
        f"Embedded engine: {_CACHED_SESSIONS} sessions of two turns share the prefix cache",
        ["limit for", "limit, MiB", "maximum, MiB", "evictions", "second turns that reused the first",
         "prompt ids computed", "target"],
        [
            f"{_TOKEN_BYTES:,} bytes per id. The least recently used entry is evicted first; second turns "
            "are in reverse order.",
        ],
    )  # fmt: skip
    for name, limit in (("all", full_size), ("half of them", full_size // 2), ("none", 0)):
        engine = _engine(cache_tokens=limit)
        stats = [engine.stats]
        prompts = [_prompt(seed, _CACHED_PROMPT_TOKENS) for seed in range(_CACHED_SESSIONS)]
        for index, prompt in enumerate(prompts):
            (reply,) = _serve_all(engine, [prompt], _REPLY_TOKENS)
            new = _prompt(100 + index, _NEW_TOKENS)
            prompts[index] = as_ids([*prompt.tolist(), *reply.ids, *new.tolist()])
            stats.append(engine.stats)
        for prompt in reversed(prompts):
            _serve_all(engine, [prompt], _REPLY_TOKENS)
            stats.append(engine.stats)
        asyncio.run(engine.close())
        second = stats[_CACHED_SESSIONS:]
        reused = sum(after.reused_tokens > before.reused_tokens for before, after in pairwise(second))
        maximum = max(each.cached_tokens for each in stats)
        report.add_row(
            name,
            f"{limit * _TOKEN_BYTES / _MIB:.1f}",
            f"{maximum * _TOKEN_BYTES / _MIB:.1f}",
            stats[-1].evictions,
            f"{reused} of {_CACHED_SESSIONS}",
            f"{stats[-1].computed_tokens:,}",
            report.target_cell("within the limit", maximum <= limit),
        )
    return report
