"""The responses of a log, each of which may be in several lines: whole, choice by choice, or both.

An answer is known by the id of its response and its index. Lines with the same prompt and the same answer are
copies of it, unless one contradicts the other; what one copy lacks (ids, logprobs, the finish reason, the
reasoning) comes from the others. The ids of the prompt are those of the response, so any of its lines tells
them. So every answer is one output, whatever the order of the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from branchline.core.token_arrays import Floats, Ids
from branchline.timelines.log import LoggedCall, LoggedOutput

Place = tuple[int, int]
"""(call, output) in a log."""
_MAX_COMPARED = 16
"""Copies that contradict each other and are compared; without a limit, a log whose responses all have one id
takes quadratic time."""


# -- copies --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """The calls of a log with every answer once."""

    calls: list[LoggedCall]
    left_out: list[LoggedCall]
    """Calls with the outputs that another line has too."""
    contradicting: list[int]
    """Lines with another answer than an earlier line has under the same response id and index, or with the
    same ids for another request (agent, tools, messages, model)."""


@dataclass(frozen=True)
class _Answer:
    prompt_ids: Ids | None
    output: LoggedOutput

    @property
    def facts(self) -> tuple[object, ...]:
        """Equal for copies that say the same."""
        output = self.output
        return (
            _to_bytes(self.prompt_ids),
            _to_bytes(output.ids),
            _to_bytes(output.logprobs),
            output.finish_reason,
            output.message.reasoning_content,
        )


def unknown_facts(prompt_ids: Ids | None, output: LoggedOutput) -> tuple[bool, ...]:
    """Returns what is not known of an answer, the most important first: a key by which answers of which more
    is known sort first."""
    return (
        output.is_cut,
        output.ids is None,
        prompt_ids is None,
        output.logprobs is None,
        not output.message.reasoning_content,
    )


def join_copies(calls: Iterable[LoggedCall]) -> Copies:
    """Returns the calls in the order of their lines, each answer in the line that knows most of it. A call of
    which some choices were cut off and others not becomes two: those are delivered, these are not."""
    # Sorted, because the earlier line wins if nothing else decides.
    calls = _with_known_prompts(sorted(calls, key=lambda call: call.line))
    answers = {
        (number, choice): _Answer(call.prompt_ids, output)
        for number, call in enumerate(calls)
        for choice, output in enumerate(call.outputs)
    }
    same_index: dict[object, list[Place]] = {}
    same_text: dict[object, list[Place]] = {}
    for place, answer in answers.items():
        call = calls[place[0]]
        if call.id:
            key = call.response_key, answer.output.index
            same_index.setdefault(key, []).append(place)
            same_text.setdefault((*key, *_shown(answer.output)), []).append(place)
    left_out: set[Place] = set()
    for places in same_text.values():
        if len(places) > 1:
            left_out.update(_join(places, answers))
    contradicting: set[int] = set()
    same_ids: dict[object, list[Place]] = {}
    for place, answer in answers.items():
        if calls[place[0]].id and answer.prompt_ids is not None and answer.output.ids is not None:
            ids = _to_bytes(answer.prompt_ids), _to_bytes(answer.output.ids)
            same_ids.setdefault((calls[place[0]].id, answer.output.index, ids), []).append(place)
    for places in (*same_index.values(), *same_ids.values()):
        lines = {calls[place[0]].line for place in places if place not in left_out}
        contradicting.update(sorted(lines)[1:])
    kept: list[LoggedCall] = []
    repeated: list[LoggedCall] = []
    for number, call in enumerate(calls):
        parts: dict[tuple[bool, bool, int], list[_Answer]] = {}
        for choice in range(len(call.outputs)):
            answer, is_copy = answers[number, choice], (number, choice) in left_out
            part = (is_copy, not is_copy and answer.output.is_cut, id(answer.prompt_ids))
            parts.setdefault(part, []).append(answer)
        for (is_copy, *_), part_answers in parts.items():
            outputs = tuple(answer.output for answer in part_answers)
            group = repeated if is_copy else kept
            group.append(replace(call, prompt_ids=part_answers[0].prompt_ids, outputs=outputs))
    return Copies(kept, repeated, sorted(contradicting))


def _with_known_prompts(calls: Sequence[LoggedCall]) -> list[LoggedCall]:
    """Returns the calls with the prompt ids that another line of their response has, unless its lines have
    different ones."""
    prompts: dict[object, dict[bytes, Ids]] = {}
    for call in calls:
        if call.id and call.prompt_ids is not None:
            prompts.setdefault(call.response_key, {}).setdefault(call.prompt_ids.tobytes(), call.prompt_ids)

    def with_prompt(call: LoggedCall) -> LoggedCall:
        known = prompts.get(call.response_key, {}) if call.id and call.prompt_ids is None else {}
        return replace(call, prompt_ids=next(iter(known.values()))) if len(known) == 1 else call

    return [with_prompt(call) for call in calls]


def _join(places: Sequence[Place], answers: dict[Place, _Answer]) -> set[Place]:
    """Joins copies, those of which most is known first; returns the places of those that are left out.
    Outputs of one line are no copies of each other, whatever their indices are."""
    left_out: set[Place] = set()
    kept: dict[tuple[object, ...], Place] = {}

    def order(place: Place) -> tuple[object, ...]:
        return *unknown_facts(answers[place].prompt_ids, answers[place].output), place

    for place in sorted(places, key=order):
        answer = answers[place]
        same = kept.get(answer.facts)
        candidates = kept.values() if same is None else (same,)
        for other in list(islice(candidates, _MAX_COMPARED)):
            joined = _join_two(answers[other], answer) if other[0] != place[0] else None
            if joined is not None:
                answers[other] = joined
                left_out.add(place)
                break
        else:
            kept[answer.facts] = place
    return left_out


def _join_two(one: _Answer, other: _Answer) -> _Answer | None:
    """Returns all that is known of an answer; None if two copies with equal texts contradict each other."""
    first, second = one.output, other.output
    reasons = {output.message.reasoning_content for output in (first, second)} - {""}
    if (not first.is_cut and not second.is_cut and first.finish_reason != second.finish_reason) or len(
        reasons
    ) > 1:
        return None
    if not all(
        mine is None or theirs is None or np.array_equal(mine, theirs)
        for mine, theirs in ((one.prompt_ids, other.prompt_ids), (first.ids, second.ids))
    ):
        return None
    ids = second.ids if first.ids is None else first.ids
    logprobs = first.logprobs
    if logprobs is None or second.logprobs is None:
        logprobs = second.logprobs if logprobs is None else logprobs
    else:
        if len(logprobs) != len(second.logprobs):
            return None
        both = ~(np.isnan(logprobs) | np.isnan(second.logprobs))
        if not np.array_equal(logprobs[both], second.logprobs[both]):
            return None
        logprobs = np.where(np.isnan(logprobs), second.logprobs, logprobs)
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        return None
    output = replace(
        first if first.ids is not None else second,
        message=first.message if first.message.reasoning_content else second.message,
        logprobs=logprobs,
        token_texts=first.token_texts or second.token_texts,
        finish_reason=(second if first.is_cut else first).finish_reason,
    )
    return _Answer(other.prompt_ids if one.prompt_ids is None else one.prompt_ids, output)


def _shown(output: LoggedOutput) -> tuple[bytes, str]:
    """The text and the calls of an answer, however they were written as JSON."""
    return output.message.key, output.message.content


def _to_bytes(values: Ids | Floats | None) -> bytes | None:
    return None if values is None else values.tobytes()
