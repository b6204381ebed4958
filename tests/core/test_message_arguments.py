"""Canonical bytes are equal iff argument texts mean the same."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.message import Notation, canonical_arguments, canonical_json


def canonical_bytes(text: str) -> bytes:
    return canonical_arguments(text)[0]


def notation_of(text: str) -> Notation:
    return canonical_arguments(text)[1]


# -- ignored differences ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        '{"city":"Zürich","days":3}',
        '{ "city" : "Zürich" , "days" : 3 }',
        '{"days": 3, "city": "Zürich"}',
        '{\n  "days": 3,\n  "city": "Z\\u00fcrich"\n}',
        '{"\\u0063ity": "Z\\u00FCrich", "days": 3.0}',
        '\t{"city": "Zürich", "days": 0.3e1}\r\n',
        '{"city": "Bern", "days": 3, "city": "Zürich"}',
    ],
)
def test_key_order_spacing_escapes_and_number_spelling_do_not_count(other: str) -> None:
    assert canonical_arguments(other) == ('{"city":"Zürich","days":3}'.encode(), Notation.JSON)


def test_keys_are_sorted_at_every_depth() -> None:
    assert canonical_bytes('{"b": [{"d": 1, "c": {"z": 0, "y": 0}}], "a": {}}') == (
        b'{"a":{},"b":[{"c":{"y":0,"z":0},"d":1}]}'
    )


def test_the_order_of_a_list_counts() -> None:
    assert canonical_bytes("[1, 2]") != canonical_bytes("[2, 1]")


@pytest.mark.parametrize(
    "spellings",
    [
        ["1", "1.0", "1e0", "10e-1", "0.1E+1"],
        ["0", "-0", "0.0", "-0.0", "0e7", "1e-400"],
        ["0.1", "0.10", "1e-1", "0.1000000000000000055511151231257827"],
        ["9007199254740992", "9007199254740992.0"],
        # JavaScript writes a sampled 1e16 out in full, and Python a sampled 1e16 as 1e+16.
        ["10000000000000000", "1e16", "1e+16", "1.0E16"],
        ["1e22", "10000000000000000000000"],
        ["-120", "-1.2e2"],
    ],
)
def test_all_spellings_of_a_number_are_equal(spellings: list[str]) -> None:
    assert len({canonical_bytes(spelling) for spelling in spellings}) == 1
    assert {notation_of(spelling) for spelling in spellings} == {Notation.JSON}


# -- differences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        ["1", "true", '"1"', "[1]", '{"1":1}', "1.5", "null", '"true"', '"null"'],
        ["0", "false", "null", '""', "[]", "{}", '"0"', '"false"'],
        ['{"a": null}', "{}", '{"a": ""}', '{"a": {}}', '{"a": []}'],
        ['"a b"', '"a  b"', '" a b"', '"A b"'],
        ['"é"', '"e\\u0301"'],
        ['"\\ud800"', '"\\ud801"', '"\\\\ud800"', '"?"', '"\\ufffd"'],
        ['"\\ud83d\\ude00"', '"\\ude00\\ud83d"', '"\\ud83d"', '"\\ude00"'],
        # JavaScript cannot represent the first of these; a call with another number is another call.
        ["9007199254740993", "9007199254740992", "9007199254740994"],
        ["123456789012345678901234567890", "123456789012345678901234567891", "1.2345678901234568e29"],
        ["0.1", "0.10000000000000002", "0.2"],
    ],
)
def test_different_values_and_types_are_different(texts: list[str]) -> None:
    assert len({canonical_bytes(text) for text in texts}) == len(texts)


def test_integers_of_any_size_are_exact() -> None:
    for text in ("18446744073709551616", "-9223372036854775809", "7" * 400):
        assert canonical_arguments(text) == (text.encode(), Notation.JSON)


def test_integers_too_long_for_python_are_text() -> None:
    assert notation_of("7" * 5000) is Notation.TEXT


def test_a_raw_and_an_escaped_lone_surrogate_are_equal() -> None:
    assert canonical_arguments('{"a":"\ud800é"}') == canonical_arguments('{"a": "\\ud800\\u00e9"}')
    assert canonical_arguments('{"\ud800":1,"a":2.0}') == canonical_arguments('{"a": 2, "\\uD800": 1}')


def test_a_surrogate_pair_equals_its_character() -> None:
    assert canonical_bytes('"\\ud83d\\ude00"') == canonical_bytes('"😀"')


# -- notations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u00a0"])
def test_an_empty_text_is_an_empty_object(text: str) -> None:
    assert canonical_arguments(text) == (b"{}", Notation.EMPTY)


def test_an_empty_object_is_json() -> None:
    assert canonical_arguments(" { } ") == (b"{}", Notation.JSON)


@pytest.mark.parametrize(
    ("literal", "same"),
    [
        ("{'a': False, 'b': None}", '{"a": false, "b": null}'),
        ('{"a": True}', '{"a": true}'),
        ("{'a': (1, 2.0)}", '{"a": [1, 2]}'),
        ("['it''s', \"x\"]", '["its", "x"]'),
        ("[1, 2,]", "[1, 2]"),
        ("  {'a': 'é'}\n", '{"a": "é"}'),
        ("{'a': -1e3}", '{"a": -1000}'),
    ],
)
def test_python_literals_are_read_if_json_fails(literal: str, same: str) -> None:
    assert notation_of(literal) is Notation.PYTHON
    assert notation_of(same) is Notation.JSON
    assert canonical_bytes(literal) == canonical_bytes(same)


def test_a_text_that_is_json_and_python_is_json() -> None:
    # As Python this would be a list of a backslash and a slash.
    assert canonical_arguments('["\\/"]') == (b'["/"]', Notation.JSON)


@pytest.mark.parametrize(
    "text",
    [
        "ls -la",
        "'ls'",
        "True",
        "None",
        "(1, 2)",
        "{1: 2}",
        "{'a': 1j}",
        "{'a': b'x'}",
        "{'a': {1}}",
        "{'a': nan}",
        "{'a': 1e400}",
        "{'a': __import__('os')}",
        "{**{}}",
        '{"a": true, "b": True}',
        '{"a": 1} {"b": 2}',
        '{"a": "cut of',
        "NaN",
        '{"a": NaN}',
        "[Infinity, -Infinity]",
        "1e400",
        "\x00",
        "{'a': '\ud800'}",
        "\ufeff{}",
    ],
)
def test_other_texts_are_compared_character_by_character(text: str) -> None:
    assert canonical_arguments(text) == (b"text:" + text.encode("utf-8", "surrogatepass"), Notation.TEXT)
    assert canonical_bytes(text) != canonical_bytes(text + " ")


@pytest.mark.parametrize("action", ["error", "ignore", "default"])
def test_warning_filters_do_not_change_the_result(action: Any) -> None:
    text = "{'pattern': '\\d+', 'from': '" + action + "'}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        assert notation_of(text) is Notation.PYTHON
    assert caught == []


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        "[" * 100_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        "(" * 50_000 + ")" * 50_000,
        "[" + "-" * 50_000 + "1]",
        "[1" + "+1" * 40_000 + "]",
        "{'a': " * 2_000 + "1" + "}" * 2_000,
    ],
)
def test_text_nested_too_deep_is_text(text: str) -> None:
    assert notation_of(text) is Notation.TEXT


def test_moderate_nesting_is_json() -> None:
    assert canonical_bytes("[ " * 100 + " ]" * 100) == b"[" * 100 + b"]" * 100


def test_a_result_with_an_almost_full_stack_is_not_cached() -> None:
    text = "[ " * 250 + "] " * 250

    def below(frames: int) -> None:
        if frames:
            below(frames - 1)
        else:
            canonical_arguments(text)

    def frames_in_use() -> int:
        frame, count = sys._getframe(), 0
        while frame := frame.f_back:  # type: ignore[assignment]
            count += 1
        return count

    below(sys.getrecursionlimit() - frames_in_use() - 100)
    assert canonical_arguments(text) == (b"[" * 250 + b"]" * 250, Notation.JSON)


def test_a_python_literal_has_a_length_limit() -> None:
    assert notation_of("{'a': '" + "x" * 90_000 + "'}") is Notation.PYTHON
    assert notation_of("{'a': '" + "x" * 100_000 + "'}") is Notation.TEXT


def test_uncached_long_texts_are_read_like_short_ones() -> None:
    filler = '"' + "x" * 5_000 + '"'
    assert canonical_bytes('{"b": 1.0, "a": ' + filler + "}") == canonical_bytes('{"a":' + filler + ',"b":1}')


# -- JSON values that are not text ---------------------------------------------------------------------


def test_a_json_value_and_its_text_have_the_same_bytes() -> None:
    value = {"b": [1.0, True, None], "a": {"é": "\ud800"}}
    assert canonical_json(value) == canonical_bytes(json.dumps(value))


@pytest.mark.parametrize("value", [{"a": math.nan}, [math.inf]])
def test_a_non_finite_number_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: 2}, {"a": b"x"}, [{1}], object()])
def test_a_value_that_is_not_json_is_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match="not"):
        canonical_json(value)


# -- properties --------------------------------------------------------------------------------------

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def json_values(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


# Decoding joins an escaped surrogate pair into one character, so such strings do not round-trip.
any_text = st.text(st.characters(), max_size=8).filter(lambda text: not _PAIR.search(text))
any_value = json_values(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    any_text,
)
# Leaves that are easily confused.
confusable_values = json_values(
    st.sampled_from([0, 1, True, False, None, 1.0, -0.0, 1.5, 10**16, 1e16, 2**53 + 1])
    | st.sampled_from(["", "0", "1", "true", "null", "{}", "[]", '"', "\\", ",", ":", "\ud800", "\\ud800"]),
    st.sampled_from(["", "a", "b", '"', "1", "\ud800"]),
)


def comparable_value(value: Any) -> Any:
    """Returns a Python value that is equal iff the JSON values are equal."""
    if isinstance(value, dict):
        return ("object", frozenset((key, comparable_value(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(comparable_value(item) for item in value))
    if isinstance(value, bool | str) or value is None:
        return (type(value).__name__, value)
    return ("number", Fraction(value))


@st.composite
def values_with_json_text(draw: st.DrawFn, values: st.SearchStrategy[Any] = any_value) -> tuple[Any, str]:
    """Draws a value and one of its JSON texts."""
    value = draw(values)
    ascii_only = draw(st.booleans())
    gap = st.sampled_from(["", "", " ", "\n  ", "\t"])

    def string(text: str) -> str:
        characters = [json.dumps(character, ensure_ascii=ascii_only)[1:-1] for character in text]
        if draw(st.booleans()):
            escapes = {"/": "\\/", "a": "\\u0061"}
            characters = [escapes.get(character, character) for character in characters]
        return '"' + "".join(characters) + '"'

    def number(value: int | float) -> str:
        spellings = [json.dumps(value)]
        if float(value) == value and abs(value) < 2**63:
            spellings += [f"{value}e0", f"{value}E+00"] if isinstance(value, int) else [f"{value:.17e}"]
        if isinstance(value, float) and value.is_integer():
            spellings.append(str(int(value)))
        return draw(st.sampled_from(spellings))

    def write(value: Any) -> str:
        if isinstance(value, dict):
            items = draw(st.permutations(list(value.items())))
            inner = [f"{string(key)}{draw(gap)}:{draw(gap)}{write(item)}" for key, item in items]
            return "{" + draw(gap) + f"{draw(gap)},{draw(gap)}".join(inner) + draw(gap) + "}"
        if isinstance(value, list):
            return "[" + draw(gap) + f"{draw(gap)},".join(map(write, value)) + "]"
        if isinstance(value, str):
            return string(value)
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        return number(value)

    return value, draw(gap) + write(value) + draw(gap)


@given(values_with_json_text())
def test_any_spelling_of_a_value_has_its_canonical_bytes(pair: tuple[Any, str]) -> None:
    value, text = pair
    assert canonical_arguments(text) == (canonical_json(value), Notation.JSON)


@given(any_value, st.booleans(), st.sampled_from([None, 0, 2]), st.booleans())
def test_any_standard_serialiser_setting_has_the_same_bytes(
    value: Any, ascii_only: bool, indent: int | None, sort: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, sort_keys=sort)
    assert canonical_bytes(text) == canonical_json(value)


@given(confusable_values, confusable_values)
def test_bytes_are_equal_iff_values_are_equal(one: Any, other: Any) -> None:
    assert (canonical_json(one) == canonical_json(other)) == (
        comparable_value(one) == comparable_value(other)
    )


@given(confusable_values)
def test_canonical_bytes_are_json_in_canonical_form(value: Any) -> None:
    written = canonical_json(value).decode()
    assert comparable_value(json.loads(written)) == comparable_value(value)
    assert canonical_bytes(written) == written.encode()


def _differs_in_python(value: Any) -> bool:
    """Whether the Python literal of a value is not JSON."""
    if isinstance(value, dict):
        return bool(value)
    if isinstance(value, list):
        return any(map(_differs_in_python, value))
    return value is None or isinstance(value, bool | str)


@given(json_values(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.text(max_size=3)))
def test_a_python_repr_equals_the_json_text(value: Any) -> None:
    if isinstance(value, dict | list) and _differs_in_python(value):
        assert canonical_arguments(repr(value)) == (canonical_json(value), Notation.PYTHON)


fragments = st.lists(
    st.sampled_from("{}[]()\"':,1.e-+_j\\bfr\n \x00\ud800*#;=é")
    | st.sampled_from(
        [
            "\\u",
            "d800",
            "0x",
            "'''",
            "\\N{",
            "true",
            "True",
            "None",
            "NaN",
            "inf",
            "lambda",
            "for",
            "not",
            "if",
        ]
    ),
    max_size=14,
).map("".join)


@given(fragments | st.text(st.characters(), max_size=20))
def test_no_text_raises_and_results_are_deterministic(text: str) -> None:
    canonical, notation = canonical_arguments(text)
    assert canonical
    assert (notation is Notation.TEXT) == canonical.startswith(b"text:")
    assert canonical_arguments(text) == (canonical, notation)
