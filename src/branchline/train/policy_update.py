"""One update of the policy: training rows in, new weights and metrics out. No asyncio, no gateway.

PPO's ratio is that of the trainer's own log-probabilities at the start of the step (`proximal`). The engine's
log-probabilities only give the truncated importance weight of each token, whatever version sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from branchline.core.errors import InputError
from branchline.export.packing import PackedBatch, TrainingRow, pack_rows
from branchline.train.losses import LossConfig
from branchline.train.packed_forward import TokenOutputs, check_model, forward_packed
from branchline.train.policy_loss import policy_loss

Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch of rows changes the weights."""

    learning_rate: float = 1e-5
    schedule: Schedule = "constant"
    """`linear`: the learning rate falls to 0 over the steps of the run."""
    passes: int = 1
    """Optimizer steps on each batch of rows."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    max_batch_tokens: int | None = 4096
    """Tokens of one forward pass; gradients of all passes are added up before the optimizer step."""
    temperature: float = 1.0
    """The temperature that tokens are sampled with."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(max_importance_weight=2.0))

    def __post_init__(self) -> None:
        for name, least in (("learning_rate", 0.0), ("weight_decay", 0.0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected {least:g} or more")
        if self.schedule not in get_args(Schedule):
            raise InputError(f"schedule: got {self.schedule!r}, expected {' or '.join(get_args(Schedule))}")
        if self.passes < 1:
            raise InputError(f"passes: got {self.passes}, expected 1 or more")
        for name in ("max_grad_norm", "temperature"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected more than 0")


class PolicyUpdater:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: UpdateConfig, reference: Any = None) -> None:
        """`reference` is the model that a KL term keeps the policy close to."""
        check_model(model)
        if config.loss.kl_coefficient and reference is None:
            raise InputError("kl_coefficient: needs a reference model")
        self.model = model.eval()  # Dropout would make the trainer's logprobs differ from the engine's.
        self.config = config
        self._reference = None if reference is None else reference.eval()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def update(self, rows: Sequence[TrainingRow], progress: float = 0.0) -> dict[str, float]:
        """Updates the weights; returns metrics under TRL's names, as means over the trained tokens.

        `progress` is the completed fraction of the run, for the schedule of the learning rate.
        Rows whose advantages are all 0 change the weights only through a KL or entropy term; without one
        they are left out of the forward pass, but not out of the mean that the loss is.
        """
        rate = self.config.learning_rate * (1 - progress if self.config.schedule == "linear" else 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss_config = self.config.loss
        total = float(sum(row.weights.sum(dtype=np.float64) for row in rows))
        if not (loss_config.kl_coefficient or loss_config.entropy_coefficient):
            rows = [row for row in rows if (row.advantages * row.weights).any()]
        batches = pack_rows(
            rows, self.config.max_batch_tokens, share_partial_answers=loss_config.name != "gspo"
        )
        means = _WeightedMeans()
        if not batches:
            return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate}
        references = [self._logprobs(self._reference, batch) for batch in batches if self._reference]
        proximal = [self._logprobs(self.model, batch) for batch in batches if self.config.passes > 1]
        loss = grad_norm = 0.0
        for number in range(self.config.passes):
            loss = 0.0
            self.optimizer.zero_grad()
            for index, batch in enumerate(batches):
                outputs = self._forward(self.model, batch, with_entropy=True)
                result = policy_loss(
                    outputs,
                    batch,
                    loss_config,
                    normalizer=total or 1.0,
                    old_logprobs=proximal[index] if proximal else None,
                    reference_logprobs=references[index] if references else None,
                )
                batch_loss: Any = result.loss
                batch_loss.backward()
                loss += batch_loss.item()
                size = len(outputs.logprobs)
                if number == 0:
                    means.add_sampling_gap(outputs, batch)
                if number == self.config.passes - 1:
                    means.add("entropy", result.entropy, size)
                    means.add("clip_ratio/region_mean", result.clip_fraction, size)
                    if references:
                        means.add("kl", result.kl, size)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            grad_norm = float(norm)
            if not np.isfinite(grad_norm):
                raise InputError(f"grad_norm: got {grad_norm}, expected a finite number: nothing was updated")
            self.optimizer.step()
        path_tokens = sum(batch.path_tokens for batch in batches)
        means.add("tree_reuse", path_tokens / sum(map(len, batches)), 1)
        return {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate, **means.values}

    def _forward(self, model: Any, batch: PackedBatch, *, with_entropy: bool) -> TokenOutputs:
        return forward_packed(model, batch, temperature=self.config.temperature, with_entropy=with_entropy)

    def _logprobs(self, model: Any, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            return self._forward(model, batch, with_entropy=False).logprobs


class _WeightedMeans:
    """Means over tokens, and maxima, of what several batches report."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._sizes: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, value: float, size: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value * size
        self._sizes[name] = self._sizes.get(name, 0.0) + size

    def add_sampling_gap(self, outputs: TokenOutputs, batch: PackedBatch) -> None:
        """Compares the trainer's logprobs before the update with those of the engine."""
        places = outputs.places.cpu().numpy()
        behaviour = batch.old_logprobs[places].astype(np.float64)
        gap = outputs.logprobs.detach().double().cpu().numpy() - behaviour
        gap = gap[~np.isnan(gap)]
        if not len(gap):
            return
        name = "sampling/sampling_logp_difference"
        self.add(f"{name}/mean", float(np.abs(gap).mean()), len(gap))
        self._maxima[f"{name}/max"] = max(self._maxima.get(f"{name}/max", 0.0), float(np.abs(gap).max()))
        # The k3 estimate of the divergence of the trainer's policy from the one that sampled.
        self.add("kl", float((np.exp(gap) - gap - 1).mean()), len(gap))

    @property
    def values(self) -> dict[str, float]:
        sizes = self._sizes
        return {name: total / sizes[name] for name, total in self._sums.items() if sizes[name]} | self._maxima
