"""The output of a trajectory for a trainer: tokens of the session's tree, rewards and metrics of the loop.

The arrays are those of a sample. A template that strips earlier thinking splits a trajectory into several
samples, in which every sampled token counts once: `outputs` has all of them. The flat fields are those of the
last, and `is_complete` says whether that is the whole trajectory. The session option `history="verbatim"`
keeps a trajectory in one growing row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchline.core.message import Media, MediaKind
from branchline.core.sample import Sample
from branchline.core.token_arrays import NO_IDS, Floats, Ids, as_ids
from branchline.loop.model import Model
from branchline.loop.state import LoopState
from branchline.runtime.call_record import call_name


@dataclass(frozen=True)
class OutputMetrics:
    """Seconds in the model and in tools, interrupted generations, and a context that became too long."""

    generate_sequences: float
    tool_calls: float
    num_preempted: int
    """Generations that the engine interrupted and continued."""
    num_cancelled: int
    context_length_exceeded: bool = False
    """Whether the trajectory ended because its prompt left no room for an answer."""


@dataclass(frozen=True)
class AssistantTurn:
    """One answer of a trajectory, as it was sampled and where it is trained."""

    call_id: str
    prompt_ids: Ids
    """Exactly what the model was shown."""
    sample_index: int
    """The sample in `outputs` that trains the answer; the first of them if several do."""
    start: int
    """The answer is `response_ids[start:end]` of that sample."""
    end: int


@dataclass(frozen=True)
class LoopOutput:
    """One trajectory for a trainer."""

    prompt_ids: Ids
    response_ids: Ids
    response_mask: NDArray[np.int8]
    """1 for sampled tokens, 0 for context."""
    response_logprobs: Floats
    reward_score: float | None
    num_turns: int
    metrics: OutputMetrics
    extra_fields: Mapping[str, Any]
    """`turn_scores`, `tool_rewards`, `final_rewards`, `faults` as texts, `is_cancel`, and the `state` to
    resume from. `reward_score` is None if a fault says that a reward could not be computed."""
    multi_modal_data: Mapping[MediaKind, tuple[Media, ...]]
    """Media by kind, in the order of the last sample."""
    outputs: tuple[Sample, ...]
    """All samples of the trajectory. A trainer that reads only the flat fields misses tokens unless
    `is_complete`."""
    is_complete: bool
    """Whether the flat fields hold all sampled tokens of the trajectory."""
    partial_tokens: int
    """How many tokens at the end of the flat fields belong to an answer that was cancelled and can be
    resumed."""
    turns: tuple[AssistantTurn, ...]
    """The answers that samples train, in order."""

    @classmethod
    def from_samples(cls, state: LoopState, samples: Sequence[Sample]) -> LoopOutput:
        """The output from those of the session's samples that contain one of the trajectory's calls."""
        own, interrupted = set(state.call_ids), _interrupted_calls(state)
        outputs = tuple(
            sample
            for sample in samples
            if not own.isdisjoint(sample.calls)
            or any(call_name(call_id) in interrupted for call_id in sample.calls)
        )
        last = outputs[-1] if outputs else None
        return cls(
            prompt_ids=NO_IDS if last is None else last.prompt_ids,
            response_ids=NO_IDS if last is None else last.response_ids,
            response_mask=np.zeros(0, np.int8) if last is None else last.response_mask,
            response_logprobs=np.zeros(0, np.float32) if last is None else last.response_logprobs,
            reward_score=state.reward_score,
            num_turns=state.num_turns,
            metrics=OutputMetrics(
                state.metrics.generate_s,
                state.metrics.tool_s,
                state.metrics.num_preempted,
                state.metrics.num_cancelled,
                state.metrics.context_length_exceeded,
            ),
            extra_fields={
                "turn_scores": state.turn_scores,
                "tool_rewards": state.tool_rewards,
                "final_rewards": dict(state.final_rewards),
                "faults": [str(fault) for fault in state.faults],
                "is_cancel": state.is_cancelled,
                "state": state,
            },
            multi_modal_data={} if last is None else _media_by_kind(last, state),
            outputs=outputs,
            is_complete=len(outputs) <= 1,
            partial_tokens=0
            if last is None or last.finish_reason != "cancelled"
            else _last_answer_tokens(last),
            turns=_find_turns(state, outputs),
        )


async def build_output(
    state: LoopState,
    model: Model,
    *,
    include_excluded: bool = False,
    policy: Mapping[str, Any] | None = None,
) -> LoopOutput:
    """The output of a trajectory so far; it may be cancelled or unfinished. The tokens of a cancelled answer
    are included and counted in `partial_tokens`.

    A trajectory that a failure outside the model ended has no samples unless `include_excluded` is set.
    `policy` has fields of ExportPolicy, for example `{"max_samples": 4, "keep": "random"}`.
    """
    if state.is_excluded and not include_excluded:
        return LoopOutput.from_samples(state, ())
    interrupted = _interrupted_calls(state)
    samples = await model.samples(include_aborted=include_excluded, keep_calls=interrupted, policy=policy)
    return LoopOutput.from_samples(state, samples)


def _find_turns(state: LoopState, outputs: Sequence[Sample]) -> tuple[AssistantTurn, ...]:
    turns: list[AssistantTurn] = []
    for answer in state.answers:
        for index, sample in enumerate(outputs):
            start = answer.prompt_tokens - len(sample.prompt_ids)
            end = start + answer.tokens
            # A sample that has the call but does not train it shows its tokens as context.
            if answer.call_id in sample.calls and start >= 0 and sample.response_mask[start:end].all():
                ids = np.concatenate((sample.prompt_ids, sample.response_ids))
                prompt_ids = as_ids(ids[: answer.prompt_tokens])
                turns.append(AssistantTurn(answer.call_id, prompt_ids, index, start, end))
                break
    return tuple(turns)


def _interrupted_calls(state: LoopState) -> list[str]:
    """The name of the call that will be resumed, if there is one; none if the trajectory has ended."""
    return [state.call_name] if state.call_name and not state.is_finished else []


def _last_answer_tokens(sample: Sample) -> int:
    """The number of tokens of the answer that a sample ends with; before it comes context."""
    context = np.flatnonzero(sample.response_mask == 0)
    return len(sample.response_ids) - (int(context[-1]) + 1 if len(context) else 0)


def _media_by_kind(sample: Sample, state: LoopState) -> dict[MediaKind, tuple[Media, ...]]:
    """The sample's media as the state has them, with their bytes and details."""
    known = {media.digest: media for message in state.messages for media in message.media}
    found: dict[MediaKind, tuple[Media, ...]] = {}
    for media in sample.media:
        found[media.kind] = (*found.get(media.kind, ()), known.get(media.digest, media))
    return found
