"""Merging irregular foreign logs: ids on some calls only, equal answers, repeated turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from branchline import (
    ExportPolicy,
    Message,
    Request,
    export_samples,
    group_by_session,
    merge,
    timelines_of,
)
from branchline.core.errors import InputError
from branchline.core.token_arrays import as_ids
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.tree.tree import Tree


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def logged(
    messages: list[Message], answer: str, prompt: list[int] | None, ids: list[int] | None, line: int = 0
) -> LoggedCall:
    logprobs = None if ids is None else np.full(len(ids), -0.5, np.float32)
    output = LoggedOutput(assistant(answer), None if ids is None else as_ids(ids), logprobs)
    return LoggedCall(
        Request(tuple(messages)), (output,), None if prompt is None else as_ids(prompt), line=line
    )


def timeline_rows(tree: Tree) -> list[tuple[list[int], list[int], bool]]:
    return sorted((line.ids.tolist(), line.mask.tolist(), line.exact) for line in timelines_of(tree))


@pytest.mark.parametrize("name", ["repair", "ignore_tools", "inexact"])
def test_comparing_ids_alone_leaves_nothing_to_allow(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: got True, expected False with compare='token'"):
        MergePolicy(compare="token", stop_ids=frozenset({1}), **{name: True})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="compare: got 'texts', expected text or token"):
        MergePolicy(compare="texts")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"inexact": "no"}, "inexact: got 'no', expected True or False"),
        ({"repair": 1, "stop_ids": frozenset({1})}, "repair: got 1, expected True or False"),
        ({"deduplicate": None}, "deduplicate: got None, expected True or False"),
        ({"stop_ids": "5"}, "stop_ids: got '5', expected a set of ids"),
        ({"stop_ids": frozenset({"5"})}, "expected a set of ids"),
        ({"repair": True}, "repair: got no token_bytes and no stop_ids"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        MergePolicy(**options)


def test_the_calls_of_two_sessions_are_not_one_tree() -> None:
    first = logged([user("a")], "b", [1], [2])
    second = replace(logged([user("a"), assistant("b"), user("c")], "d", [1, 2, 3], [4]), session="other")
    with pytest.raises(InputError, match=r"got calls of 2 sessions \('', 'other'\), expected those of one"):
        merge([first, second])
    trees = [merge(calls).tree for calls in group_by_session([first, second]).values()]
    assert [len(tree.calls) for tree in trees] == [1, 1]


def test_a_prompt_with_ids_after_a_call_without_ids_stays_exact() -> None:
    calls = [
        logged([user("a")], "b", None, None),
        logged([user("a"), assistant("b"), user("c")], "d", [1, 2, 3, 4], [5, 6]),
    ]
    tree = merge(calls).tree
    assert timeline_rows(tree) == [([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1], True)]
    assert export_samples(tree).report.trained_tokens == 2


def test_a_call_without_ids_in_the_middle_loses_no_ids() -> None:
    calls = [
        logged([user("a")], "b", [1], [2]),
        logged([user("a"), assistant("b"), user("c")], "d", None, None),
        logged([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], "f", [1, 2, 3, 4, 5], [6]),
    ]
    assert timeline_rows(merge(calls).tree) == [([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 0, 1], True)]


def test_a_prompt_that_cannot_follow_a_path_without_ids_is_kept_apart_and_exact() -> None:
    calls = [
        logged([user("a")], "b", [1], [2]),
        logged([user("a"), assistant("b"), user("c")], "d", [1, 2, 3], None),
        logged([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], "f", [1, 9, 3, 4, 5], [6]),
    ]
    tree = merge(calls).tree
    assert ([1, 9, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1], True) in timeline_rows(tree)
    assert export_samples(tree).report.trained_tokens == 2


def test_an_id_that_also_occurs_inside_an_output_does_not_end_it() -> None:
    calls = [
        logged([user("a")], "b.c.", [1], [2, 8, 3, 8]),
        logged([user("a"), assistant("b.c."), user("e")], "f", [1, 4, 8, 3, 8, 5], [6]),
    ]
    policy = MergePolicy(repair=True, stop_ids=frozenset({8}))
    assert ([1, 4, 8, 3, 8, 5, 6], [0] * 6 + [1], True) in timeline_rows(merge(calls, policy).tree)


def test_an_output_with_matching_ids_is_preferred_to_one_without_ids() -> None:
    calls = [
        logged([user("u")], "same", [1], None, 1),
        logged([user("u")], "same", [1], [7], 2),
        logged([user("u"), assistant("same"), user("n")], "end", [1, 7, 4], [5], 3),
    ]
    for order in permutations(calls):
        assert ([1, 7, 4, 5], [0, 1, 0, 1], True) in timeline_rows(merge(order).tree)


def test_ids_encoded_from_text_never_replace_logged_ids() -> None:
    text_only = logged([user("a")], "hello", None, None, 1)
    encoded = replace(text_only.outputs[0], ids=as_ids([20, 21]), ids_were_sampled=False)
    calls = [
        replace(text_only, prompt_ids=as_ids([1, 2]), outputs=(encoded,)),
        logged([user("a"), assistant("hello"), user("c")], "d", [1, 2, 22, 4], [5], 2),
    ]
    assert ([1, 2, 22, 4, 5], [0, 0, 0, 0, 1], True) in timeline_rows(merge(calls).tree)


def test_after_a_changed_prefix_the_right_one_of_equal_turns_is_found() -> None:
    turn = [11, 12, 13, 14, 15, 16, 17, 18, 50]
    first = [100, *turn]
    second = [*first, 60, *turn]
    third = [200, *turn, 60, *turn, 60, *turn]
    go, ok = user("go"), assistant("ok")
    calls = [
        logged([go], "ok", first, [60], 1),
        logged([go, ok, go], "ok", second, [60], 2),
        logged([go, ok, go, ok, go], "end", third, [61], 3),
    ]
    assert len(timelines_of(merge(calls).tree)) == 2
    (line,) = timelines_of(merge(calls, MergePolicy(inexact=True)).tree)
    assert line.ids.tolist() == [*second, 60, *turn, 61]
    assert not line.exact


def test_by_token_an_empty_output_is_continued_only_if_the_text_agrees() -> None:
    calls = [
        logged([user("y")], "", [121], [], 1),
        logged([user("y"), assistant("ok"), user("x")], "z", [121, 7, 120], [3], 2),
    ]
    assert len(timelines_of(merge(calls, MergePolicy(compare="token")).tree)) == 2
    calls[1] = logged([user("y"), assistant(""), user("x")], "z", [121, 7, 120], [3], 2)
    assert len(timelines_of(merge(calls, MergePolicy(compare="token")).tree)) == 1


def test_many_equal_answers_are_merged_in_linear_time() -> None:
    count = 1500
    calls = [logged([user("u")], "ok", [1], [2], line) for line in range(count)]
    calls += [
        logged([user("u"), assistant("ok"), user(f"q{n}")], f"r{n}", [1, 2, 3, n], [5], count + n)
        for n in range(count)
    ]
    merged = merge(calls)
    assert sum(link is not None for link in merged.links) == count


def test_a_call_that_repeats_an_output_of_its_own_continuation_is_merged() -> None:
    calls = [
        logged([user("a"), assistant("later"), user("b")], "x", [1], [2], 1),
        logged(
            [user("a"), assistant("later"), user("b"), assistant("x"), user("c")], "later", [1, 2, 3], [4], 2
        ),
    ]
    for order in permutations(calls):
        assert timeline_rows(merge(order).tree) == [([1, 2, 3, 4], [0, 1, 0, 1], True)]


@pytest.mark.parametrize("compare", ["text", "token"])
def test_the_report_balances_with_missing_ids(compare: str) -> None:
    calls = [
        logged([user("a")], "b", [1], [2], 1),
        logged([user("a")], "b", None, [2], 2),
        logged([user("a"), assistant("b"), user("c")], "d", [1, 2, 3], None, 3),
        logged([user("z")], "", None, None, 4),
    ]
    for order in permutations(calls):
        tree = merge(order, MergePolicy(compare=compare)).tree  # type: ignore[arg-type]
        report = export_samples(
            tree, ExportPolicy(include_inexact=True, include_missing_logprobs=True)
        ).report
        assert report.is_balanced
        assert report.sampled_tokens == 2
