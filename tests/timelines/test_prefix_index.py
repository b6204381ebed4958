"""Prefix hashing finds exactly the matches of a pairwise comparison."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.token_arrays import as_ids
from branchline.timelines.prefix_index import CallKeys, MessagePrefixIndex, TokenPrefixIndex

keys = st.sampled_from([bytes([value]) * 16 for value in range(3)])
logged_calls = st.lists(
    st.builds(
        CallKeys,
        st.integers(0, 1),
        st.lists(keys, min_size=1, max_size=5).map(b"".join),
        st.lists(keys, min_size=1, max_size=2).map(tuple),
    ),
    max_size=8,
)


@settings(max_examples=300)
@given(logged_calls)
def test_message_prefixes_equal_those_of_the_pairwise_comparison(calls: list[CallKeys]) -> None:
    prefixes = MessagePrefixIndex(calls)
    for index, call in enumerate(calls):
        expected = [
            (len(other.message_keys) // 16 + 1, parent, choice)
            for parent, other in enumerate(calls)
            for choice, output in enumerate(other.output_keys)
            if other.scope == call.scope and call.message_keys.startswith(other.message_keys + output)
        ]
        matches = list(prefixes.matches(index))
        assert sorted(matches) == sorted(expected)
        assert [match[0] for match in matches] == sorted((match[0] for match in matches), reverse=True)


ids = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.none() | ids, st.lists(st.none() | ids, max_size=2)), max_size=8)
)
def test_id_prefixes_equal_those_of_the_pairwise_comparison(
    calls: list[tuple[int, list[int] | None, list[list[int] | None]]],
) -> None:
    prefixes = TokenPrefixIndex(
        [scope for scope, _, _ in calls],
        [None if prompt is None else as_ids(prompt) for _, prompt, _ in calls],
        [[None if output is None else as_ids(output) for output in outputs] for _, _, outputs in calls],
    )
    for index, (scope, prompt, _) in enumerate(calls):
        expected = [
            (len(before) + len(output), parent, choice)
            for parent, (other, before, outputs) in enumerate(calls)
            for choice, output in enumerate(outputs)
            if prompt is not None
            and before is not None
            and output is not None
            and other == scope
            and len(before) < len(prompt)
            and prompt[: len(before) + len(output)] == before + output
        ]
        assert sorted(prefixes.matches(index)) == sorted(expected)


def test_a_leading_zero_id_changes_the_hash() -> None:
    prefixes = TokenPrefixIndex([0, 0], [as_ids([]), as_ids([0, 0])], [[as_ids([0])], []])
    assert list(prefixes.matches(1)) == [(1, 0, 0)]
