"""The embedded engine on a tiny model: sessions together, beside plain `generate`, turn by turn, and memory.

Everything is greedy and on one CPU thread, so both sides of a ratio do the same work on the same core, and
the ids of both sides can be compared. The model is random: what it says has no meaning, what it costs does.
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

from benchmarks.measure import Report, best_cpu_s, ms
from branchline.core.runs import Ids, as_ids
from branchline.engines.base import SamplingParams

if TYPE_CHECKING:
    from branchline.engines.hf import HfEngine, HfStats

_VOCAB, _LAYERS, _KEY_HEADS, _HEAD = 8192, 4, 2, 32
_TOKEN_BYTES = _LAYERS * 2 * _KEY_HEADS * _HEAD * 4
_SESSIONS, _TOKENS, _ROUNDS = 8, 128, 5
_PROMPT = 64
_PROMPTS = tuple(16 + 16 * place for place in range(_SESSIONS))
_TARGET_TOGETHER, _TARGET_PLAIN = 4.0, 1.0
_TURNS, _FIRST, _REPLY, _NEW = 10, 512, 32, 96
_KEPT_SESSIONS, _KEPT_PROMPT = 16, 256
_MIB = 2**20


def tables() -> list[Report]:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        report = Report("The embedded engine", ["not measured"])
        report.row(f"{' and '.join(missing)} not installed: pip install 'branchline[hf]'")
        return [report]
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_together(), _turns(), _memory()]
    finally:
        torch.set_num_threads(threads)


def _model() -> Any:
    """A Qwen3 of 5 million weights; the same one every time."""
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
        initializer_range=0.1,  # enough that outputs do not repeat themselves
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
class Said:
    """What a session got, and the CPU seconds until the first of it was there."""

    ids: list[int]
    first_s: float


def _served(engine: HfEngine, prompts: Sequence[Ids], tokens: int) -> list[Said]:
    """All prompts at once, each in a session of its own."""

    async def one(prompt_ids: Ids) -> Said:
        ids: list[int] = []
        start, first_s = time.process_time(), 0.0
        async for chunk in engine.generate(prompt_ids, SamplingParams(max_tokens=tokens, temperature=0)):
            first_s = first_s or time.process_time() - start
            ids += chunk.ids.tolist()
        return Said(ids, first_s)

    async def all_of_them() -> list[Said]:
        return await asyncio.gather(*map(one, prompts))

    return asyncio.run(all_of_them())


def _plain(model: Any, prompts: Sequence[Ids], tokens: int) -> list[list[int]]:
    """What transformers' own `generate` gives for all prompts as one batch, padded in front."""
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


