"""Calls that are closed and named but whose arguments are not a JSON object stay calls.

Nothing is repaired: malformed arguments never become an object, so that the model sees its mistake.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline.chat.parsing.base import ParseProblem
from branchline.chat.parsing.json_scan import is_json_object, parse_lenient, split_object
from branchline.loop.tools.arguments import parse_arguments
from tests.chat.parsing import samples
from tests.chat.parsing.samples import WITH_CALLS, Writer, call, parse_text

MALFORMED = (ParseProblem.MALFORMED_ARGUMENTS,)
JSON_CALLERS = [(name, write) for name, write in WITH_CALLS if name not in samples.CONVERTED]
every_json_caller = pytest.mark.parametrize(
    ("name", "write"), JSON_CALLERS, ids=[writer.__name__ for _, writer in JSON_CALLERS]
)


@every_json_caller
@pytest.mark.parametrize("arguments", ["[1]", '"{}"', "null", "3", "[ 1.0,\n2 ]"])
def test_json_that_is_not_an_object_is_kept_as_generated(name: str, write: Writer, arguments: str) -> None:
    made = call("f", arguments, format=name)
    parsed = parse_text(name, write("", [made]))
    assert (parsed.message.content, parsed.message.tool_calls) == ("", (made,))
    assert parsed.problems == MALFORMED


@every_json_caller
@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1,}', '{"a": 1', '{"a": 1}}', "{a: 1}", "{'a': 1}", '{"a": NaN}', "words", '{"a": "\n"}'],
)
def test_text_that_is_not_json_is_kept_as_generated(name: str, write: Writer, arguments: str) -> None:
    output = write("Hm.", [call("f", arguments, format=name)])
    parsed = parse_text(name, output)
    if name == "llama3":
        # Calls have no delimiters there, and an answer may be any text.
        assert (parsed.message.content, parsed.message.tool_calls) == (output, ())
        assert parsed.problems == (ParseProblem.MALFORMED_CALL,)
        return
    if write is samples.mistral_v11 and arguments == '{"a": 1}}':
        # Its calls end with their last bracket, so the rest is text.
        assert (parsed.message.tool_calls, parsed.message.content) == (
            (call("f", '{"a": 1}', format=name),),
            "Hm.}",
        )
        return
    (made,) = parsed.message.tool_calls
    assert (parsed.message.content, parsed.problems) == ("Hm.", MALFORMED)
    # In a list that is not JSON the end of the arguments is unknown, so they end with the call.
    listed = write is samples.mistral
    assert made == (
        call("f", arguments + ', "id": "call00000"') if listed else call("f", arguments, format=name)
    )
    with pytest.raises(ValueError, match=r"\w"):
        parse_arguments(made.arguments)


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>', "}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}\u00a0}</tool_call>', "{}\u00a0}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "{"),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', '"parameters": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {"a": 1}}</tool_call>', '{"a": 1}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments" {"a": 1}}</tool_call>', '"arguments" {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call></tool_call>', "{}}<tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "<parameter=a>1"),
        ("qwen3_coder", "<tool_call><function=f>loose\n</function></tool_call>", "loose"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
            "<parameter=a>\n1\n</parameter>",
        ),
        ("glm", "<tool_call>f\n<arg_key>k</arg_key>\n</tool_call>", "<arg_key>k</arg_key>"),
        ("glm", "<tool_call>f<arg_value>v</arg_value></tool_call>", "<arg_value>v</arg_value>"),
        (
            "minimax",
            '<minimax:tool_call><invoke name="f">\nwords\n</invoke></minimax:tool_call>',
            "words",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>x\n{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "x\n{}",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>",
            "```json\n{}",
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|><|tool_call_end|>",
            "",
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]words\nand more", "words\nand more"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]', ""),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "{}}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}]', '{"a": 1'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "parameters": {}}]', '"parameters": {}'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>words<|call|>", "words"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", ""),
    ],
)  # fmt: skip
def test_any_text_in_place_of_the_arguments_is_kept(name: str, output: str, arguments: str) -> None:
    parsed = parse_text(name, output)
    assert [(made.name, made.arguments) for made in parsed.message.tool_calls] == [("f", arguments)]
    assert (parsed.message.content, parsed.problems) == ("", MALFORMED)


def test_an_object_in_place_of_tags_is_kept_as_generated() -> None:
    parsed = parse_text("qwen3_coder", '<tool_call>\n<function=f>\n{"a": 1.0}\n</function>\n</tool_call>')
    assert parsed.message.tool_calls == (call("f", '{"a": 1.0}'),)
    assert parsed.problems == ()


@pytest.mark.parametrize("write", [samples.hermes, samples.kimi, samples.deepseek, samples.mistral_v11])
@pytest.mark.parametrize("bad", ['{"a": nope}', "nope", '{"a": "x\n}', '{"a": [1}', '{"a": {"b": 1}'])
def test_a_well_formed_call_after_a_malformed_one_is_parsed(write: Writer, bad: str) -> None:
    name = write.__name__.removesuffix("_v11")
    made = (call("bad", bad, 0, format=name), call("good", '{"b": 1}', 1, format=name))
    parsed = parse_text(name, write("", made))
    assert parsed.message.tool_calls == made
    assert (parsed.message.content, parsed.problems) == ("", MALFORMED)


# -- closers in unclosed strings ----------------------------------------------------------------


@pytest.mark.parametrize("write", [samples.hermes, samples.kimi, samples.deepseek_v31])
@pytest.mark.parametrize("between", ["", "\n"])
@pytest.mark.parametrize(
    "behind",
    [(), ("{}",), ('{"b": "</c>"}', "[1]"), ('{"b": "y', '{"b": 1}'), ('{"b": "\\"}', '{"b": "\\"}')],
)
def test_an_unclosed_string_does_not_hide_later_calls(
    write: Writer, between: str, behind: tuple[str, ...]
) -> None:
    name = write.__name__.removesuffix("_v31")
    made = tuple(call("f", text, number, format=name) for number, text in enumerate(('{"a": "x}', *behind)))
    # As templates write it, and without a line break that would end the string.
    parsed = parse_text(name, write("", made).replace("\n", between))
    assert parsed.message.tool_calls == made
    assert (parsed.message.content, parsed.problems) == ("", MALFORMED)


def test_text_after_an_unclosed_string_is_text() -> None:
    bad = '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>'
    for rest in ("so be it", 'so "be" it', '"', "\n\nso\nbe it"):
        parsed = parse_text("hermes", bad + rest)
        assert (parsed.message.tool_calls, parsed.message.content) == ((call("f", '{"a": "x}'),), rest)
    assert parse_text("hermes", bad, "length").problems == (ParseProblem.CUT_CALL,), "the string may go on"
    broken = parse_text("hermes", bad + "\nso", "length")
    assert broken.message.tool_calls == (call("f", '{"a": "x}'),), "it may not"


def test_closers_in_strings_count_as_text_if_brackets_balance() -> None:
    for arguments in ('{"code": "<tool_call></tool_call>"}', '"</tool_call>"', '{"code": "</tool_call>",}'):
        parsed = parse_text("hermes", samples.hermes("", [call("f", arguments)]))
        assert (parsed.message.tool_calls, parsed.message.content) == ((call("f", arguments),), "")


# -- never an object ---------------------------------------------------------------------------------

scraps = st.lists(
    st.sampled_from(['{"name": "f", "arguments": ', '{"name":"f"', ",", '"arguments"', ":", "{", "}", "[",
                     "]", '"', "\\", "1", "a", " ", "\n", "\u00a0", "NaN", "{}", '{"a": 1}', '"x"', "null"]),
    max_size=9,
).map("".join)  # fmt: skip


@given(scraps.map(lambda text: '{"name": "f", "arguments": ' + text) | scraps)
@example('{"name": "f", "arguments": {}\u00a0}')
@example('{"name": "f", "arguments": {}}}')
@example('{"name": "f", "arguments": }')
@settings(max_examples=500)
def test_lenient_arguments_are_never_an_object_and_never_empty(text: str) -> None:
    made = parse_lenient(text)
    if made is not None and split_object(text) is None:
        assert not is_json_object(made.arguments)
        assert made.arguments.strip()
        assert made.arguments in text


@given(st.sampled_from(["hermes", "mistral"]), scraps)
@settings(max_examples=500)
def test_a_body_that_is_not_json_never_gives_an_object(name: str, body: str) -> None:
    opened, closed = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS][", "")}[name]
    for made in parse_text(name, opened + body + closed).message.tool_calls:
        if is_json_object(made.arguments):
            text = body if name == "hermes" else "[" + body
            whole, _ = json.JSONDecoder().raw_decode(text.strip())
            assert json.loads(made.arguments) in [
                item["arguments"] for item in (whole if name == "mistral" else [whole])
            ]


@pytest.mark.parametrize("closed", ["", "}" * 90_000])
def test_deeply_nested_arguments_are_kept(closed: str) -> None:
    deep = '{"a":' * 90_000 + closed
    parsed = parse_text("hermes", samples.hermes("", [call("f", deep)]))
    assert [made.arguments for made in parsed.message.tool_calls] == [deep]
    assert parsed.problems == MALFORMED
    with pytest.raises(ValueError, match="nested too deep"):
        parse_arguments(deep)
