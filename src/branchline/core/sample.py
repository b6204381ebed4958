"""A sample: what a trainer receives, and the account of what it does not.

`prompt_ids` ends before the first sampled token; the response arrays have one length; a share is 0 where
the mask is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from branchline.core.message import Media
from branchline.core.token_arrays import Floats, Ids


@dataclass(frozen=True)
class Sample:
    """One timeline, ready to be trained on."""

    prompt_ids: Ids
    response_ids: Ids
    response_mask: NDArray[np.int8]
    response_logprobs: Floats
    """0 where the mask is 0; NaN where a sampled token came without."""
    response_versions: NDArray[np.int32]
    shares: Floats
    """How much of each token this sample carries: over all samples of a session they sum to 1."""
    agent: str = ""
    session: str = ""
    calls: tuple[str, ...] = ()
    finish_reason: str = "stop"
    """Why the last output ended; `length` says it was cut."""
    exact: bool = True
    inexact_tokens: int = 0
    missing_logprobs: int = 0
    truncated_tokens: int = 0
    """Tokens of the timeline beyond the length cap."""
    reward: float | None = None
    media: tuple[Media, ...] = ()
    routed_experts: NDArray[np.integer] | None = None
    """One row for each response token, zeros where nothing was sampled; None where no call gave any."""

    @property
    def trained_tokens(self) -> int:
        return int(self.response_mask.sum())

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class DroppedTokens:
    """Sampled tokens that no sample trains, and why."""

    reason: str
    call: str
    tokens: int


@dataclass(frozen=True)
class ExportReport:
    """Where every sampled token of a session went."""

    sampled_tokens: int
    trained_tokens: int
    """Distinct sampled tokens that some sample trains."""
    dropped: tuple[DroppedTokens, ...] = ()
    samples: int = 0
    inexact_tokens: int = 0
    missing_logprobs: int = 0

    @property
    def dropped_tokens(self) -> int:
        return sum(dropped.tokens for dropped in self.dropped)

    @property
    def is_balanced(self) -> bool:
        """Nothing is lost silently."""
        return self.sampled_tokens == self.trained_tokens + self.dropped_tokens
