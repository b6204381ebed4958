"""Values generated as bare text become JSON, typed by the schema of their tool."""

from __future__ import annotations

from typing import Any

import pytest

from branchline.chat.parsing.base import ParseProblem
from branchline.chat.parsing.output_parser import OutputFormat
from tests.chat.parsing import samples
from tests.chat.parsing.samples import call, parse_text


@pytest.mark.parametrize(
    ("schema_key", "sampled", "expected"),
    [
        ("s", "5", '"5"'),
        ("s", "true", '"true"'),
        ("s", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("n", "5", "5"),
        ("n", "1e3", "1e3"),
        ("n", "five", '"five"'),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("maybe", "5", '"5"'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("either", "5", "5"),
        ("either", "5.5", '"5.5"'),
        ("either", "x", '"x"'),
        ("choice", "1", '"1"'),
        ("unknown", "5", "5"),
        ("unknown", '[1, {"a": null}]', '[1, {"a": null}]'),
        ("unknown", '"quoted"', '"\\"quoted\\""'),
        ("unknown", "NaN", '"NaN"'),
        ("unknown", "", '""'),
    ],
)
@pytest.mark.parametrize("name", ["glm", "minimax", "qwen3_coder"])
def test_bare_values_are_typed_by_the_schema(name: str, schema_key: str, sampled: str, expected: str) -> None:
    parameter = f"<parameter={schema_key}>{sampled}</parameter>"
    name_attribute = f' name="{schema_key}"'
    invoke = f'<invoke name="f">{parameter.replace(f"={schema_key}", name_attribute)}</invoke>'
    written = {
        "qwen3_coder": f"<tool_call><function=f>{parameter}</function></tool_call>",
        "glm": f"<tool_call>f<arg_key>{schema_key}</arg_key><arg_value>{sampled}</arg_value></tool_call>",
        "minimax": f"<minimax:tool_call>{invoke}</minimax:tool_call>",
    }
    [made] = parse_text(name, written[name]).message.tool_calls
    assert made.arguments == f'{{"{schema_key}": {expected}}}'


@pytest.mark.parametrize("tools", [[{}], [{"name": 3}], [{"name": "f", "parameters": [1]}], ["junk"], [None]])
def test_invalid_tools_are_ignored(tools: Any) -> None:
    assert OutputFormat("glm").create_parser(tools).feed("<tool_call>f</tool_call>")[0].tool_call == call("f")


def test_arguments_with_a_duplicate_key_are_kept_as_text() -> None:
    pair = "<arg_key>k</arg_key><arg_value>v</arg_value>"
    parsed = parse_text("glm", f"<tool_call>f{pair}{pair}</tool_call>")
    assert parsed.message.tool_calls == (call("f", pair + pair),)
    assert parsed.problems == (ParseProblem.MALFORMED_ARGUMENTS,)


def test_values_keep_their_own_newlines() -> None:
    [made] = parse_text(
        "qwen3_coder", samples.qwen3_coder("", [call("f", '{"s": "\\n  x\\n\\n"}')])
    ).message.tool_calls
    assert made.arguments == '{"s": "\\n  x\\n\\n"}'
