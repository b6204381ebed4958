"""One generation inside the embedded engine: its ids so far, and how many of them the model has seen.

Its invariant: `ids[:filled]` have keys and values in the job's row, `ids[filled:]` are pending. A held job
loses its row and nothing else, so it goes on behind its own ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from branchline.core.token_arrays import Ids
from branchline.engines.base import FinishReason, SamplingParams

if TYPE_CHECKING:
    from branchline.engines.hf.sampling import PenaltyCounts


@dataclass(eq=False)
class Job:
    """A generation that waits or runs."""

    prompt_ids: Ids
    params: SamplingParams
    seed: int
    arrival: int = 0
    """Its place in the order of arrival."""
    length: int = 0
    num_computed_tokens: int = 0
    penalty_counts: PenaltyCounts | None = None
    """What its penalties count; made when it first samples under penalties."""
    _ids: Ids = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt_ids)
        self._ids = np.empty(self.length + self.params.max_tokens, np.int32)
        self._ids[: self.length] = self.prompt_ids

    @property
    def ids(self) -> Ids:
        """Prompt and output so far."""
        return self._ids[: self.length]

    @property
    def output_ids(self) -> Ids:
        return self._ids[len(self.prompt_ids) : self.length]

    @property
    def num_pending_tokens(self) -> int:
        return self.length - self.num_computed_tokens

    def append(self, token: int) -> None:
        self._ids[self.length] = token
        self.length += 1


class StepOutput(NamedTuple):
    """What a step gave a job: its next id, or the error that ended it."""

    job: Job
    token_id: int = -1
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def is_first(self) -> bool:
        return self.job.length == len(self.job.prompt_ids) + 1

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
