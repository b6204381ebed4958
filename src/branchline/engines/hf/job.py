"""One generation inside the embedded engine: its ids so far, and how many of them are computed.

Invariant: `ids[:num_computed_tokens]` have keys and values in the job's row, the rest is pending. A preempted
job loses its row and nothing else, so it continues after its own ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchline.core.token_arrays import Ids
from branchline.engines.base import FinishReason, SamplingParams
from branchline.engines.hf.vision import PromptImage, prefix_keys


class PenaltyCounts:
    """What penalties count: output ids for presence and frequency, prompt ids as well for repetition."""

    def __init__(self, prompt_ids: Ids, output_ids: Ids, vocab: int, device: torch.device) -> None:
        counts = np.bincount(output_ids, minlength=vocab)[:vocab]
        seen = (counts > 0) | (np.bincount(prompt_ids, minlength=vocab)[:vocab] > 0)
        self._counts = torch.from_numpy(counts.astype(np.float32)).to(device)
        self._seen = torch.from_numpy(seen).to(device)

    def add(self, token: int) -> None:
        self._counts[token] += 1
        self._seen[token] = True

    def apply(self, logits_v: Tensor, params: SamplingParams) -> Tensor:
        factor = torch.where(logits_v > 0, 1 / params.repetition_penalty, params.repetition_penalty)
        scores_v = torch.where(self._seen, logits_v * factor, logits_v)
        scores_v = scores_v - params.frequency_penalty * self._counts
        return scores_v - params.presence_penalty * (self._counts > 0)


@dataclass(eq=False)
class Job:
    """A waiting or running generation."""

    prompt_ids: Ids
    params: SamplingParams
    seed: int
    images: tuple[PromptImage, ...] = ()
    rope_positions: NDArray[np.int64] | None = None
    """The positions of the prompt for a model with three axes: [3, tokens]; None for other models."""
    arrival: int = 0
    """Its number in order of arrival."""
    length: int = 0
    num_computed_tokens: int = 0
    num_preempted: int = 0
    penalty_counts: PenaltyCounts | None = None
    """Created when it first samples with penalties."""
    _ids: Ids = field(init=False, repr=False)
    _keys: NDArray[np.integer[Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt_ids)
        self._ids = np.empty(self.length + self.params.max_tokens, np.int32)
        self._ids[: self.length] = self.prompt_ids
        # Without images, ids are compared as they are.
        self._keys = self._ids
        if self.images:
            self._keys = np.zeros(len(self._ids), np.int64)
            self._keys[: self.length] = prefix_keys(self.prompt_ids, self.images)

    @property
    def ids(self) -> Ids:
        """Prompt and output so far."""
        return self._ids[: self.length]

    @property
    def prefix_keys(self) -> NDArray[np.integer[Any]]:
        """One number per id; two jobs have equal keys and values as far as these are equal."""
        return self._keys[: self.length]

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """The positions of ids: [3, tokens]. An output continues after the highest position of the prompt."""
        prompt = self.rope_positions
        assert prompt is not None
        size = prompt.shape[1]
        following = np.arange(max(start, size), max(end, size)) - size + int(prompt.max(initial=-1)) + 1
        return np.concatenate((prompt[:, start:end], np.broadcast_to(following, (3, len(following)))), axis=1)

    @property
    def output_ids(self) -> Ids:
        return self._ids[len(self.prompt_ids) : self.length]

    @property
    def num_pending_tokens(self) -> int:
        return self.length - self.num_computed_tokens

    def append(self, token: int) -> None:
        self._ids[self.length] = self._keys[self.length] = token
        self.length += 1


class StepOutput(NamedTuple):
    """The result of a step for one job: its next id, or the error that ended it."""

    job: Job
    token_id: int = -1
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
