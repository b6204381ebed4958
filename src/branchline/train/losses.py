"""Losses of policy optimisation as pure functions of log-probabilities, one value per token.

Every policy loss takes `advantages` that are already multiplied by the token's weight. For a fixed sign of
the advantage each of them is proportional to it, so the losses of all rows through a shared token are the
loss of their summed positive advantages plus that of their summed negative ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from branchline.train.config import LossConfig as LossConfig
from branchline.train.config import LossName as LossName

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Per-token loss of logprobs, old logprobs and weighted advantages."""


def ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """The clipped surrogate: −min(r·A, clip(r, 1 − low, 1 + high)·A)."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A·log p."""
    return -advantages * logprobs


def cispo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_high: float = 0.2) -> Tensor:
    """REINFORCE with a clipped importance weight that carries no gradient: no token loses its gradient."""
    ratio = torch.exp(logprobs - old_logprobs).clamp(max=1 + clip_high).detach()
    return -ratio * advantages * logprobs


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    outputs: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """The clipped surrogate with one ratio per output: the geometric mean of its tokens' ratios.

    `outputs` has the number of the output of each token. The gradient flows through every token's own
    log-probability.
    """
    count = int(outputs.max()) + 1 if len(outputs) else 0
    sizes = torch.zeros(count, dtype=logprobs.dtype, device=logprobs.device)
    sizes.index_add_(0, outputs, torch.ones_like(logprobs))
    sums = torch.zeros_like(sizes).index_add(0, outputs, logprobs - old_logprobs)
    sequence = (sums / sizes)[outputs]
    # The value is the sequence's ratio; the gradient is that of the token's log-probability.
    ratio = torch.exp(logprobs - logprobs.detach() + sequence.detach())
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """An unbiased, non-negative estimate of the KL divergence of the policy that sampled the tokens, with
    these logprobs, from another one (k3)."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def truncated_importance_weights(proximal: Tensor, behaviour: Tensor, limit: float) -> Tensor:
    """min(limit, exp(proximal − behaviour)): the trainer's probability of a token over the engine's.

    1 where the engine gave no logprob.
    """
    weights = torch.exp(proximal - behaviour).clamp(max=limit)
    return torch.where(torch.isnan(behaviour), torch.ones_like(weights), weights).detach()


def token_loss(config: LossConfig, outputs: Tensor | None = None) -> TokenLoss:
    """Returns the per-token loss of a config. `outputs` is needed for `gspo`."""
    if config.name == "reinforce":
        return lambda new, _, advantages: reinforce_loss(new, advantages)
    if config.name == "cispo":
        return lambda new, old, advantages: cispo_loss(new, old, advantages, config.clip_high)
    if config.name == "gspo":
        assert outputs is not None, "gspo needs the output of each token"
        return lambda new, old, advantages: gspo_loss(
            new, old, advantages, outputs, config.clip_low, config.clip_high
        )
    return lambda new, old, advantages: ppo_loss(new, old, advantages, config.clip_low, config.clip_high)
