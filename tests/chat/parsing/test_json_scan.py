"""JSON scanning: the end of a value for every chunking, and the exact text of its parts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.parsing.json_scan import JsonScanner, is_json_object, split_array, split_object

strings = st.text(st.sampled_from('"\\{}[]a,: \n'), max_size=8)
values = st.recursive(
    strings | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
)
containers = st.lists(values, max_size=3) | st.dictionaries(strings, values, max_size=3)


@given(containers, st.sampled_from([None, 2]), st.text(']}"\\ ', max_size=3))
def test_the_end_of_a_value_is_found_character_by_character(
    value: object, indent: int | None, tail: str
) -> None:
    text = json.dumps(value, indent=indent)
    assert JsonScanner().feed(text + tail) == len(text)
    scan = JsonScanner()
    assert [scan.feed(char) for char in text] == [-1] * (len(text) - 1) + [1]


@given(st.text('"\\{}[]a\n', max_size=30), st.integers(0, 30))
def test_a_scan_does_not_depend_on_the_chunking(text: str, split: int) -> None:
    whole, parts = JsonScanner(), JsonScanner()
    end = whole.feed(text)
    first = parts.feed(text[:split])
    second = parts.feed(text[split:])
    assert end == (first if first >= 0 else split + second if second >= 0 else -1)
    assert (whole.in_string, whole.is_invalid) == (parts.in_string, parts.is_invalid)
    assert whole.is_complete == parts.is_complete == (end >= 0)


@pytest.mark.parametrize("text", ["}", '{"a": 1]', "[}", '{"a": [1}', '{"a": "\n"}', '["a\t"]'])
def test_text_that_cannot_become_json_is_invalid(text: str) -> None:
    scan = JsonScanner()
    assert scan.feed(text) == -1
    assert (scan.is_invalid, scan.is_complete, scan.in_string) == (True, False, False)


@given(st.dictionaries(strings, values, max_size=4), st.sampled_from([None, 1]))
def test_members_are_the_source_texts_of_the_values(value: dict[str, object], indent: int | None) -> None:
    found = split_object(f" {json.dumps(value, indent=indent)}\n")
    assert found is not None
    assert {key: json.loads(text) for key, text in found.items()} == value
    items = list(value.values())
    assert [json.loads(text) for text in split_array(json.dumps(items, indent=indent)) or ()] == items


@pytest.mark.parametrize(
    "text", ["", "{", "{}}", '{"a"}', '{"a":}', '{"a":1,}', "{,}", "{a:1}", "[]", "1", '{"a":01}']
)
def test_text_that_is_not_an_object_has_no_members(text: str) -> None:
    assert split_object(text) is None
    assert not is_json_object(text)


@given(st.text('"\\{}[]a1,: ', max_size=12))
def test_members_and_json_agree_on_what_an_object_is(text: str) -> None:
    assert (split_object(text) is not None) == is_json_object(text)


def test_a_lone_surrogate_is_json() -> None:
    assert split_object('{"a": "\\ud800"}') == {"a": '"\\ud800"'}
