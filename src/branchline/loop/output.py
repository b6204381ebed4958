"""The output of a trajectory for a trainer: tokens of the session's tree, rewards and metrics of the loop.

The arrays are those of a sample. A template that strips earlier thinking splits a trajectory into several
samples, in which every sampled token counts once: `outputs` has all of them. The flat fields are those of the
last, and `is_complete` says whether that is the whole trajectory. The session option `history="verbatim"`
keeps a trajectory in one growing row.

Whatever limits the samples (`max_tokens`, `max_samples`, an evaluation session): every index lies in its
sample, and each sampled token is trained by a sample in `outputs` or counted in `left_out`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from branchline.core.message import Media, MediaKind
from branchline.core.sample import AnswerSpan, DroppedTokens, DropReason, Sample
from branchline.core.token_arrays import NO_IDS, Floats, Ids, as_ids
from branchline.export.samples import Export
from branchline.loop.model import Model
from branchline.loop.state import AnswerTokens, LoopState
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
    """Whether the flat fields hold all sampled tokens of the trajectory; False if any is in `left_out`."""
    partial_tokens: int
    """How many tokens at the end of the flat fields belong to an answer that was cancelled and can be
    resumed."""
    turns: tuple[AssistantTurn, ...]
    """The answers that samples train as a whole, in order."""
    missing_turns: int = 0
    """Answers of the conversation that no sample trains as a whole, for example cut off by `max_tokens`."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens of the trajectory that no sample in `outputs` trains, by the reason (DropReason)."""

    @classmethod
    def from_export(cls, state: LoopState, export: Export) -> LoopOutput:
        """The output from those of the session's samples that contain one of the trajectory's calls."""
        own, interrupted = _own_calls(state, export), _interrupted_calls(state)
        outputs = tuple([sample for sample in export.samples if not own.isdisjoint(sample.calls)])
        turns = _find_turns(state, outputs)
        left_out = _left_out_tokens(export, own)
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
            is_complete=not left_out and _trained_tokens(outputs, own) == _trained_tokens(outputs[-1:], own),
            partial_tokens=0 if last is None else _partial_tokens(last, interrupted),
            turns=turns,
            missing_turns=len(state.answers) - len(turns),
            left_out=left_out,
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
    export = await model.export(
        include_aborted=include_excluded, keep_calls=_interrupted_calls(state), policy=policy
    )
    if state.is_excluded and not include_excluded:
        export = _without_samples(export)
    return LoopOutput.from_export(state, export)


def _without_samples(export: Export) -> Export:
    """The export of an excluded trajectory, whose session need not be aborted."""
    trained: Counter[str] = Counter()
    for span in _distinct_answers(export.samples):
        trained[span.call] += span.end - span.start
    dropped = [DroppedTokens(DropReason.ABORTED, call, count) for call, count in trained.items()]
    return Export([], replace(export.report, dropped=(*export.report.dropped, *dropped)))


def _own_calls(state: LoopState, export: Export) -> set[str]:
    """The trajectory's calls by id: those that were answered, and all attempts of those that were not."""
    names = {state.call_name, *state.abandoned_calls} - {""}
    known = {call for sample in export.samples for call in sample.calls}
    known.update(dropped.call for dropped in export.report.dropped)
    return {*state.call_ids, *(call for call in known if call_name(call) in names)}


def _left_out_tokens(export: Export, own: Collection[str]) -> dict[str, int]:
    """The tokens of these calls that the report lists as dropped, by reason."""
    counts: Counter[str] = Counter()
    for dropped in export.report.dropped:
        if dropped.call in own:
            counts[str(dropped.reason)] += dropped.tokens
    return dict(counts)


def _distinct_answers(samples: Sequence[Sample]) -> list[AnswerSpan]:
    """The answers that samples train, each once."""
    return list({(span.call, span.node): span for one in samples for span in one.answers}.values())


def _trained_tokens(samples: Sequence[Sample], own: Collection[str]) -> int:
    return sum([span.end - span.start for span in _distinct_answers(samples) if span.call in own])


def _find_turns(state: LoopState, outputs: Sequence[Sample]) -> tuple[AssistantTurn, ...]:
    """The answers of the conversation, each in the first sample that trains all of its tokens."""
    turns: list[AssistantTurn] = []
    for answer in state.answers:
        for index, sample in enumerate(outputs):
            start = _find_answer(answer, sample)
            if start is not None:
                ids = np.concatenate((sample.prompt_ids, sample.response_ids))
                prompt_ids = as_ids(ids[: answer.prompt_tokens])
                turns.append(AssistantTurn(answer.call_id, prompt_ids, index, start, start + answer.tokens))
                break
    return tuple(turns)


def _find_answer(answer: AnswerTokens, sample: Sample) -> int | None:
    """Where a sample trains an answer; None if it shows the answer as context, or not all of it."""
    start = answer.prompt_tokens - len(sample.prompt_ids)
    if not answer.tokens:
        return start if answer.call_id in sample.calls and 0 <= start <= len(sample.response_ids) else None
    is_whole = any(
        (span.call, span.start, span.end) == (answer.call_id, start, start + answer.tokens)
        for span in sample.answers
    )
    return start if is_whole else None


def _interrupted_calls(state: LoopState) -> list[str]:
    """The name of the call that will be resumed, if there is one; none if the trajectory has ended."""
    return [state.call_name] if state.call_name and not state.is_finished else []


def _partial_tokens(sample: Sample, interrupted: Collection[str]) -> int:
    """The number of tokens of the interrupted answer that a sample ends with."""
    last = sample.answers[-1] if sample.answers else None
    if last is None or call_name(last.call) not in interrupted or last.end != len(sample.response_ids):
        return 0
    return last.end - last.start


def _media_by_kind(sample: Sample, state: LoopState) -> dict[MediaKind, tuple[Media, ...]]:
    """The sample's media as the state has them, with their bytes and details."""
    known = {media.digest: media for message in state.messages for media in message.media}
    found: dict[MediaKind, tuple[Media, ...]] = {}
    for media in sample.media:
        found[media.kind] = (*found.get(media.kind, ()), known.get(media.digest, media))
    return found
