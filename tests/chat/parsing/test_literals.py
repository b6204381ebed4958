"""Python's and Gemma's literals become JSON of the same value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.parsing.literals import GEMMA_LITERALS, PYTHON_LITERALS
from tests.chat.parsing.samples import gemma_value

strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | strings, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3)
)
bare_keys = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
gemma_strings = strings.filter(lambda text: "<" not in text)
gemma_values = st.recursive(
    scalars | gemma_strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(bare_keys, inner, max_size=3),
)


@given(values)
def test_python_prints_are_read_back(value: object) -> None:
    text = repr(value)
    converted, end = PYTHON_LITERALS.read(text)
    assert (json.loads(converted), end) == (value, len(text))


@given(values)
def test_json_is_read_back(value: object) -> None:
    text = json.dumps(value)
    converted, end = PYTHON_LITERALS.read(text)
    assert (json.loads(converted), end) == (value, len(text))


@given(gemma_values)
def test_gemma_values_are_read_back(value: object) -> None:
    text = gemma_value(value)
    converted, end = GEMMA_LITERALS.read(text)
    assert (json.loads(converted), end) == (value, len(text))


@given(st.text("{}[]()'\",:=\\ abN01.-<|>", max_size=20))
def test_other_text_raises_only_value_error(text: str) -> None:
    for syntax in (PYTHON_LITERALS, GEMMA_LITERALS):
        try:
            converted, end = syntax.read(text)
        except ValueError:
            continue
        json.loads(converted)
        assert 0 < end <= len(text)


@pytest.mark.parametrize(
    "text", ["", "x", "1.", ".5", "01", "1_0", "nan", "'a", "'a\\'", "[1", "{'a' 1}", "f()"]
)
def test_text_that_is_not_a_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        PYTHON_LITERALS.read(text)


def test_numbers_keep_their_text_and_deep_nesting_is_refused() -> None:
    assert PYTHON_LITERALS.read("[1.50, 1e-07, -0]")[0] == "[1.50, 1e-07, -0]"
    with pytest.raises(ValueError, match="nested too deep"):
        PYTHON_LITERALS.read("[" * 100_000)
