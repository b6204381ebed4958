"""Samples ids from logits, each row with its own request's parameters and random numbers.

Invariant: what a row samples depends on its logits, parameters, seed and position only. The random number of
a position is a hash of seed and position, so other rows of the batch, a preemption or a continuation on
another replica change nothing.

The order is that of transformers: bias and excluded ids, penalties, temperature, top-k, top-p, min-p. `raw`
logprobs are those of the unchanged logits; `processed` ones are those of the distribution sampled from, which
at temperature 0 is one id with probability 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from branchline.engines.base import MIN_TEMPERATURE, LogprobKind, SamplingParams
from branchline.engines.hf.job import Job, PenaltyCounts

_MASK_64 = 2**64 - 1
_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class SampledTokens:
    """One id for each row."""

    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    """Not finite if the model's logits were not."""


def sample(logits_b_v: Tensor, jobs: Sequence[Job], kind: LogprobKind) -> SampledTokens:
    """Samples the next id of each job."""
    logits_b_v = logits_b_v.float()
    scores_b_v = _apply_penalties(logits_b_v, jobs)
    ids_b = scores_b_v.argmax(-1)
    drawn = [row for row, job in enumerate(jobs) if job.params.temperature >= MIN_TEMPERATURE]
    processed = [0.0] * len(jobs)
    if drawn:
        is_all = len(drawn) == len(jobs)
        ids, logprobs = _draw(
            scores_b_v if is_all else scores_b_v[drawn], jobs if is_all else [jobs[row] for row in drawn]
        )
        ids_b[drawn] = ids
        for row, logprob in zip(drawn, logprobs.tolist(), strict=True):
            processed[row] = logprob
    raw = logits_b_v.log_softmax(-1).gather(-1, ids_b[:, None])[:, 0].tolist()
    draws = SampledTokens(ids_b.tolist(), raw if kind == "raw" else processed, raw)
    for job, token in zip(jobs, draws.ids, strict=True):
        if job.penalty_counts is not None:
            job.penalty_counts.add(token)
    return draws


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of this seed and position (SplitMix64).

    >>> uniform(7, 3) == uniform(7, 3) != uniform(7, 4)
    True
    """
    return (_splitmix64(_splitmix64(seed & _MASK_64) + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _apply_penalties(logits_b_v: Tensor, jobs: Sequence[Job]) -> Tensor:
    scores_b_v = logits_b_v
    for row, job in enumerate(jobs):
        params = job.params
        if params.requested_fields:
            if scores_b_v is logits_b_v:
                scores_b_v = logits_b_v.clone()
            _constrain(scores_b_v[row], job)
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1):
            continue
        if job.penalty_counts is None:
            vocab, device = logits_b_v.shape[-1], logits_b_v.device
            job.penalty_counts = PenaltyCounts(job.prompt_ids, job.output_ids, vocab, device)
        if scores_b_v is logits_b_v:
            scores_b_v = logits_b_v.clone()
        scores_b_v[row] = job.penalty_counts.apply(scores_b_v[row], params)
    return scores_b_v


def _constrain(scores_v: Tensor, job: Job) -> None:
    """Adds the bias of ids to their scores, and excludes ids that must not be sampled now."""
    params, device = job.params, scores_v.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        scores_v[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores_v.dtype, device=device)
    if params.allowed_token_ids:
        is_excluded_v = torch.ones_like(scores_v, dtype=torch.bool)
        is_excluded_v[list(params.allowed_token_ids)] = False
        scores_v[is_excluded_v] = _NEGATIVE_INFINITY
    if params.stop_ids and len(job.output_ids) < params.min_tokens:
        scores_v[[token for token in params.stop_ids if token < len(scores_v)]] = _NEGATIVE_INFINITY


def _draw(scores_b_v: Tensor, jobs: Sequence[Job]) -> tuple[Tensor, Tensor]:
    """Ids drawn from the scores, and their logprobs under the distribution drawn from."""
    device = scores_b_v.device
    scores_b_v = scores_b_v / _column_tensor([job.params.temperature for job in jobs], device)
    truncated = [row for row, job in enumerate(jobs) if _is_truncated(job.params)]
    if truncated:
        scores_b_v[truncated] = truncate_scores(
            scores_b_v[truncated], [jobs[row].params for row in truncated]
        )
    logprobs_b_v = scores_b_v.log_softmax(-1)
    # In float64, so that rounding a sum near 1 does not change the probability of rare ids. A number
    # strictly below the total selects an id whose probability is not zero.
    sums_b_v = logprobs_b_v.exp().cumsum(-1, dtype=torch.float64)
    total_b_1 = sums_b_v[:, -1:]
    numbers = [uniform(job.seed, job.length) for job in jobs]
    target_b_1 = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * total_b_1
    target_b_1 = torch.minimum(target_b_1, torch.nextafter(total_b_1, torch.zeros_like(total_b_1)))
    ids_b_1 = torch.searchsorted(sums_b_v, target_b_1, right=True).clamp(max=sums_b_v.shape[-1] - 1)
    return ids_b_1[:, 0], logprobs_b_v.gather(-1, ids_b_1)[:, 0]


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def truncate_scores(scores_b_v: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets the scores that top-k, then top-p, then min-p exclude to minus infinity."""
    device, vocab = scores_b_v.device, scores_b_v.shape[-1]
    ranked_b_v, order_b_v = scores_b_v.sort(dim=-1, descending=True)
    last = torch.tensor([min(p.top_k or vocab, vocab) - 1 for p in params], device=device)[:, None]
    ranked_b_v = ranked_b_v.masked_fill(ranked_b_v < ranked_b_v.gather(-1, last), _NEGATIVE_INFINITY)
    probs_b_v = ranked_b_v.softmax(-1)
    above_b_v = probs_b_v.cumsum(-1) - probs_b_v
    top_p = _column_tensor([p.top_p for p in params], device)
    drop_b_v = (above_b_v >= top_p) & (top_p < 1)
    drop_b_v |= probs_b_v < probs_b_v[:, :1] * _column_tensor([p.min_p for p in params], device)
    drop_b_v[:, 0] = False
    kept_b_v = ranked_b_v.masked_fill(drop_b_v, _NEGATIVE_INFINITY)
    return torch.full_like(scores_b_v, _NEGATIVE_INFINITY).scatter(-1, order_b_v, kept_b_v)


def _column_tensor(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
