"""A template that fails on a tool gets the fields that the tool lacks; any other gets the tool as written."""

from __future__ import annotations

import pytest

from branchline.chat.generic.chat_template import ChatTemplate
from branchline.core.errors import TemplateError

USER = [{"role": "user", "content": "q"}]
NAME_ONLY = {"type": "function", "function": {"name": "look"}}
STRICT = (
    "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description | trim }} "
    "{{ tool.function.parameters.properties | length }};{% endfor %}"
)


def test_a_template_that_accepts_a_tool_gets_it_as_written() -> None:
    template = ChatTemplate("{{ tools[0] | tojson }}")
    assert template.render(USER, [NAME_ONLY]) == '{"type": "function", "function": {"name": "look"}}'


def test_a_template_that_fails_on_a_tool_gets_the_fields_it_lacks() -> None:
    template = ChatTemplate(STRICT)
    complete = {
        "type": "function",
        "function": {"name": "walk", "description": "d", "parameters": {"properties": {"a": {}}}},
    }
    assert template.render(USER, [NAME_ONLY]) == "look:  0;"
    assert template.render(USER, [complete, NAME_ONLY]) == "walk: d 1;look:  0;"
    assert template.render(USER, [complete]) == "walk: d 1;"
    assert template.render(USER, [NAME_ONLY]) == "look:  0;"


def test_parameters_are_completed_only_if_functions_are_not_enough() -> None:
    template = ChatTemplate(
        "{% for name, value in tools[0].function.parameters.properties.items() %}"
        "{{ name }} {{ value.type + value.description }};{% endfor %}"
    )
    schema = {"properties": {"a": {"type": ["null", "integer"]}, "b": True, "c": {"enum": ["x"]}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    assert template.render(USER, [tool]) == "a integer;b object;c string;"


def test_the_first_error_is_raised_if_no_fields_help() -> None:
    template = ChatTemplate("{{ raise_exception('no tools here') }}")
    with pytest.raises(TemplateError, match="no tools here"):
        template.render(USER, [NAME_ONLY])
    with pytest.raises(TemplateError, match="no tools here"):
        template.render(USER)
