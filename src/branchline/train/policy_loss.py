"""The loss of a packed batch: a policy loss, and a KL and an entropy term, weighted as the rows say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchline.core.errors import InputError
from branchline.export.packing import SEVERAL_ANSWERS, PackedBatch
from branchline.train.losses import LossConfig, kl_estimate, token_loss, truncated_importance_weights
from branchline.train.packed_forward import TokenOutputs


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch and what to log about it."""

    loss: Tensor
    kl: float
    """Weighted mean of the KL divergence from the reference policy; 0 without one."""
    entropy: float
    clip_fraction: float
    """Share of trained tokens whose ratio is outside the clip range."""
    engine_gap: float
    """Mean absolute difference between the trainer's and the engine's logprobs."""


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

    weights, behaviour = field(batch.weights), field(batch.old_logprobs)
    old = outputs.logprobs.detach() if old_logprobs is None else old_logprobs
    correction = torch.ones_like(weights)
    if config.max_importance_weight is not None:
        correction = truncated_importance_weights(old, behaviour, config.max_importance_weight)
    segments = None
    if config.name == "gspo":
        segments = torch.from_numpy(number_outputs(batch)[places]).long().to(device)
    loss_of = token_loss(config, segments)
    total = torch.zeros((), device=device, dtype=dtype)
    for advantages in (field(batch.positive_advantages), field(batch.negative_advantages)):
        total = total + (correction * loss_of(outputs.logprobs, old, advantages)).sum()
    kl = torch.zeros_like(total)
    if config.kl_coefficient:
        if reference_logprobs is None:
            raise InputError("kl_coefficient: needs the logprobs of a reference policy")
        kl = (weights * kl_estimate(outputs.logprobs, reference_logprobs)).sum()
        total = total + config.kl_coefficient * kl
    entropy = torch.zeros_like(total)
    if outputs.entropies is not None:
        entropy = (weights * outputs.entropies).sum()
    if config.entropy_coefficient:
        if outputs.entropies is None:
            raise InputError("entropy_coefficient: needs the entropies of the forward pass")
        total = total - config.entropy_coefficient * entropy
    with torch.no_grad():
        scale = weights.sum().item() or 1.0
        ratio = torch.exp(outputs.logprobs - old)
        clipped = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        gap = (old - behaviour).abs().nan_to_num()
    return BatchLoss(
        total / normalizer,
        kl.item() / scale,
        entropy.item() / scale,
        clipped.to(dtype).mean().item() if len(ratio) else 0.0,
        gap.mean().item() if len(gap) else 0.0,
    )


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
