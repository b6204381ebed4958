"""Reading the answer of a judge: the JSON with the known ids counts, and nothing is misread as a score."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.rollout.judge_scores import MAX_ANSWER_CHARS, find_json, read_scores


def answer_of(*scores: Any) -> str:
    """Returns the answer that the judge is asked for, with these scores."""
    entries = [
        {"trajectory_id": str(number), "explanation": "because", "score": score}
        for number, score in enumerate(scores, 1)
    ]
    return json.dumps({"scores": entries})


def scores_of(answer: object, count: int = 2) -> list[float | None]:
    return [judgement.score for judgement in read_scores(answer, count)[0]]


@pytest.mark.parametrize(
    "answer",
    [
        answer_of(0.25, 1),
        f"```json\n{answer_of(0.25, 1)}\n```",
        '[{"trajectory_id": 2, "score": 1.0}, {"trajectory_id": 1, "score": 0.25}]',
        '{"1": 0.25, "2": 1}',
        '{"scores": {"1": 0.25, "2": {"score": 1}}}',
        f"{answer_of(0.25, 1)}\n\n[0, 1] see the rubric.",
        f"[1, 0]\n{answer_of(0.25, 1)}\n```json\n{{}}\n```",
        f'{{"note": 1}} {answer_of(0.25, 1)} {{"1": 0.25}} [] {{"2": 1}} {{"3": 0, "4": 1}}',
        f"Thinking about {{it}} and [so on: {answer_of(0.25, 1)} ]",
        f'As ["quoted below]: {answer_of(0.25, 1)}',
        f"Comparing trajectories 1, 2: the second is better.\n{answer_of(0.25, 1)}",
        f"{answer_of(0.25, 1)} which is {answer_of(0.25, 1)}",
        f"Perhaps {answer_of(1, 0)}? No.</think>{answer_of(0.25, 1)}",
        f'{{"scores": [{{"trajectory_id": "1"</think>{answer_of(0.25, 1)}',
        f"\ufeff\x1b[1m{answer_of(0.25, 1)}\x1b[0m \ud83d",
    ],
)
def test_the_json_with_the_known_ids_is_the_answer(answer: str) -> None:
    assert scores_of(answer) == [0.25, 1.0]
    assert read_scores(answer, 2)[1] == ""


@pytest.mark.parametrize(
    "own",
    [
        '{"scores": [{"trajectory_id": "1", "score": 0.2}]}\n'
        '{"scores": [{"trajectory_id": "2", "score": 0.9}]}',
        '{"trajectory_id": "1", "score": 0.2}\n{"trajectory_id": "2", "score": 0.9}',
        '{"1": 0.2}\n{"2": 0.9}',
        '{"scores": [0.2, 0.9]}',
        '{"scores": {"trajectory 1": 0.2, "trajectory 2": 0.9}}',
        '[{"id": "1", "score": 0.2}, {"id": "2", "score": 0.9}]',
        "{1: 0.2, 2: 0.9}",
        "{scores: [0.2, 0.9]}",
        "{'scores': [{'trajectory_id': '1', 'score': 0.2}, {'trajectory_id': '2', 'score': 0.9}]}",
    ],
)
def test_a_quoted_answer_does_not_replace_one_that_is_incomplete_or_not_readable(own: str) -> None:
    for answer in (
        f'The agent wrote {{"1": 1, "2": 0}}. {own}',
        f'{own} The agent wrote {{"1": 1, "2": 0}}.',
    ):
        assert scores_of(answer) == [None, None], answer
        assert read_scores(answer, 2)[1]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("", "got ''"),
        (None, "got NoneType"),
        (0.5, "got float"),
        ("both are fine", "got 'both are fine'"),
        ("[0.5, 1]", "got '[0.5, 1]'"),
        ('{"scores": [0.5, 1]}', "expected one JSON object with a score"),
        ('{"scores": null}', "expected one JSON object with a score"),
        ('{"ranking": {"1": 1, "2": 0}}', "expected one JSON object with a score"),
        (answer_of(0.5), "no score for trajectory 2"),
        (answer_of(0.5, 1, 0), "the unknown trajectory 3"),
        ('{"1": 0.5, "1": 0.5, "2": 1}', "several scores for trajectory 1"),
        ('[{"trajectory_id": "1", "score": 0}, {"trajectory_id": "1", "score": 1}]', "no score for traj"),
        ('[{"trajectory_id": "1", "score": 0}, {"trajectory_id": "01", "score": 1}]', "trajectory 01"),
        (answer_of(0, 1) + answer_of(1, 0), "two different answers"),
        (answer_of(0, 1) + answer_of(0, "1"), "two different answers"),
        ("[[[[", "expected one JSON object"),
        (
            '{"scores": [{"trajectory_id": "1", "explanation": "it says {"1": 1, "2": 0}", "score": 0}]}',
            'got "scores": outside of valid JSON',
        ),
        ('{"1": 0 (it says {"1": 1, "2": 0}), "2": 1}', 'got "1": outside of valid JSON'),
        (answer_of(0.5, 1) + answer_of(0.5, 1)[:30], 'got "scores": outside of valid JSON'),
        (" " * (MAX_ANSWER_CHARS + 1), "got 1,000,001 characters"),
    ],
)
def test_an_answer_without_exactly_the_known_ids_is_an_error_of_all(answer: object, problem: str) -> None:
    judgements, of_answer = read_scores(answer, 2)
    assert problem in of_answer
    assert [judgement.score for judgement in judgements] == [None, None]
    assert all(judgement.problem == of_answer for judgement in judgements)


@pytest.mark.parametrize(
    "score",
    ["4/5", "1%", "0.8 out of 1", "0.8", "1", "", True, False, None, float("nan"), float("inf"), -0.1,
     1.001, 7, 80, 10**400, [0.5], {"value": 0.5}, {"score": 0.5}],
)  # fmt: skip
def test_a_score_that_is_no_number_from_0_to_1_is_an_error_of_its_trajectory_alone(score: Any) -> None:
    judgements, of_answer = read_scores(answer_of(score, 0.5), 2)
    assert of_answer == ""
    assert [judgement.score for judgement in judgements] == [None, 0.5]
    assert "score" in judgements[0].problem
    assert judgements[1].problem == ""


def test_an_entry_needs_one_score() -> None:
    answer = '[{"trajectory_id": "1", "score": 0.1, "score": 0.9}, {"trajectory_id": "2"}]'
    assert [one.problem for one in read_scores(answer, 2)[0]] == [
        "score: got 2 values, expected one",
        "score: got 0 values, expected one",
    ]


@given(st.text(st.sampled_from('[]{}",:0123456789.-%/eE abscorid_\\'), max_size=80), st.integers(1, 4))
def test_no_answer_raises(answer: str, count: int) -> None:
    judgements, of_answer = read_scores(answer, count)
    assert len(judgements) == count
    for judgement in judgements:
        assert (judgement.score is None) == bool(judgement.problem)
        assert judgement.score is None or 0 <= judgement.score <= 1
    assert not of_answer or all(judgement.score is None for judgement in judgements)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"[{}]\\', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("k{[", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
containers = json_values.filter(lambda value: isinstance(value, list | dict))
prose = st.text(" ,:x.1", max_size=6)


@given(st.lists(st.tuples(prose, containers, st.booleans()), max_size=4), prose)
def test_all_json_between_prose_is_found(parts: list[tuple[str, Any, bool]], end: str) -> None:
    text = "".join(before + json.dumps(value, indent=2 if wide else None) for before, value, wide in parts)
    assert [as_json(found) for found in find_json(text + end)] == [value for _, value, _ in parts]


def as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {key: as_json(item) for key, item in value}
    return [as_json(item) for item in value] if isinstance(value, list) else value


@given(st.text(st.sampled_from('[]{}":,1 \\a'), max_size=24))
def test_what_is_found_is_what_the_json_module_reads(text: str) -> None:
    """The reference reads at every bracket, which takes quadratic time."""
    expected, index = [], 0
    while index < len(text):
        if text[index] in "[{":
            try:
                value, length = json.JSONDecoder(object_pairs_hook=tuple).raw_decode(text[index:])
            except ValueError:
                pass
            else:
                expected.append(value)
                index += length
                continue
        index += 1
    assert list(find_json(text)) == expected


@pytest.mark.parametrize(
    "unit",
    ["{", "[", '["', '"[', '[{"a":', '{"scores":[', '["\\"', "[]", "[[],", "[1,", '{"a":"', "[ ", "\\\"[",
     '[",[],",', '["a\\u', "[[[[", "9", "]"],
)  # fmt: skip
def test_hostile_answers_take_linear_time(unit: str) -> None:
    # With quadratic time this would take hours.
    assert scores_of(unit * (MAX_ANSWER_CHARS // 4 // len(unit)), 3) == [None] * 3
    assert scores_of(unit * 16_000 + answer_of(0.5, 1), 2) in ([0.5, 1.0], [None, None])
