"""A sample is one training row; the export report accounts for every sampled token that no sample trains.

`prompt_ids` ends before the first sampled token. All response arrays have one length. A share is 0 where the
mask is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from branchline.core.message import Media
from branchline.core.token_arrays import Floats, Ids

MeasurementKind = Literal["raw", "processed", "unknown"]


@dataclass(frozen=True)
class RewardSpan:
    """A reward for a part of a sample: for the answer `response_ids[start:end]`, or for all of it."""

    score: float
    start: int
    end: int
    call: str = ""
    """The call whose answer is rewarded; empty if the reward is for a timeline, a tool or an agent."""
    turn: int | None = None
    tool: str = ""
    agent: str = ""
    """The sample's agent, if the reward is for that; empty if it is for another part."""
    extras: str = ""
    """What was posted with the reward, as a JSON object; empty if it has nothing else."""

    @property
    def is_timeline(self) -> bool:
        """Whether the reward is for the sample's timeline."""
        return not self.call and not self.tool and not self.agent and self.turn is None


@dataclass(frozen=True)
class LogprobMeasurement:
    """How the logprobs of an answer were measured, and how the answer was sampled. None: not recorded."""

    kind: MeasurementKind = "unknown"
    """`raw`: under the model's own distribution. `processed`: after penalties and temperature, and after
    truncation (top-p, top-k, min-p) if `is_truncated`."""
    measured_temperature: float | None = None
    """The temperature of the distribution that the logprobs are of. Not that of sampling for raw logprobs,
    and for engines that measure greedy sampling at temperature 1."""
    is_truncated: bool | None = None
    """Whether the distribution that the logprobs are of was truncated as the one sampled from."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0: all tokens; an upstream's request may have -1 for that."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    constraints: tuple[str, ...] = ()
    """Fields of the request that changed the distribution sampled from: `logit_bias`, `response_format`, …;
    `sampling` of the call has their values."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", tuple(self.constraints or ()))

    @classmethod
    def from_sampling(cls, sampling: Mapping[str, Any]) -> LogprobMeasurement:
        """Reads the `sampling` of a call; fields that it does not have are None."""
        known = {name: sampling[name] for name in _SAMPLING_FIELDS if sampling.get(name) is not None}
        kind = sampling.get("logprobs")
        return cls(kind if kind in ("raw", "processed") else "unknown", **known)


_SAMPLING_FIELDS = [field.name for field in fields(LogprobMeasurement) if field.name != "kind"]


@dataclass(frozen=True)
class AnswerSpan:
    """A trained answer of a sample, `response_ids[start:end]`: its call and its logprobs."""

    start: int
    end: int
    call: str = ""
    node: int = -1
    """The id of its node in the tree of its session; equal in all samples that have the answer."""
    logprobs: LogprobMeasurement = LogprobMeasurement()


@dataclass(frozen=True)
class Sample:
    """One timeline as a training row."""

    prompt_ids: Ids
    response_ids: Ids
    response_mask: NDArray[np.int8]
    response_logprobs: Floats
    """0 where the mask is 0; NaN for a sampled token without a logprob."""
    response_versions: NDArray[np.int32]
    shares: Floats
    """The fraction of each token's loss this sample carries; over all samples of a session they sum to 1."""
    agent: str = ""
    """The agent that sampled all answers that the sample trains."""
    session: str = ""
    calls: tuple[str, ...] = ()
    finish_reason: str = "stop"
    """Why the last output ended; `length` if it was cut off."""
    exact: bool = True
    inexact_tokens: int = 0
    """Trained tokens whose context differs from the context they were sampled in."""
    missing_logprobs: int = 0
    truncated_tokens: int = 0
    """Tokens of the timeline beyond the length limit."""
    reward: float | None = None
    """The reward of the sample's timeline, else that of its agent, else that of the session."""
    media: tuple[Media, ...] = ()
    rewards: tuple[RewardSpan, ...] = ()
    """Rewards for parts of the sample: its timeline, its agent, its answers, tools."""
    answers: tuple[AnswerSpan, ...] = ()
    """The answers that the sample trains, in order; their tokens are those whose mask is 1."""
    reward_extras: str = ""
    """The extras of the session's reward as a JSON object, with those of the agent's and of the timeline's
    reward above them; empty if there are none."""

    @property
    def trained_tokens(self) -> int:
        return int(self.response_mask.sum())

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class DropReason(StrEnum):
    """Why sampled tokens are not trained. A dropped fork cause is reported as a reason too."""

    RETRY = "retry"
    """The client sent the request again and never used this output."""
    CANCELLED = "cancelled"
    LOST = "lost"
    """The client disconnected."""
    RESUMED = "resumed"
    """Another call continued this one; the tokens are counted there."""
    INEXACT = "inexact"
    UNTRAINED = "untrained"
    """The call is not for training."""
    CAPPED = "capped"
    """The session has more samples than the policy allows."""
    OVER_LENGTH = "over_length"
    ABORTED = "aborted"
    """The session was aborted."""
    EVALUATION = "evaluation"
    """The session is for evaluation."""


@dataclass(frozen=True)
class DroppedTokens:
    """Sampled tokens of one call that no sample trains."""

    reason: str
    call: str
    tokens: int


@dataclass(frozen=True)
class ExportReport:
    """Accounts for every sampled token of a session."""

    sampled_tokens: int
    trained_tokens: int
    """Distinct sampled tokens that at least one sample trains."""
    dropped: tuple[DroppedTokens, ...] = ()
    samples: int = 0
    inexact_tokens: int = 0
    missing_logprobs: int = 0
    unassigned_rewards: int = 0
    """Rewards for a turn, an answer, an agent or a timeline that no sample trains."""
    not_applied: Mapping[str, int] = field(default_factory=dict)
    """What calls asked for and nobody did (accepted, not applied), with the number of calls."""
    unnamed_conversations: int = 0
    """Conversations under other system prompts, or begun anew, that no agent name tells from the main
    history."""

    @property
    def dropped_tokens(self) -> int:
        return sum(dropped.tokens for dropped in self.dropped)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong with the session, as sentences."""
        found: list[str] = []
        if self.unnamed_conversations:
            found.append(
                f"{self.unnamed_conversations} conversations beside the first have no agent name: under "
                "another system prompt they are taken for other agents and left out of the main history, "
                "under the same one for its continuation; name agents in the URL (/agents/NAME/v1) or in the "
                "header x-branchline-agent"
            )
        if self.not_applied:
            names = ", ".join(f"{name} ({count} calls)" for name, count in self.not_applied.items())
            found.append(f"accepted, not applied: {names}")
        return tuple(found)

    @property
    def is_balanced(self) -> bool:
        """Whether every sampled token is trained or dropped for a reason."""
        return self.sampled_tokens == self.trained_tokens + self.dropped_tokens
