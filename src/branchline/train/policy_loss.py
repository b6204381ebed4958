"""The loss of a packed batch: a policy loss, and a KL and an entropy term, weighted as the rows say.

What is logged about a batch are sums and the weights that they are divided by, so that a mean over the tokens
of a step does not depend on how its rows are packed. A token weighs its share in it: one that is sampled once
and trained in several rows counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchline.core.errors import InputError
from branchline.export.packing import SEVERAL_ANSWERS, PackedBatch
from branchline.train.losses import LossConfig, k3_divergence, token_loss, truncated_importance_weights
from branchline.train.packed_forward import TokenOutputs


class WeightedSum(NamedTuple):
    """A sum of values times their weights, and the sum of the weights."""

    total: float
    weight: float


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch and what to log about it."""

    loss: Tensor
    sums: Mapping[str, WeightedSum]
    """By the name of the metric:

    `entropy`           of the distribution that a token was drawn from
    `kl/reference`      the divergence from the reference policy, as the loss has it
    `clip_ratio/…`      where the clipped loss has no gradient, as in TRL: `low_mean` (ratio < 1 − clip_low,
                        negative advantage), `high_mean` (ratio > 1 + clip_high, positive advantage),
                        `region_mean` (both)
    `cispo_clip_ratio`  where CISPO limits the ratio of a positive advantage, as in TRL
    """


def policy_loss(
    outputs: TokenOutputs,
    batch: PackedBatch,
    config: LossConfig,
    *,
    normalizer: float,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> BatchLoss:
    """Returns Σ weight × token loss / normalizer.

    `normalizer` is that of the whole step, so that the losses of its batches add up. `old_logprobs` are the
    trainer's own at the start of the step; without them the first pass is on-policy. The engine's logprobs
    are used only for importance weights.
    """
    device, dtype = outputs.logprobs.device, outputs.logprobs.dtype
    places = outputs.places.cpu().numpy()

    def field(values: NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values[places]).to(device, dtype)

    weights, shares = field(batch.weights), field(batch.shares)
    old = outputs.logprobs.detach() if old_logprobs is None else old_logprobs
    correction = torch.ones_like(weights)
    if config.max_importance_weight is not None:
        correction = truncated_importance_weights(
            old, field(batch.old_logprobs), config.max_importance_weight
        )
    segments = None
    if config.name == "gspo":
        segments = torch.from_numpy(number_outputs(batch)[places]).long().to(device)
    loss_of = token_loss(config, segments)
    total = torch.zeros((), device=device, dtype=dtype)
    for advantages in (field(batch.positive_advantages), field(batch.negative_advantages)):
        total = total + (correction * loss_of(outputs.logprobs, old, advantages)).sum()
    sums: dict[str, WeightedSum] = {}
    if config.reference_kl_coefficient:
        if reference_logprobs is None:
            raise InputError("reference_kl_coefficient: needs the logprobs of a reference policy")
        divergence = k3_divergence(outputs.logprobs, reference_logprobs)
        if config.reference_kl_estimator == "k3_ratio":
            divergence = divergence * torch.exp(outputs.logprobs - old)
        total = total + config.reference_kl_coefficient * (weights * divergence).sum()
        sums["kl/reference"] = _weighted_sum(divergence, shares)
    if config.entropy_coefficient:
        if outputs.entropies is None:
            raise InputError("entropy_coefficient: needs the entropies of the forward pass")
        total = total - config.entropy_coefficient * (weights * outputs.entropies).sum()
    if outputs.entropies is not None:
        sums["entropy"] = _weighted_sum(outputs.entropies, shares)
    if config.name != "reinforce":
        signs = field(batch.positive_shares), field(batch.negative_shares)
        sums |= _clip_sums(outputs.logprobs.detach() - old, shares, signs, segments, config)
    return BatchLoss(total / normalizer, sums)


def _weighted_sum(values: Tensor, weights: Tensor) -> WeightedSum:
    return WeightedSum((weights * values.detach()).sum().item(), weights.sum().item())


def _clip_sums(
    log_ratios: Tensor,
    shares: Tensor,
    signs: tuple[Tensor, Tensor],
    segments: Tensor | None,
    config: LossConfig,
) -> dict[str, WeightedSum]:
    """`signs` are the shares of the rows with a positive and with a negative advantage. With one ratio for
    each answer (`segments`), an answer counts as much as one token does otherwise."""
    scale = torch.ones_like(shares)
    if segments is not None and len(segments):
        sizes = torch.bincount(segments).to(shares.dtype)
        sums = torch.zeros_like(sizes).index_add(0, segments, log_ratios)
        log_ratios, scale = (sums / sizes)[segments], 1 / sizes[segments]
    ratios, (positive, negative) = torch.exp(log_ratios), signs
    weight = (shares * scale).sum().item()
    high = (positive * scale * (ratios > 1 + config.clip_high)).sum().item()
    if config.name == "cispo":
        return {"cispo_clip_ratio": WeightedSum(high, weight)}
    low = (negative * scale * (ratios < 1 - config.clip_low)).sum().item()
    means = {"low_mean": low, "high_mean": high, "region_mean": low + high}
    return {f"clip_ratio/{name}": WeightedSum(total, weight) for name, total in means.items()}


def number_outputs(batch: PackedBatch) -> NDArray[np.int32]:
    """Returns the number of the answer that each trained token belongs to, from 0 on; −1 for all others.

    Raises InputError if answers share a part of their tokens: these have no single sequence.
    """
    trained = batch.weights != 0
    if (batch.answers[trained] == SEVERAL_ANSWERS).any():
        raise InputError(
            "batch: two answers share their first tokens, expected share_partial_answers=False for this loss"
        )
    numbers = np.full(len(batch), -1, np.int32)
    numbers[trained] = np.unique(batch.answers[trained], return_inverse=True)[1]
    return numbers
