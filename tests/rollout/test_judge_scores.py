"""Reading the answer of a judge: the JSON with the known ids counts, and nothing is misread as a score."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.rollout.judge_scores import MAX_ANSWER_CHARS, find_json, read_scores

IDS = ["k7f2qz", "m3xw9b", "t5hdrc", "z2z2z2"]


def answer_of(*scores: Any) -> str:
    """Returns the answer that the judge is asked for, with these scores."""
    entries = [
        {"trajectory_id": name, "explanation": "because", "score": score}
        for name, score in zip(IDS, scores, strict=False)
    ]
    return json.dumps({"scores": entries})


def with_ids(text: str) -> str:
    """Returns a text with ids in the place of A, B and C."""
    return re.sub("(?<![A-Za-z])[ABC](?![A-Za-z])", lambda match: IDS["ABC".index(match[0])], text)


def scores_of(answer: object, count: int = 2) -> list[float | None]:
    return [judgement.score for judgement in read_scores(answer, IDS[:count])[0]]


@pytest.mark.parametrize(
    "answer",
    [
        answer_of(0.25, 1),
        f"```json\n{answer_of(0.25, 1)}\n```",
        '[{"trajectory_id": "B", "score": 1.0}, {"trajectory_id": "A", "score": 0.25}]',
        '{"A": 0.25, "B": 1}',
        '{"scores": {"A": 0.25, "B": {"score": 1}}}',
        f"{answer_of(0.25, 1)}\n\n[0, 1] see the rubric.",
        f"[1, 0]\n{answer_of(0.25, 1)}\n```json\n{{}}\n```",
        f'{{"note": 1}} {answer_of(0.25, 1)} {{"A": 0.25}} [] {{"B": 1}} {{"3": 0, "4": 1}}',
        f"Thinking about {{it}} and [so on: {answer_of(0.25, 1)} ]",
        f'As ["quoted below]: {answer_of(0.25, 1)}',
        f"{answer_of(0.25, 1)} which is {answer_of(0.25, 1)}",
        f"Perhaps {answer_of(1, 0)}? No.</think>{answer_of(0.25, 1)}",
        f'{{"scores": [{{"trajectory_id": "A"</think>{answer_of(0.25, 1)}',
        f"\ufeff\x1b[1m{answer_of(0.25, 1)}\x1b[0m \ud83d",
    ],
)
def test_the_json_with_the_known_ids_is_the_answer(answer: str) -> None:
    assert scores_of(with_ids(answer)) == [0.25, 1.0]
    assert read_scores(with_ids(answer), IDS[:2])[1] == ""


@pytest.mark.parametrize(
    "prose",
    [
        "Comparing trajectories 1, 2: the second is better.",
        "Between 1 and 2, 1: fails, 2: works.",
        "Final ranking, 2: best, 1: worst.",
        "A: fails at its third step\n- B: works",
        "A and B, B: better. `A`: worse; **B**: 0.9",
        'The agent printed {1: "a"}.',
        'The agent wrote {"1": 1, "2": 0}.',
        'It wrote {"scores": [{"trajectory_id": "1", "score": 1}, {"trajectory_id": "2", "score": 0}]}.',
        'The agent wrote {"scores": [{"trajectory_id": "1", "score": 1}, {"trajectory_id"',
        'The tool returned {"score": 3, "scores": [7]} and {"score": null',
    ],
)
def test_prose_and_quotations_around_the_answer_count_for_nothing(prose: str) -> None:
    for answer in (f"{prose}\n{answer_of(0.25, 1)}", f"{answer_of(0.25, 1)}\n{prose}"):
        assert read_scores(with_ids(answer), IDS[:2])[1] == ""
        assert scores_of(with_ids(answer)) == [0.25, 1.0]


@pytest.mark.parametrize(
    "own",
    [
        "The second is better: 0.2 and 0.9.",
        "A: 0.2, B: 0.9",
        "- trajectory_id: A\n  score: 0.2\n- trajectory_id: B\n  score: 0.9",
        "| A | 0.2 |\n| B | 0.9 |",
        "{“A”: 0.2, “B”: 0.9}",
        "{`A`: 0.2, `B`: 0.9}",
        '"{\\"A\\": 0.2, \\"B\\": 0.9}"',
        "[0.2, 0.9]",
        '{"1": 0.2, "2": 0.9}',
        '{"result": {"A": 0.2, "B": 0.9}}',
        '{"rewards": {"A": 0.2, "B": 0.9}}',
        '{"#A": 0.2, "#B": 0.9}',
        '{"trajectory_A": 0.2, "trajectory_B": 0.9}',
        '{"Scores": [{"Trajectory_ID": "A", "Score": 0.2}, {"Trajectory_ID": "B", "Score": 0.9}]}',
        '{"scores": [{"trajectory_id": "A", "score": 0.2}]}\n'
        '{"scores": [{"trajectory_id": "B", "score": 0.9}]}',
        '{"trajectory_id": "A", "score": 0.2}\n{"trajectory_id": "B", "score": 0.9}',
        '{"A": 0.2}\n{"B": 0.9}',
        '{"scores": [0.2, 0.9]}',
        '{"scores": {"trajectory A": 0.2, "trajectory B": 0.9}}',
        '[{"id": "A", "score": 0.2}, {"id": "B", "score": 0.9}]',
        "{A: 0.2, B: 0.9}",
        "{scores: [0.2, 0.9]}",
        "{'scores': [{'trajectory_id': 'A', 'score': 0.2}, {'trajectory_id': 'B', 'score': 0.9}]}",
    ],
)
def test_a_ranking_that_an_agent_wrote_does_not_replace_an_answer_that_is_not_readable(own: str) -> None:
    complete = [{"trajectory_id": name, "score": score} for name, score in (("1", 1), ("2", 0))]
    for quoted in ('{"1": 1, "2": 0}', json.dumps({"scores": complete}), '{"k7f2qy": 1, "m3xw9a": 0}'):
        for answer in (f"The agent wrote {quoted}. {own}", f"{own} The agent wrote {quoted}."):
            assert scores_of(with_ids(answer)) == [None, None], answer
            assert read_scores(with_ids(answer), IDS[:2])[1]


@pytest.mark.parametrize(
    "final",
    [
        '{"result": {"A": 0.1, "B": 0.9}}',
        '{"ranking": {"A": 0.1, "B": 0.9}, "scores": null}',
        '{"scores": {"A": 0.1, "B": 0.9}, "scores": {"A": 0.1, "B": 0.9}}',
        '{"final_scores": [{"trajectory_id": "A", "score": 0.1}, {"trajectory_id": "B", "score": 0.9}]}',
        '{"one": {"scores": [{"trajectory_id": "A", "score": 0.1}, {"trajectory_id": "B", "score": 0.9}]}}',
        '{"trajectory_id": "A", "score": 0.1}\n{"trajectory_id": "B", "score": 0.9}',
        '[{"trajectory_id": "A", "score": 0.1}, {"trajectory_id": "B", "score": 0.9}, {"note": 1}]',
        '{"scores": [{"id": "A", "score": 0.1}, {"id": "B", "score": 0.9}]}',
        '[{"A": 0.1}, {"B": 0.9}]',
        '[["A", 0.1], ["B", 0.9]]',
        '{"A": 0.1, "deep": {"B": 0.9}}',
        '{"A": 0.9, "B": 0.1, "corrected": [0.1, 0.9]}',
        '{"#A": 0.1, "#B": 0.9}',
        '{"scores": {"trajectory A": 0.1, "trajectory B": 0.9}}',
        '{"scores": [{"trajectory_id": "A ", "score": 0.1}, {"trajectory_id": "B ", "score": 0.9}]}',
        '{"K7F2QZ": 0.1, "M3XW9B": 0.9}',
        '{"K7F2QZ": 0.1, "M3XW9B": 0.9',
    ],
)
def test_a_draft_does_not_replace_a_ranking_that_is_written_in_another_way(final: str) -> None:
    draft = '{"A": 0.9, "B": 0.1}'
    for answer in (f"Draft: {draft}. {final}", f"{final} At first {draft}."):
        judgements, of_answer = read_scores(with_ids(answer), IDS[:2])
        assert [judgement.score for judgement in judgements] == [None, None]
        assert of_answer


@pytest.mark.parametrize(
    "answer",
    [
        '{"scores": {"A": 0.9, "B": 0.1}, "final_scores": {"A": 0.1, "B": 0.9}}',
        '{"final": {"A": 0.1, "B": 0.9}, "scores": {"A": 0.9, "B": 0.1}}',
        '{"scores": [{"trajectory_id": "A", "score": 0.9}, {"trajectory_id": "B", "score": 0.1}],'
        ' "corrected": [{"trajectory_id": "A", "score": 0.1}, {"trajectory_id": "B", "score": 0.9}]}',
        '{"thoughts": {"scores": {"A": 0.1, "B": 0.9}}, "scores": {"A": 0.9, "B": 0.1}}',
        '{"scores": {"A": 0.9, "B": 0.1}, "best": "B"}',
    ],
)
def test_an_answer_has_each_id_in_one_place(answer: str) -> None:
    judgements, problem = read_scores(with_ids(answer), IDS[:2])
    assert [judgement.score for judgement in judgements] == [None, None]
    assert problem.startswith("got an id in several places of one JSON value")


def test_an_explanation_may_name_other_trajectories() -> None:
    entries = [
        {"trajectory_id": name, "explanation": f"compared with {IDS[0]} and {IDS[1]}", "score": 0.5}
        for name in IDS[:2]
    ]
    assert scores_of(json.dumps({"scores": entries})) == [0.5, 0.5]


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
        ('{"ranking": {"A": 1, "B": 0}}', "expected one JSON object with a score"),
        (answer_of(0.5), "no score for 1 of 2 trajectories"),
        (answer_of(0.5, 1, 0), "the unknown trajectory t5hdrc"),
        ('{"A": 0.5, "A": 0.5, "B": 1}', "several scores for 1 of 2 trajectories"),
        ('[{"trajectory_id": "A", "score": 0}, {"trajectory_id": "A", "score": 1}]', "no score for 1 of 2"),
        ('[{"trajectory_id": "A", "score": 0}, {"trajectory_id": "b", "score": 1}]', "trajectory b"),
        ('{"A": 0, "B": 1, "notes": "ok"}', "the unknown trajectory notes"),
        (answer_of(0, 1) + answer_of(1, 0), "two different answers"),
        (answer_of(0, 1) + answer_of(0, "1"), "two different answers"),
        (answer_of(0, 1) + '{"A": 1}', "two scores for a trajectory"),
        ("[[[[", "expected one JSON object"),
        ('{"A": 0 (at first {"A": 1, "B": 0}), "B": 1}', "parts of an answer outside of valid JSON"),
        (
            'At first {"A": 1, "B": 0}, but {"scores": [{"trajectory_id": "A", "score": 0.',
            "parts of an answer outside",
        ),
        ('At first {"A": 1, "B": 0}, but {A: 0.2, B: 0.9}', "parts of an answer outside"),
        ('At first {"A": 1, "B": 0}, but {trajectory_id: A, score: 0.2}', "parts of an answer outside"),
        ("At first {'A': 1, 'B': 0}, but " + answer_of(0, 1), "parts of an answer outside"),
        (" " * (MAX_ANSWER_CHARS + 1), "got 1,000,001 characters"),
    ],
)
def test_an_answer_without_exactly_the_known_ids_is_an_error_of_all(answer: object, problem: str) -> None:
    answer = with_ids(answer) if isinstance(answer, str) else answer
    judgements, of_answer = read_scores(answer, IDS[:2])
    assert with_ids(problem) in of_answer
    assert [judgement.score for judgement in judgements] == [None, None]
    assert all(judgement.problem == of_answer for judgement in judgements)


@pytest.mark.parametrize(
    "score",
    ["4/5", "1%", "0.8 out of 1", "0.8", "1", "", True, False, None, float("nan"), float("inf"), -0.1,
     1.001, 7, 80, 10**400, [0.5], {"value": 0.5}, {"score": 0.5}],
)  # fmt: skip
def test_a_score_that_is_no_number_from_0_to_1_is_an_error_of_its_trajectory_alone(score: Any) -> None:
    judgements, of_answer = read_scores(answer_of(score, 0.5), IDS[:2])
    assert of_answer == ""
    assert [judgement.score for judgement in judgements] == [None, 0.5]
    assert "score" in judgements[0].problem
    assert judgements[1].problem == ""


def test_an_entry_needs_one_score() -> None:
    answer = with_ids('[{"trajectory_id": "A", "score": 0.1, "score": 0.9}, {"trajectory_id": "B"}]')
    assert [one.problem for one in read_scores(answer, IDS[:2])[0]] == [
        "score: got 2 values, expected one",
        "score: got 0 values, expected one",
    ]


@given(st.text(st.sampled_from('[]{}",:0123456789.-%/eE abscorid_\\'), max_size=80), st.integers(1, 4))
def test_no_answer_raises(answer: str, count: int) -> None:
    judgements, of_answer = read_scores(answer, ["0", "s", "id", "8"][:count])
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
     '{  ', 'trajectory_id: ', '"k7f2qz" ', '[",[],",', '["a\\u', "[[[[", "9", "]"],
)  # fmt: skip
def test_hostile_answers_take_linear_time(unit: str) -> None:
    # With quadratic time this would take hours.
    assert scores_of(unit * (MAX_ANSWER_CHARS // 4 // len(unit)), 3) == [None] * 3
    assert scores_of(unit * 16_000 + answer_of(0.5, 1), 2) in ([0.5, 1.0], [None, None])