def _together() -> Report:
    model = _model()
    size_m = sum(weight.numel() for weight in model.parameters()) / 1e6
    report = Report(
        f"Embedded engine: {_TOKENS} tokens for each of {_SESSIONS} sessions, a Qwen3 of {size_m:.1f} M "
        "weights",
        ["prompts", "one, tok/s", "eight, tok/s", "generate, tok/s", "eight to one", "target",
         "to generate", "target", "ids equal"],
        [
            f"Seconds are CPU seconds of this process, the best of {_ROUNDS} rounds, prompts included; the "
            "three sides take turns.",
            "One: a session alone. Eight: as many tasks of one event loop, streaming, logprobs included.",
            "Generate: transformers' own, the same prompts as one batch, no streaming, no logprobs.",
            "The engine joins what arrives, so its eight do not start in the same step; prefix reuse is off.",
        ],
    )  # fmt: skip
    engine = _engine()
    for name, sizes in (
        (f"of {_PROMPT} ids", (_PROMPT,) * _SESSIONS),
        (f"of {_PROMPTS[0]} to {_PROMPTS[-1]} ids", _PROMPTS),
    ):
        prompts = [_prompt(seed, size) for seed, size in enumerate(sizes)]
        middle = prompts[_SESSIONS // 2]
        said: list[list[int]] = []
        plain: list[list[int]] = []

        def eight(prompts: Sequence[Ids] = prompts, said: list[list[int]] = said) -> None:
            said[:] = [one.ids for one in _served(engine, prompts, _TOKENS)]

        def batch(prompts: Sequence[Ids] = prompts, plain: list[list[int]] = plain) -> None:
            plain[:] = _plain(model, prompts, _TOKENS)

        def alone(prompt_ids: Ids = middle) -> None:
            _served(engine, [prompt_ids], _TOKENS)

        for rehearsal in (alone, eight, batch):
            rehearsal()
        one_s, eight_s, plain_s = best_cpu_s(alone, eight, batch, repeats=_ROUNDS)
        together, beside = _SESSIONS * one_s / eight_s, plain_s / eight_s
        equal = sum(ours == theirs for ours, theirs in zip(said, plain, strict=True))
        report.row(
            name,
            f"{_TOKENS / one_s:,.0f}",
            f"{_SESSIONS * _TOKENS / eight_s:,.0f}",
            f"{_SESSIONS * _TOKENS / plain_s:,.0f}",
            f"{together:.1f}×",
            report.target(f"≥ {_TARGET_TOGETHER:.0f}×", together >= _TARGET_TOGETHER),
            f"{beside:.2f}×",
            report.target(f"≥ {_TARGET_PLAIN:.1f}×", beside >= _TARGET_PLAIN),
            report.target(f"{equal} of {_SESSIONS}", equal == _SESSIONS),
        )
    asyncio.run(engine.close())
    return report


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    prompt: int
    computed: int
    first_s: float
    ids: list[int]


def _conversation(engine: HfEngine, seed: int) -> list[Turn]:
    ids = _prompt(1000 * seed, _FIRST).tolist()
    turns: list[Turn] = []
    for turn in range(_TURNS):
        before = engine.stats
        (said,) = _served(engine, [as_ids(ids)], _REPLY)
        turns.append(Turn(len(ids), _computed(before, engine.stats), said.first_s, said.ids))
        ids = [*ids, *said.ids, *_prompt(1000 * seed + turn + 1, _NEW).tolist()]
    return turns


def _computed(before: HfStats, after: HfStats) -> int:
    return after.computed_tokens - before.computed_tokens


def _turns() -> Report:
    report = Report(
        f"Embedded engine: a conversation of {_TURNS} turns, the prompt of each",
        ["turn", "prompt ids", "computed", "first id, ms", "without reuse", "first id, ms", "target",
         "ids equal"],
        [
            f"A prompt of {_FIRST} ids, replies of {_REPLY}, {_NEW} new ids a turn. First id: CPU time from "
            f"asking to the first id, the best of {_ROUNDS} conversations.",
            "Computed: ids of the prompt that went through the model. The last id of a reply was sampled and "
            "never an input, so it is among the new ones.",
            "Without reuse: the same conversation where nothing is kept from turn to turn.",
        ],
    )  # fmt: skip
    keeping, forgetting = (_engine(cache_tokens=size) for size in (100_000, 0))
    sides: list[list[list[Turn]]] = [[], []]
    for seed in range(_ROUNDS + 1):
        for side, engine in zip(sides, (keeping, forgetting), strict=True):
            side.append(_conversation(engine, seed))
    for engine in (keeping, forgetting):
        asyncio.run(engine.close())
    kept, forgot = ([list(turns) for turns in zip(*side[1:], strict=True)] for side in sides)
    for place in (0, 1, _TURNS // 2 - 1, _TURNS - 1):
        ours, theirs = kept[place], forgot[place]
        equal = sum(one.ids == other.ids for one, other in zip(ours, theirs, strict=True))
        report.row(
            place + 1,
            f"{ours[0].prompt:,}",
            ours[0].computed,
            ms(min(turn.first_s for turn in ours)),
            f"{theirs[0].computed:,}",
            ms(min(turn.first_s for turn in theirs)),
            report.target(f"≤ {_NEW + 1} computed", ours[0].computed <= _NEW + 1) if place else "",
            report.target(f"{equal} of {_ROUNDS}", equal == _ROUNDS),
        )
    totals = [sum(turns[0].computed for turns in side) for side in (kept, forgot)]
    first_s = [sum(min(turn.first_s for turn in turns) for turns in side) for side in (kept, forgot)]
    report.row("all", "", f"{totals[0]:,}", ms(first_s[0]), f"{totals[1]:,}", ms(first_s[1]), "", "")
    return report


def _memory() -> Report:
    sizes = [_KEPT_PROMPT + _REPLY - 1 + turn * (_REPLY + _NEW) for turn in (0, 1)]
    room = _KEPT_SESSIONS * sizes[1]
    report = Report(
        f"Embedded engine: {_KEPT_SESSIONS} sessions of two turns share what may be kept",
        ["room for", "limit, MiB", "most kept, MiB", "evictions", "second turns that found the first",
         "prompt ids computed", "target"],
        [
            f"{_TOKEN_BYTES:,} bytes an id. The least recently used goes first; second turns come the other "
            "way round, the latest session first.",
        ],
    )  # fmt: skip
    for name, limit in (("all", room), ("half of them", room // 2), ("none", 0)):
        engine = _engine(cache_tokens=limit)
        seen = [engine.stats]
        talks = [_prompt(seed, _KEPT_PROMPT) for seed in range(_KEPT_SESSIONS)]
        for place in range(_KEPT_SESSIONS):
            (said,) = _served(engine, [talks[place]], _REPLY)
            new = _prompt(100 + place, _NEW)
            talks[place] = as_ids([*talks[place].tolist(), *said.ids, *new.tolist()])
            seen.append(engine.stats)
        for talk in reversed(talks):
            _served(engine, [talk], _REPLY)
            seen.append(engine.stats)
        asyncio.run(engine.close())
        second = seen[_KEPT_SESSIONS:]
        found = sum(after.reused_tokens > before.reused_tokens for before, after in pairwise(second))
        most = max(stats.cached_tokens for stats in seen)
        report.row(
            name,
            f"{limit * _TOKEN_BYTES / _MIB:.1f}",
            f"{most * _TOKEN_BYTES / _MIB:.1f}",
            seen[-1].evictions,
            f"{found} of {_KEPT_SESSIONS}",
            f"{seen[-1].computed_tokens:,}",
            report.target("within the limit", most <= limit),
        )
    return report
