"""One update of the policy: training rows in, new weights and metrics out. No asyncio, no gateway.

PPO's ratio is that of the trainer's own log-probabilities at the start of the step (`proximal`). The engine's
log-probabilities only give the truncated importance weight of each token, whatever version sampled it.

An update is applied whole or not at all: a loss or a gradient that is not a finite number, or any other fault
before the optimizer's step, leaves the weights as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from branchline.core.errors import BranchlineError, InputError
from branchline.export.packing import PackedBatch, TrainingRow, pack_rows
from branchline.train.config import UpdateConfig as UpdateConfig
from branchline.train.layouts import prepare_model
from branchline.train.losses import k3_divergence
from branchline.train.packed_forward import TokenOutputs, forward_packed, forward_row
from branchline.train.policy_loss import WeightedSum, policy_loss

_GAP = "sampling/sampling_logp_difference"


class PolicyUpdater:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: UpdateConfig, reference: Any = None) -> None:
        """`reference` is the model that a KL term keeps the policy close to."""
        if config.loss.reference_kl_coefficient and reference is None:
            raise InputError("reference_kl_coefficient: needs a reference model")
        self.model = model.eval()  # Dropout would make the trainer's logprobs differ from the engine's.
        self.config = config
        self.layout = prepare_model(model, config.layout)
        """Whether rows are computed as packed trees, or one by one."""
        self._reference = None if reference is None else reference.eval()
        if reference is not None and self.layout == "tree":
            reference.set_attn_implementation(model.config._attn_implementation)
        # The fused optimizer needs no memory while it changes weights, so that it cannot run out of it.
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=next(model.parameters()).is_cuda,
        )
        self.is_whole = True
        """False if a fault inside the optimizer's step has left some weights changed and others not."""

    def update(
        self, rows: Sequence[TrainingRow], progress: float = 0.0, *, divisor: float | None = None
    ) -> dict[str, float]:
        """Updates the weights; returns metrics under TRL's names, as means over the trained tokens.

        `progress` is the completed fraction of the run, for the schedule of the learning rate. The loss is
        Σ weight × token loss / `divisor`, by default the sum of the weights. Rows whose advantages are all 0
        change the weights only through a KL or entropy term; without one they are left out of the forward
        pass, and so of the mean entropy, but not of the mean that the loss is. Rows without any weight are
        left out of both. Raises BranchlineError and
        changes nothing if the loss or its gradient is not a finite number.
        """
        rate = self.config.learning_rate * (1 - progress if self.config.schedule == "linear" else 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = float(sum(row.weights.sum(dtype=np.float64) for row in rows))
        normalizer = (total if divisor is None else divisor) or 1.0
        every_weight_counts = (
            self.config.loss.reference_kl_coefficient or self.config.loss.entropy_coefficient
        )
        computed = [
            row
            for row in rows
            if (row.weights if every_weight_counts else row.weights * row.advantages).any()
        ]
        batches = self._pack(computed)
        if not batches:
            return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate}
        references = [self._logprobs(self._reference, batch) for batch in batches if self._reference]
        proximal = [self._logprobs(self.model, batch) for batch in batches if self.config.passes > 1]
        # A later pass may fail after an earlier one has changed the weights.
        before = _Snapshot(self.model, self.optimizer) if self.config.passes > 1 else None
        sampling = _SamplingGap()
        try:
            for number in range(self.config.passes):
                means = _TokenMeans()
                loss = self._add_gradients(
                    batches, normalizer, references, proximal, means, sampling if number == 0 else None
                )
                grad_norm = self._clip_gradients(loss)
                self._step()
        except BaseException:
            self.optimizer.zero_grad()  # Their memory may be what a checkpoint needs.
            if before is not None:
                before.restore()
                self.is_whole = True
            raise
        means.add_weight("clip_ratio", self._clip_weight(rows) - self._clip_weight(computed))
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            **sampling.values,
            **means.values,
            "tree_reuse": sum(batch.path_tokens for batch in batches) / sum(map(len, batches)),
            "long_rows": float(self._count_long(rows)),
        }

    def _pack(self, rows: Sequence[TrainingRow]) -> list[PackedBatch]:
        if self.layout == "rows":
            return [batch for row in rows for batch in pack_rows([row])]
        return pack_rows(
            rows, self.config.max_batch_tokens, share_partial_answers=self.config.loss.name != "gspo"
        )

    def _count_long(self, rows: Sequence[TrainingRow]) -> int:
        limit = self.config.max_batch_tokens
        return 0 if limit is None else sum(len(row) > limit for row in rows)

    def _add_gradients(
        self,
        batches: Sequence[PackedBatch],
        normalizer: float,
        references: Sequence[Tensor],
        proximal: Sequence[Tensor],
        means: _TokenMeans,
        sampling: _SamplingGap | None,
    ) -> float:
        """Adds up the gradients of all batches; returns the loss."""
        loss = 0.0
        self.optimizer.zero_grad()
        for index, batch in enumerate(batches):
            outputs = self._forward(self.model, batch, with_entropy=True)
            result = policy_loss(
                outputs,
                batch,
                self.config.loss,
                normalizer=normalizer,
                old_logprobs=proximal[index] if proximal else None,
                reference_logprobs=references[index] if references else None,
            )
            batch_loss: Any = result.loss
            if not np.isfinite(value := batch_loss.item()):
                raise BranchlineError(
                    f"loss: got {value} in batch {index + 1} of {len(batches)}, expected a finite number: "
                    "the step is refused and no weight has changed"
                )
            batch_loss.backward()
            loss += value
            means.add(result.sums)
            if sampling is not None:
                sampling.add(outputs, batch)
        return loss

    def _clip_gradients(self, loss: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if not np.isfinite(norm):
            raise BranchlineError(
                f"grad_norm: got {norm} for a loss of {loss:g}, expected a finite number: the step is "
                "refused and no weight has changed"
            )
        return norm

    def _step(self) -> None:
        self.is_whole = False
        self.optimizer.step()
        self.is_whole = True

    def _clip_weight(self, rows: Iterable[TrainingRow]) -> float:
        """Returns what the clip ratios of these rows are divided by: their shares, or for a loss with one
        ratio for each answer those of their answers."""
        if self.config.loss.name == "gspo":
            return float(
                sum(row.sample.shares[start:end].mean() for row in rows for start, end in row.answer_spans())
            )
        return float(sum(row.sample.shares[row.weights != 0].sum(dtype=np.float64) for row in rows))

    def _forward(self, model: Any, batch: PackedBatch, *, with_entropy: bool) -> TokenOutputs:
        forward = forward_packed if self.layout == "tree" else forward_row
        return forward(model, batch, temperature=self.config.temperature, with_entropy=with_entropy)

    def _logprobs(self, model: Any, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            return self._forward(model, batch, with_entropy=False).logprobs


class _Snapshot:
    """Weights and optimizer before an update, in the memory of the host."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        saved = optimizer.state_dict()
        states = {
            index: {name: value.cpu().clone() for name, value in state.items()}
            for index, state in saved["state"].items()
        }
        self._state = {"state": states, "param_groups": deepcopy(saved["param_groups"])}

    def restore(self) -> None:
        self._model.load_state_dict(self._weights)
        self._optimizer.load_state_dict(self._state)


class _TokenMeans:
    """Means over the trained tokens of a step, in whatever batches they were computed."""

    def __init__(self) -> None:
        self._sums: dict[str, WeightedSum] = {}

    def add(self, sums: Mapping[str, WeightedSum]) -> None:
        for name, (total, weight) in sums.items():
            before = self._sums.get(name, WeightedSum(0.0, 0.0))
            self._sums[name] = WeightedSum(before.total + total, before.weight + weight)

    def add_weight(self, name_part: str, weight: float) -> None:
        """Adds tokens whose value is 0 to the means with `name_part` in their names."""
        self.add({name: WeightedSum(0.0, weight) for name in self._sums if name_part in name})

    @property
    def values(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}


class _SamplingGap:
    """Compares the trainer's logprobs before the update with those of the engine, where it gave some."""

    def __init__(self) -> None:
        self._means = _TokenMeans()
        self._largest = 0.0

    def add(self, outputs: TokenOutputs, batch: PackedBatch) -> None:
        places = outputs.places.cpu().numpy()
        behaviour = torch.from_numpy(batch.old_logprobs[places]).double()
        own, shares = outputs.logprobs.detach().double().cpu(), torch.from_numpy(batch.shares[places])
        is_known = ~torch.isnan(behaviour)
        behaviour, own, shares = behaviour[is_known], own[is_known], shares[is_known]
        if not len(shares):
            return
        gap, weight = (own - behaviour).abs(), shares.sum().item()
        # The tokens are those of the policy that sampled, so this is its divergence from the trainer's.
        divergence = k3_divergence(behaviour, own)
        self._means.add(
            {
                f"{_GAP}/mean": WeightedSum((shares * gap).sum().item(), weight),
                "kl/sampler": WeightedSum((shares * divergence).sum().item(), weight),
            }
        )
        self._largest = max(self._largest, gap.max().item())

    @property
    def values(self) -> dict[str, float]:
        means = self._means.values
        return {**means, f"{_GAP}/max": self._largest} if means else {}
