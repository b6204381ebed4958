"""ChatTemplate: template features, errors, and the comparison of minijinja with jinja2."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Message, ToolCall
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.template_probe import probe_template_traits
from branchline.core.errors import CodecError, MissingExtraError, TemplateError
from branchline.core.extras import install_line
from branchline.core.message import Media
from tests.chat.families import FAMILIES, load_codec
from tests.chat.harness import save_byte_level, user

CHATML = (
    "{%- if tools %}tools:{{ tools | tojson }}\n{% endif %}"
    "{%- for message in messages %}"
    "<|start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def raw(role: str, content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def open_codec(path: Path, template: str) -> GenericCodec:
    return GenericCodec.open(save_byte_level(path, chat_template=template))


# Rendering


def test_json_is_written_without_escapes_and_in_the_order_of_its_keys(tmp_path: Path) -> None:
    call = ToolCall("f", '{"z": "<é>", "a": 1}')
    messages = [user("hi"), Message("assistant", "", tool_calls=(call,))]
    codec = open_codec(tmp_path, CHATML)
    ids = codec.encode_prompt(messages, [{"name": "<f>"}])
    assert codec.decode(ids) == (
        'tools:[{"name": "<f>"}]\n<|start|>user\nhi<|end|>\n'
        '<|start|>assistant\n{"z": "<é>", "a": 1}<|end|>\n<|start|>assistant\n'
    )
    assert ids[: len("tools:")].tolist() == codec.tokenizer.encode("tools:").tolist()
    assert codec.tokenizer.added_tokens["<|start|>"] in ids


def test_templates_may_use_special_tokens_loop_controls_generation_blocks_and_a_clock() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}",
        {"bos_token": "<|start|>"},
    )
    messages = [raw("user", "a"), raw("user", "b")]
    assert template.render(messages, now=datetime(2026, 3, 1)) == "<|start|>b2026"


def test_text_parts_are_one_string_and_images_are_parts(tmp_path: Path) -> None:
    probe = open_codec(tmp_path, "{{ messages[0].content | tojson }}").probe()
    assert probe.render([Message("user", "ab", parts=("a", "b"))]) == '"ab"'
    image = Media("image", "d", url="http://x/y.png")
    assert "http://x/y.png" in probe.render([Message("user", "a", parts=("a", image))])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_template_that_fails_raises_a_template_error(template: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        ChatTemplate(template).render([raw("user")])


def test_a_template_that_does_not_compile_is_reported_with_its_directory(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="does not compile") as error:
        open_codec(tmp_path, "{% if %}")
    assert str(tmp_path) in str(error.value)


def test_a_missing_jinja2_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_line("serve"))):
        ChatTemplate(PLAIN)


# minijinja


@pytest.mark.parametrize("family", FAMILIES)
def test_real_templates_render_equally_with_both_engines(family: str) -> None:
    for tools in (False, True):
        template = load_codec(family).profile(tools=tools).template
        assert template.uses_minijinja, template.fallback_reason


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1e22 }}" + PLAIN,
        PLAIN.replace("m.content", "(m.content or '').title()"),
    ],
    ids=["float", "text"],
)
def test_probing_disables_minijinja_if_the_engines_differ(source: str) -> None:
    template = ChatTemplate(source)
    assert template.uses_minijinja
    probe_template_traits(template)
    assert not template.uses_minijinja
    assert template.fallback_reason


def test_a_template_that_minijinja_cannot_compile_is_rendered_by_jinja2() -> None:
    template = ChatTemplate(PLAIN + "{% generation %}{% endgeneration %}")
    assert not template.uses_minijinja
    assert "minijinja" in template.fallback_reason
    assert template.render([raw("user")]) == "user:x\n"


@pytest.mark.parametrize(
    "messages",
    [
        [raw("critic")],
        [raw("user"), raw("assistant", reasoning_content="r", mood="good")],
        [raw("user", None)],
        [raw("user"), raw("user"), raw("tool"), raw("user")],
    ],
    ids=["role", "field", "null", "order"],
)
def test_a_difference_in_an_unprobed_shape_never_reaches_a_prompt(messages: list[dict[str, Any]]) -> None:
    # The engines print 1e22 differently; the template prints it only for conversations like this one.
    condition = (
        "messages[0].role == 'critic' or messages[-1].mood or messages[0].content is none "
        "or messages | length == 4"
    )
    template = ChatTemplate(PLAIN + "{% if " + condition + " %}{{ 1e22 }}{% endif %}")
    for _ in range(2):
        assert template.render([raw("user"), raw("assistant")]) == "user:x\nassistant:x\n"
    assert template.uses_minijinja
    assert template.render(messages).endswith("1e+22")
    assert not template.uses_minijinja
    assert "1e+22" in template.fallback_reason


@pytest.mark.parametrize("value", [True, 2**70, 1.5, 1e16, 1e-7, -1e300, None, [True], {"a": {"b": 1e22}}])
def test_every_type_of_argument_is_a_new_shape(value: object) -> None:
    template = ChatTemplate(
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.at }}{% endfor %}"
    )

    def render(argument: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": {"at": argument}}}
        return template.render([raw("assistant", tool_calls=[call])])

    assert render("text") == "text"
    assert render(1) == "1"
    assert render(0.5) == "0.5"
    assert render(value) == str(value)


SHOWS_ARGUMENTS = (
    PLAIN + "{% for m in messages if m.tool_calls %}"
    "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }},{{ v|tojson }},"
    "{{ v|string }};{% endfor %}{{ m.tool_calls[0].function.arguments|tojson }}{% endfor %}"
    "{% for t in tools or [] if t.minimum is defined %}{{ t.minimum }},"
    "{{ t.minimum|tojson }},{{ t|tojson }}{% endfor %}{{ budget }}"
)


def render_arguments(template: ChatTemplate, **arguments: object) -> str:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return template.render([raw("user"), raw("assistant", tool_calls=[call])])


@given(numbers=st.lists(st.one_of(st.floats(), st.floats(-1e6, 1e6), st.integers(), st.just(21.0))))
@settings(max_examples=200, deadline=None)
def test_numbers_are_printed_as_python_prints_them(numbers: list[float]) -> None:
    """The probes verified minijinja with other numbers; none of these may depend on that."""
    exact = ChatTemplate(SHOWS_ARGUMENTS, use_minijinja=False)
    render_arguments(FAST, at=0.5, far=1)
    for number in numbers:
        for argument in (number, [number], {"deep": [[[[number]]]]}):
            assert render_arguments(FAST, at=argument) == render_arguments(exact, at=argument)
        tools = [{"name": "f", "minimum": number}]
        for fields in ({"tools": tools}, {"chat_template_kwargs": {"budget": number}}):
            messages = [raw("user")]
            assert FAST.render(messages, **fields) == exact.render(messages, **fields)  # type: ignore[arg-type]
    assert FAST.uses_minijinja, FAST.fallback_reason


FAST = ChatTemplate(SHOWS_ARGUMENTS)


@pytest.mark.parametrize("number", [21.0, 1e16, 1e-7, -0.0, 1e22])
def test_a_number_that_minijinja_prints_differently_is_rendered_by_jinja2(number: float) -> None:
    template = ChatTemplate(SHOWS_ARGUMENTS)
    probe_template_traits(template)
    assert template.uses_minijinja, template.fallback_reason
    assert render_arguments(template, at=0.5).endswith('at=0.5,0.5,0.5;{"at": 0.5}')
    assert f"at={number},{number}," in render_arguments(template, at=number)
    assert template.uses_minijinja


def test_whitespace_that_only_python_trims_is_a_new_shape() -> None:
    template = ChatTemplate("{{ messages[0].content | trim }}")
    assert template.render([raw("user", " x ")]) == "x"
    assert template.render([raw("user", " x \x1f")]) == "x"


def test_a_shape_is_compared_once_however_long_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render_jinja = jinja2.Template.render

    def counting(self: jinja2.Template, context: dict[str, Any]) -> str:
        rendered.append(len(context["messages"]))
        return render_jinja(self, context)

    monkeypatch.setattr(jinja2.Template, "render", counting)
    template = ChatTemplate(PLAIN)
    messages = [raw("system")]
    for number in range(20):
        messages += [raw("user", f"ask {number}"), raw("assistant", f"answer {number}")]
        template.render(messages[:-1])
    assert rendered == [2, 4]
    template.render(messages[:-1], chat_template_kwargs={"enable_thinking": False})
    template.render(messages[:-1], [{"name": "f"}])
    template.render(messages[:-1], add_generation_prompt=False)
    assert rendered == [2, 4, 40, 40, 40]


def test_an_error_in_minijinja_falls_back_to_jinja2() -> None:
    template = ChatTemplate("{{ messages[0].content.format(1) if '{' in messages[0].content }}")
    assert template.render([raw("user", "x")]) == ""
    assert template.render([raw("user", "{}")]) == "1"
