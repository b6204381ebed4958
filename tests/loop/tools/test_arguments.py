from __future__ import annotations

from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.loop.tools.arguments import argument_problems, argument_validator, parse_arguments
from tests.loop.fake_tools import RecordingTool


def problems(parameters: Any, arguments: Any) -> str:
    return argument_problems(argument_validator(RecordingTool(parameters=parameters)), arguments)


def test_integral_floats_become_integers() -> None:
    assert parse_arguments('{"a": 2.0, "b": 2.5, "c": [1e2], "d": true, "e": null}') == {
        "a": 2,
        "b": 2.5,
        "c": [100],
        "d": True,
        "e": None,
    }
    assert type(parse_arguments('{"a": 2.0}')["a"]) is int
    assert parse_arguments(" \n") == parse_arguments("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e999}', "1e999 is too large a number"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('"text"', "expected an object, got str"),
        ("null", "expected an object, got NoneType"),
        ('{"a":' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_text_that_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(text)


def test_surrogates_are_replaced() -> None:
    assert parse_arguments('{"a": ["\\ud83d"]}') == {"a": ["\ufffd"]}


def test_arguments_that_fit_have_no_problems() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert problems(schema, {"n": 1}) == ""
    assert problems({}, {"anything": 1}) == ""


def test_a_problem_names_its_path() -> None:
    schema = {"type": "object", "properties": {"rows": {"items": {"properties": {"n": {"type": "integer"}}}}}}
    assert problems(schema, {"rows": [{"n": 1}, {"n": "x"}]}) == (
        "arguments.rows[1].n: 'x' is not of type 'integer'"
    )
    assert problems({"required": ["n"]}, {}) == "arguments: 'n' is a required property"


def test_long_and_many_problems_are_shortened() -> None:
    schema = {"properties": {name: {"type": "integer"} for name in "abcd"}}
    text = problems(schema, dict.fromkeys("abcd", "x"))
    assert text.count("is not of type") == 3
    assert text.endswith("; and more")
    assert not problems(schema, dict.fromkeys("abc", "x")).endswith("more")
    assert len(problems(schema, {"a": "x" * 10_000})) < 250


def test_local_references_are_resolved() -> None:
    schema = {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"required": ["x"]}}}
    assert problems(schema, {"p": {}}) == "arguments.p: 'x' is a required property"


def test_remote_references_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: Any, **__: Any) -> Any:
        pytest.fail("fetched")

    monkeypatch.setattr("urllib.request.urlopen", fetched)
    with pytest.raises(Exception, match=r"Unresolvable|http://127.0.0.1/s.json"):
        problems({"$ref": "http://127.0.0.1/s.json"}, {})


def test_an_invalid_schema_is_refused_with_the_tools_name() -> None:
    with pytest.raises(
        InputError, match="parameters of tool 'recorder': expected a JSON schema, but 'wizard'"
    ):
        argument_validator(RecordingTool(parameters={"type": "wizard"}))
    with pytest.raises(InputError, match="parameters of tool 'recorder': expected a JSON schema"):
        argument_validator(RecordingTool(parameters={"default": object()}))


@pytest.mark.parametrize("schema", [{}, {"function": "x"}, {"function": {"name": "other"}}])
def test_the_schema_must_have_the_tools_name(schema: Any) -> None:
    tool = RecordingTool()
    tool.schema = schema
    with pytest.raises(InputError, match=r"schema of tool 'recorder': got .*, expected"):
        argument_validator(tool)
