"""Merged logs against the definition, on random logs that miss and change everything.

A trained token is exact if the ids before it are the logged prompt of its call and the ids that the call had
sampled before it. Every sampled token whose prompt and ids were logged is trained once, or its call is left
out for a reason that is not about ids; of the other tokens none is trained unless `inexact` is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, export_samples, merge
from branchline.core.sample import Sample
from branchline.timelines.alignment import Permission
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.timelines.merge import MergeResult
from branchline.tree.match import match_echo
from tests.timelines.foreign_logs import STOP, TOKEN_BYTES, LogWriter

KNOWLEDGE = MergePolicy(token_bytes=TOKEN_BYTES.__getitem__, stop_ids=frozenset({STOP}))
POLICIES = {
    "default": MergePolicy(),
    "knowledge alone": KNOWLEDGE,
    "token": MergePolicy(compare="token"),
    "repair by bytes": replace(KNOWLEDGE, repair=True),
    "repair by stop token": MergePolicy(repair=True, stop_ids=frozenset({STOP})),
    "ignore tools": MergePolicy(ignore_tools=True),
    "repair and ignore tools": replace(KNOWLEDGE, repair=True, ignore_tools=True),
    "inexact": MergePolicy(inexact=True),
    "all": replace(KNOWLEDGE, repair=True, ignore_tools=True, inexact=True),
}
EXACT = ("default", "knowledge alone", "token")

seeds, counts = st.integers(0, 2**32), st.integers(1, 12)
logs = st.builds(lambda seed, count: LogWriter(Random(seed)).write(count), seeds, counts)
logs_with_ids = st.builds(
    lambda seed, count: LogWriter(Random(seed), misses_ids=False).write(count), seeds, counts
)
many = settings(max_examples=100, deadline=None)


def export(calls: Sequence[LoggedCall], policy: MergePolicy) -> list[Sample]:
    exported = export_samples(
        merge(calls, policy).tree,
        ExportPolicy(
            include_inexact=True
            if policy.inexact
            else "context"
            if policy.repair or policy.ignore_tools
            else False,
            include_missing_logprobs=True,
        ),
    )
    assert exported.report.is_balanced
    return exported.samples


def spans(sample: Sample) -> Iterator[tuple[str, list[int], list[int], float]]:
    """Yields for each trained answer its call, the ids before it, its ids and its share of their loss."""
    ids = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    first = len(sample.prompt_ids)
    covered = 0
    for answer in sample.answers:
        assert sample.response_mask[answer.start : answer.end].all()
        covered += answer.end - answer.start
        share = float(sample.shares[answer.start : answer.end].sum())
        yield answer.call, ids[: first + answer.start], ids[first + answer.start : first + answer.end], share
    assert covered == sample.trained_tokens


def logged_answers(calls: Sequence[LoggedCall]) -> dict[str, LoggedCall]:
    return {call.id: call for call in calls}


def is_cancelled(call: LoggedCall) -> bool:
    return any(output.finish_reason == "cancelled" for output in call.outputs)


@many
@given(logs)
@pytest.mark.parametrize("name", POLICIES)
def test_a_token_is_exact_if_and_only_if_its_context_was_logged_for_its_call(
    name: str, calls: list[LoggedCall]
) -> None:
    by_id = logged_answers(calls)
    for sample in export(calls, POLICIES[name]):
        inexact = 0
        for call_id, before, sampled, _ in spans(sample):
            call = by_id[call_id]
            outputs = [output.ids.tolist() for output in call.outputs if output.ids is not None]
            assert sampled in outputs
            if call.prompt_ids is None or before != call.prompt_ids.tolist():
                inexact += len(sampled)
        assert sample.inexact_tokens == inexact
        assert sample.exact == (inexact == 0)
        assert sample.exact or name not in EXACT


@many
@given(logs)
@pytest.mark.parametrize("name", POLICIES)
def test_every_logged_token_is_trained_once(name: str, calls: list[LoggedCall]) -> None:
    trained: Counter[str] = Counter()
    for sample in export(calls, POLICIES[name]):
        for call_id, _, _, share in spans(sample):
            trained[call_id] += round(share * 2520)
    for call in logged_answers(calls).values():
        logged = sum(len(output.ids) for output in call.outputs if output.ids is not None)
        if call.prompt_ids is None and not POLICIES[name].inexact:
            assert trained[call.id] == 0
        elif not is_cancelled(call):
            assert abs(trained[call.id] - 2520 * logged) < 25
        else:
            # Without a continuation, what was cut off is not trained.
            assert trained[call.id] <= 2520 * logged + 25


@many
@given(logs)
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_trains_one_agent_and_one_model(name: str, calls: list[LoggedCall]) -> None:
    by_id = logged_answers(calls)
    for sample in export(calls, POLICIES[name]):
        scopes = {(by_id[call].agent, by_id[call].model) for call, *_ in spans(sample)}
        assert len(scopes) == 1


@many
@given(logs)
@pytest.mark.parametrize("name", POLICIES)
def test_no_message_of_a_logged_prompt_is_lost_from_a_context(name: str, calls: list[LoggedCall]) -> None:
    """Whatever is put back, the text before an answer has every user message of its prompt, in order."""
    by_id = logged_answers(calls)
    for sample in export(calls, POLICIES[name]):
        for call_id, before, _, _ in spans(sample):
            call = by_id[call_id]
            if call.prompt_ids is None or POLICIES[name].inexact:
                continue
            assert _user_texts(before) == _user_texts(call.prompt_ids.tolist())
            assert before.count(25) == call.prompt_ids.tolist().count(25)


def _user_texts(ids: Sequence[int]) -> list[bytes]:
    text = b"".join(TOKEN_BYTES[token] for token in ids)
    return [part.partition(b"<end>")[0] for part in text.split(b"<user>")[1:]]


@many
@given(logs)
def test_equal_text_with_equal_ids_is_always_joined(calls: list[LoggedCall]) -> None:
    rows = [list(spans(sample)) for sample in export(calls, MergePolicy())]
    for call in calls:
        earlier = [one for one in calls if _is_continued_by(one, call) and not is_cancelled(one)]
        if not earlier or is_cancelled(call) or not any(output.ids is not None for output in call.outputs):
            continue
        depth = max(len(one.request.messages) for one in earlier)
        parents = {one.id for one in earlier if len(one.request.messages) == depth}
        for row in rows:
            names = [name for name, _, sampled, _ in row if sampled]
            if call.id in names:
                assert parents.intersection(names[: names.index(call.id)])


def _is_continued_by(one: LoggedCall, call: LoggedCall) -> bool:
    """Whether a call repeats an earlier call with an output that is not empty, as text and as ids."""
    depth = len(one.request.messages)
    if (one.agent, one.model) != (call.agent, call.model) or depth >= len(call.request.messages):
        return False
    if one.prompt_ids is None or call.prompt_ids is None:
        return False
    keys = [message.key for message in call.request.messages[:depth]]
    if keys != [message.key for message in one.request.messages]:
        return False
    for output in one.outputs:
        if output.ids is None or not len(output.ids):
            continue
        start = [*one.prompt_ids.tolist(), *output.ids.tolist()]
        shown = match_echo(output.message, call.request.messages[depth])
        if shown is not None and call.prompt_ids.tolist()[: len(start)] == start:
            return True
    return False


@many
@given(logs, st.randoms(use_true_random=False))
def test_the_rows_do_not_depend_on_the_order_of_the_log(calls: list[LoggedCall], random: Random) -> None:
    # Which of two equal outputs that were cut off is the one that was continued, only the order tells.
    calls = [_as_complete(call) for call in calls]
    lines = [call.line for call in calls]
    random.shuffle(lines)
    shuffled = [replace(call, line=line) for call, line in zip(calls, lines, strict=True)]
    rows, others = ([_row(sample) for sample in export(order, MergePolicy())] for order in (calls, shuffled))
    assert Counter(rows) == Counter(others)


def _as_complete(call: LoggedCall) -> LoggedCall:
    outputs = tuple(replace(output, finish_reason="stop") for output in call.outputs)
    return replace(call, outputs=outputs)


def _row(sample: Sample) -> tuple[bytes, bytes, bytes]:
    return sample.prompt_ids.tobytes(), sample.response_ids.tobytes(), sample.response_mask.tobytes()


@many
@given(logs_with_ids)
def test_the_named_permissions_join_what_was_kept_apart(calls: list[LoggedCall]) -> None:
    merged = merge(calls, KNOWLEDGE)
    depths = _link_depths(merged)
    for apart in merged.kept_apart:
        policy = replace(
            KNOWLEDGE,
            repair=Permission.REPAIR in apart.missing,
            ignore_tools=Permission.IGNORE_TOOLS in apart.missing,
            inexact=Permission.INEXACT in apart.missing,
        )
        assert _link_depths(merge(calls, policy))[apart.line] > depths[apart.line]


def _link_depths(merged: MergeResult) -> dict[int, int]:
    pairs = zip(merged.calls, merged.links, strict=True)
    return {call.line: 0 if link is None else link.depth for call, link in pairs}


@many
@given(logs)
def test_a_call_that_was_logged_twice_is_trained_once(calls: list[LoggedCall]) -> None:
    copies = [replace(call, line=call.line + len(calls)) for call in calls]
    assert Counter(map(_row, export([*calls, *copies], MergePolicy()))) == Counter(
        map(_row, export(calls, MergePolicy()))
    )


@many
@given(logs)
@pytest.mark.parametrize("by_text", [False, True])
def test_of_equal_answers_to_equal_prompts_one_is_kept(by_text: bool, calls: list[LoggedCall]) -> None:
    merged = merge(calls, MergePolicy(deduplicate=True, inexact=by_text))
    left_out = set(merged.duplicates)

    def identity(call: LoggedCall, output: LoggedOutput) -> tuple[object, ...]:
        text = (output.message.key, output.message.content, output.message.reasoning_content)
        request = call.request
        found = (call.agent, call.model, request.message_keys, request.prompt_config_digest, text)
        if by_text:
            return found
        ids = [None if one is None else one.tobytes() for one in (call.prompt_ids, output.ids)]
        return (*found, *ids)

    kept: set[object] = set()
    lost: set[object] = set()
    for index, call in enumerate(merged.calls):
        for choice, output in enumerate(call.outputs):
            (lost if (index, choice) in left_out else kept).add(identity(call, output))
    assert lost <= kept
    sampled = sum(node.end - node.sampled_start for node in merged.tree.nodes if node.is_sampled)
    assert sampled == sum(
        len(output.ids)
        for index, call in enumerate(merged.calls)
        for choice, output in enumerate(call.outputs)
        if output.ids is not None and (index, choice) not in left_out
    )
