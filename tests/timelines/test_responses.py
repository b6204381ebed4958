"""A response may be in several lines of a log, each of which may know other things of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import ExportPolicy, MergePolicy, export_samples, merge
from branchline.core.call import Request
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.timelines.responses import join_copies

REQUEST = Request((Message("user", "q"),))
PROMPT = as_ids([1, 2, 3])


def answer(index: int, *, finish: str = "stop", logprob: float = -0.5) -> LoggedOutput:
    ids = as_ids([4, 10 + index])
    return LoggedOutput(
        Message("assistant", f"answer {index}", reasoning_content="hm"),
        ids,
        np.array([logprob, -0.25], np.float32),
        finish,
        index=index,
    )


def call(line: int, *outputs: LoggedOutput, name: str = "r") -> LoggedCall:
    return LoggedCall(REQUEST, outputs, PROMPT, line=line, id=name)


def forget(random: Random, output: LoggedOutput) -> LoggedOutput:
    """The answer without some of what is known of it."""
    if random.random() < 0.3:
        output = replace(output, ids=None)
    if random.random() < 0.3:
        output = replace(output, logprobs=None)
    if output.logprobs is not None and random.random() < 0.3:
        output = replace(output, logprobs=np.where([False, True], np.float32(np.nan), output.logprobs))
    if random.random() < 0.3:
        output = replace(output, finish_reason="cancelled")
    if random.random() < 0.3:
        output = replace(output, message=Message("assistant", output.message.content))
    return output


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 5))
def test_every_answer_is_trained_once_with_all_that_its_lines_tell(
    seed: int, choices: int, more: int
) -> None:
    random = Random(seed)
    answers = [answer(index) for index in range(choices)]
    whole = [call(0, *answers)] if random.random() < 0.5 else [call(0, output) for output in answers]
    parts = [random.sample(answers, random.randint(1, choices)) for _ in range(more)]
    copies = [call(0, *(forget(random, output) for output in part)) for part in parts]
    copies = [replace(copy, prompt_ids=random.choice([PROMPT, None])) for copy in copies]
    log = [*whole, *copies]
    random.shuffle(log)
    log = [replace(one, line=line) for line, one in enumerate(log, start=1)]
    export = export_samples(merge(log).tree)
    assert export.report.is_balanced
    assert sorted(sample.response_ids.tolist() for sample in export.samples) == [
        [4, 10 + index] for index in range(choices)
    ]
    for sample in export.samples:
        assert sample.response_logprobs.tolist() == [-0.5, -0.25]
        assert (sample.exact, sample.finish_reason) == (True, "stop")
    assert export.report.sampled_tokens == 2 * choices
    joined = join_copies(log)
    assert joined.contradicting == []
    count = sum(len(one.outputs) for one in [*joined.calls, *joined.left_out])
    assert count == sum(len(one.outputs) for one in log)


def test_what_no_line_tells_alone_is_put_together() -> None:
    whole = answer(0)
    ids_only = replace(whole, logprobs=None, finish_reason="cancelled")
    logprobs_only = replace(whole, ids=None, message=Message("assistant", "answer 0"))
    log = [replace(call(1, ids_only), prompt_ids=None), call(2, logprobs_only)]
    for order in (log, log[::-1]):
        (sample,) = export_samples(merge(order).tree).samples
        assert sample.prompt_ids.tolist() == PROMPT.tolist()
        assert sample.response_logprobs.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("reason", ["cancelled", "abort", "error"])
def test_the_finish_reason_of_a_choice_is_that_choices_alone(reason: str) -> None:
    whole = call(1, answer(0, finish=reason), answer(1))
    export = export_samples(merge([whole]).tree)
    assert [sample.response_ids.tolist() for sample in export.samples] == [[4, 11]]
    assert [(entry.reason, entry.tokens) for entry in export.report.dropped] == [("cancelled", 2)]
    # A call that continues the other choice says nothing of this one.
    request = Request((Message("user", "q"), Message("assistant", "answer 1"), Message("user", "z")))
    later = LoggedCall(
        request,
        (LoggedOutput(Message("assistant", "end"), as_ids([8])),),
        as_ids([1, 2, 3, 4, 11, 7]),
        line=2,
    )
    export = export_samples(merge([whole, later]).tree, ExportPolicy(include_missing_logprobs=True))
    (sample,) = export.samples
    assert sample.response_ids.tolist() == [4, 11, 7, 8]
    assert [(entry.reason, entry.tokens) for entry in export.report.dropped] == [("cancelled", 2)]


@pytest.mark.parametrize(
    "other",
    [
        answer(0, logprob=-0.9),
        answer(0, finish="length"),
        replace(answer(0), ids=as_ids([4, 5])),
        replace(answer(0), message=Message("assistant", "other")),
        replace(answer(0), message=Message("assistant", "answer 0", reasoning_content="other")),
    ],
)
def test_answers_that_contradict_each_other_stay_apart_and_are_counted(other: LoggedOutput) -> None:
    merged = merge([call(1, answer(0)), call(2, other), call(3, answer(0))])
    assert merged.contradicting == [2]
    assert [repeated.line for repeated in merged.repeated] == [3]
    assert len(export_samples(merged.tree).samples) == 2


def test_an_answer_whose_lines_have_other_requests_is_counted() -> None:
    one = call(1, answer(0))
    agent = replace(one, request=replace(one.request, agent="p"), line=2)
    messages = (Message("user", "logged otherwise"),)
    conversation = replace(one, request=replace(one.request, messages=messages), line=3)
    assert merge([one, agent, conversation]).contradicting == [2, 3]


def test_the_ids_of_a_prompt_are_those_of_all_choices_of_its_response() -> None:
    whole = replace(call(1, answer(0), answer(1)), prompt_ids=None)
    for order in ([whole, call(2, answer(1))], [call(0, answer(1)), whole]):
        export = export_samples(merge(order).tree)
        assert sorted(sample.response_ids.tolist() for sample in export.samples) == [[4, 10], [4, 11]]
        assert export.report.dropped == ()
    # Where the lines of a response have different ones, none of them is chosen.
    others = [replace(call(line, answer(line)), prompt_ids=as_ids([1, line])) for line in (2, 3)]
    export = export_samples(merge([whole, *others]).tree)
    assert [(entry.reason, entry.tokens) for entry in export.report.dropped] == [("inexact", 2)] * 2
    elsewhere = replace(whole, id="another")
    export = export_samples(merge([elsewhere, call(2, answer(1))]).tree)
    assert len(export.samples) == 1


@pytest.mark.parametrize("drifted", [True, False])
@pytest.mark.parametrize("finished", [True, False])
def test_an_answer_that_was_cut_off_is_not_trained_because_a_call_repeats_its_text(
    drifted: bool, finished: bool
) -> None:
    """The client repeats the answer that it got; that is the finished one of two equal answers."""
    request = Request((Message("user", "q"), Message("assistant", "answer 0"), Message("user", "z")))
    prompt = [1, 9, 3, 4, 10, 7] if drifted else [1, 2, 3, 4, 10, 7]
    later = LoggedCall(request, (LoggedOutput(Message("assistant", "end"), as_ids([8])),), as_ids(prompt))
    cut = call(0, answer(0, finish="cancelled"), name="cut")
    log = [cut, *([call(0, answer(0), name="whole")] if finished else []), replace(later, id="later")]
    for order in permutations(log):
        tree = merge([replace(one, line=line) for line, one in enumerate(order)]).tree
        export = export_samples(tree, ExportPolicy(include_missing_logprobs=True))
        trained = {name for sample in export.samples for name in sample.calls}
        if drifted or finished:
            assert trained == {one.id for one in log[1:]}
            assert [(entry.reason, entry.call, entry.tokens) for entry in export.report.dropped] == [
                ("cancelled", "cut", 2)
            ]
        else:  # What a call continues, it got.
            assert trained == {"cut", "later"}


def test_outputs_of_one_line_are_no_copies_whatever_their_indices_are() -> None:
    merged = merge([call(1, answer(0), answer(0)), call(2, answer(0), answer(0))])
    assert len(export_samples(merged.tree).samples) == 2
    assert merged.contradicting == []


def test_lines_without_a_response_id_are_answers_of_their_own() -> None:
    merged = merge([call(1, answer(0), name=""), call(2, answer(0), name="")])
    assert len(export_samples(merged.tree).samples) == 2


def test_of_equal_answers_the_one_that_is_known_best_is_kept() -> None:
    cut, finished = answer(0, finish="cancelled"), answer(0)
    for outputs in ((cut, finished), (finished, cut)):
        log = [call(line, output, name=str(line)) for line, output in enumerate(outputs, start=1)]
        merged = merge(log, MergePolicy(deduplicate=True))
        (sample,) = export_samples(merged.tree).samples
        assert sample.finish_reason == "stop"
