"""Each format parses what its template writes, and leaves anything that is not a call as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.parsing.base import ParseProblem
from branchline.chat.parsing.output_parser import OutputFormat
from branchline.core.errors import CodecError
from tests.chat.parsing import samples
from tests.chat.parsing.samples import WITH_CALLS, WRITER_IDS, WRITERS, Writer, call, parse_text

CUT = (ParseProblem.CUT_CALL,)
MALFORMED = (ParseProblem.MALFORMED_CALL,)

OPENERS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm": "<tool_call>",
    "harmony": " to=f",
    "llama3": '{"name"',
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "kimi": "<|tool_calls_section_begin|>",
    "minimax": "<minimax:tool_call>",
    "llama4": "[f(",
    "lfm2": "<|tool_call_start|>",
    "gemma4": "<|tool_call>",
    "cohere": "<|START_ACTION|>",
    "apertus": "<|tools_prefix|>",
    "tool_calls": "<tool_calls>",
    "nemotron_v2": "<TOOLCALL>",
    "granite": "<|tool_call|>",
    "gigachat": "<|function_call|>",
    "solar": "<|tool_call:begin|>",
    "functionary": "<function=",
    "seed": "<seed:tool_call>",
    "hunyuan": "<tool_calls:opensource>",
    "minimax_m3": "]<]minimax[>[<tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "kimi_k3": "<|open|>tools<|sep|>",
    "minicpm5": "<function name=",
    "gigachat3": "function call<|role_sep|>",
    "functionary_v32": "f\n{",
    "command_r": "Action:\n```json\n[",
    "functools": "functools[",
    "muse_glimmer": " to=f",
}
"""The text with which a call starts."""
CLOSERS = {
    "deepseek": "<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_end|>",
    "minimax": "</invoke>",
    "hunyuan": "</tool_call:opensource>",
    "minimax_m3": "]<]minimax[>[</invoke>",
    "deepseek_v32": "</｜DSML｜invoke>",
    "deepseek_v4": "</｜DSML｜invoke>",
    "kimi_k3": "<|close|>call<|sep|>",
    "functionary_v32": "}}",
    "command_r": "]",
    "functools": "]",
}
"""The text that completes a call, if more may follow."""

every_writer = pytest.mark.parametrize(("name", "write"), WRITERS, **WRITER_IDS)
every_caller = pytest.mark.parametrize(
    ("name", "write"), WITH_CALLS, ids=[writer.__name__ for _, writer in WITH_CALLS]
)
JSON_CALLERS = [(name, write) for name, write in WITH_CALLS if name not in samples.CONVERTED]
every_json_caller = pytest.mark.parametrize(
    ("name", "write"), JSON_CALLERS, ids=[writer.__name__ for _, writer in JSON_CALLERS]
)


@every_writer
def test_text_alone_is_text(name: str, write: Writer) -> None:
    parsed = parse_text(name, write("Hello, wörld.\n", []))
    assert (parsed.message.content, parsed.message.tool_calls, parsed.problems) == ("Hello, wörld.\n", (), ())


@every_caller
def test_a_call_after_text(name: str, write: Writer) -> None:
    made = call("get_weather", '{"city": "Ulm", "days": 3}', format=name)
    parsed = parse_text(name, write("I will look.", [made]))
    assert parsed.message.tool_calls == (made,)
    # Llama's formats have no text next to a call.
    assert parsed.message.content == ("" if name in samples.UNFRAMED else "I will look.")
    assert parsed.problems == ()


@every_caller
def test_parallel_calls_keep_their_order(name: str, write: Writer) -> None:
    made = [call(f"tool-{n}", f'{{"n": {n}}}', n, format=name) for n in range(3)]
    parsed = parse_text(name, write("", made))
    assert (parsed.message.tool_calls, parsed.message.content, parsed.problems) == (tuple(made), "", ())


@every_caller
def test_arguments_are_kept_as_generated(name: str, write: Writer) -> None:
    arguments = '{"b":1.0,  "a": "\\u00e9\\n",\n "c":[ true,null ] }'
    [made] = parse_text(name, write("", [call("f", arguments, format=name)])).message.tool_calls
    if name in samples.CONVERTED:
        assert made.arguments == '{"b": 1.0, "a": "é\\n", "c": [true, null]}'
    else:
        assert made.arguments == arguments


@every_caller
def test_a_call_cut_anywhere_is_text_and_never_a_call(name: str, write: Writer) -> None:
    output = write("", [call("f", '{"a": {"b": "x"}}', format=name)])
    begins, closes = OPENERS[name], CLOSERS.get(name, output)
    for end in range(1, output.index(closes) + len(closes)):
        parsed = parse_text(name, output[:end], "length")
        assert parsed.message.tool_calls == ()
        framing = {"solar": "<|tool_calls|>", "gigachat3": "<|message_sep|>"}.get(name)
        kept = output[:end].replace(framing, "") if framing else output[:end]
        assert parsed.message.content == kept, "every character of the call is still there"
        if begins in output[:end]:
            assert parsed.problems == CUT


@every_json_caller
def test_a_closer_inside_a_string_closes_nothing(name: str, write: Writer) -> None:
    value = json.dumps({"code": f'print("{write("", [call("g", format=name)])}") \\'}, ensure_ascii=False)
    parsed = parse_text(name, write("", [call("f", value, format=name)]))
    assert parsed.message.tool_calls == (call("f", value, format=name),)
    assert parsed.message.content == ""


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", '<tool_call>{"name": "oops, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments":</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1,}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("qwen3_coder", "<tool_call><function=>\n</function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>"),
        ("glm", "<tool_call>let me see</tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("minimax", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("minimax", "<minimax:tool_call>\nwords\n</minimax:tool_call>"),
        ("minimax", "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>"),
        ("minimax", '<invoke name="f"></invoke>'),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>f:0 {}<|tool_call_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f {}<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("mistral", "[TOOL_CALLS]f g[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f g[ARGS]words"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nom": "g"}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]f"),
        ("llama4", "[f(1)]"),
        ("llama4", "[f(a=g())]"),
        ("llama4", "[f(a=1)] and more"),
        ("llama4", '{"name": "f"}'),
        ("llama4", "<|python_start|>print(1)<|python_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>words<|tool_call_end|>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f<tool_call|>"),
        ("cohere", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>'),
        ("apertus", "<|tools_prefix|>{}<|tools_suffix|>"),
        ("tool_calls", "<tool_calls>\n</tool_calls>"),
        ("granite", "<|tool_call|>[]"),
        ("solar", "<|tool_call:begin|>f<|tool_call:args|>{}<|tool_call:end|>"),
        ("functionary", "<function=f></function>"),
        ("seed", "<seed:tool_call>f</seed:tool_call>"),
        ("hunyuan", "<tool_calls:opensource>\n</tool_calls:opensource>"),
        ("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=f>]<]minimax[>[</invoke>"),
        ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke name=f></｜DSML｜invoke>"),
        ("kimi_k3", "<|open|>tools<|sep|><|open|>call tool=f<|sep|><|close|>call<|sep|>"),
        ("minicpm5", "<function name=f></function>"),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("llama3", '{"name": "f", "parameters": {}} and more'),
        ("llama3", '{"name": "f", "parameters": {}};'),
        ("llama3", '{"name": "f"}'),
        ("llama3", '{"name": "f", "parameters": {"a": 1,}}'),
        ("harmony", "<|channel|>commentary to=python<|message|>print(1)<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{}<|end|>"),
    ],
)
def test_a_block_that_is_not_a_call_is_text_and_reported(name: str, output: str) -> None:
    parsed = parse_text(name, output)
    assert (parsed.message.content, parsed.message.tool_calls) == (output, ())
    assert parsed.problems == MALFORMED


@pytest.mark.parametrize(
    ("name", "output", "text"),
    [
        ("hermes", "Yes.\n\n\n{call}", "Yes."),
        ("hermes", "Yes. \n{call}", "Yes. "),
        ("hermes", "\n{call}\n\n", ""),
        ("hermes", "{call}\n\n{call}\n", ""),
        ("hermes", "a\n{call}\nb\n", "a\nb\n"),
        ("hermes", "a\n", "a\n"),
        ("hermes", "\n\n", "\n\n"),
        ("mistral", "a\n{call}", "a"),
        ("mistral", "a{call}\nb", "a\nb"),
        ("kimi", "a\n{call}", "a"),
        ("deepseek", "a\n\n{call}\n", "a"),
        ("minimax", "a\n{call}\n", "a"),
        ("harmony", "{call}", ""),
    ],
)
def test_only_newlines_next_to_a_call_are_framing(name: str, output: str, text: str) -> None:
    write = dict(WITH_CALLS)[name] if name != "mistral" else samples.mistral
    parsed = parse_text(name, output.replace("{call}", write("", [call("f", format=name)]).lstrip("\n")))
    assert parsed.message.content == text
    assert len(parsed.message.tool_calls) == output.count("{call}")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("apertus", '<|tools_prefix|>[{"f": {}}]'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("gigachat", '<|function_call|>{"name": "f", "arguments": {}}'),
    ],
)
def test_the_end_of_an_output_closes_a_call_whose_closer_may_be_missing(name: str, output: str) -> None:
    parsed = parse_text(name, f"Hm.{output}")
    assert (parsed.message.content, parsed.message.tool_calls, parsed.problems) == ("Hm.", (call("f"),), ())
    cut = parse_text(name, f"Hm.{output}", "length")
    assert (cut.message.content, cut.message.tool_calls, cut.problems) == (f"Hm.{output}", (), CUT)


def test_llama_accepts_a_tag_and_several_calls() -> None:
    two = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}\n'
    assert [made.name for made in parse_text("llama3", two).message.tool_calls] == ["f", "g"]
    for answer in ('{"temperature": 21}', '{"name": "Ulm", "size": 3', "{ hm", "{}", "  ", ""):
        parsed = parse_text("llama3", answer)
        assert (parsed.message.content, parsed.message.tool_calls) == (answer, ())
    assert parse_text("llama3", '{"temperature": 21}').problems == ()


def test_harmony_channels() -> None:
    output = (
        "<|channel|>analysis<|message|>Hm.\n<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Looking. <|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    message = parse_text("harmony", output).message
    assert (message.reasoning_content, message.content) == ("Hm.\n", "Looking. Done.")
    assert message.tool_calls == (call("f"),)


@pytest.mark.parametrize(
    ("output", "finish", "problem"),
    [
        ("just words", "stop", ParseProblem.BROKEN_HEADER),
        ("<|channel|>secret<|message|>x", "stop", ParseProblem.BROKEN_HEADER),
        ("<|start|>user<|message|>x", "stop", ParseProblem.BROKEN_HEADER),
        ("<|channel|>ana", "length", ParseProblem.BROKEN_HEADER),
        ("<|channel|>commentary to=functions.f", "length", ParseProblem.CUT_CALL),
        ("x" * 300 + "<|message|>", "stop", ParseProblem.BROKEN_HEADER),
    ],
)
def test_an_unknown_header_is_text(output: str, finish: str, problem: ParseProblem) -> None:
    parsed = parse_text("harmony", output, finish)
    assert parsed.message.content == output
    assert parsed.problems == (problem,)


def test_the_error_for_an_unknown_format_lists_the_formats() -> None:
    with pytest.raises(CodecError, match=r"'hermez', expected one of plain, hermes, .*minimax"):
        OutputFormat("hermez")
    with pytest.raises(CodecError, match="'thonk', expected one of none, think"):
        OutputFormat("hermes", "thonk")


names = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True)
strings = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]"), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**20) | strings, lambda inner: st.lists(inner, max_size=3)
)
objects = st.dictionaries(names, values, max_size=3)


@every_caller
@settings(max_examples=50)
@given(data=st.data())
def test_well_formed_outputs_parse_back(name: str, write: Writer, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.tuples(names, objects), min_size=1, max_size=3))
    text = "" if name in samples.UNFRAMED else data.draw(strings.map(lambda text: text.strip("\n")))
    made = [
        call(tool, json.dumps(arguments, ensure_ascii=False), number, format=name)
        for number, (tool, arguments) in enumerate(drawn)
    ]
    message = parse_text(name, write(text, made)).message
    assert message.content == text
    if name in samples.CONVERTED - samples.BARE:
        assert [made.name for made in message.tool_calls] == [tool for tool, _ in drawn]
        assert [json.loads(made.arguments) for made in message.tool_calls] == [values for _, values in drawn]
    elif name in samples.BARE:
        # Without a schema a string that looks like JSON is parsed as JSON; the template writes both alike.
        assert [made.name for made in message.tool_calls] == [tool for tool, _ in drawn]
        assert write(text, message.tool_calls) == write(text, made)
    else:
        assert message.tool_calls == tuple(made)


@pytest.mark.parametrize("text", ["", "Looking.", "Two\nlines"])
def test_llama_4_shows_the_text_next_to_calls_between_markers(text: str) -> None:
    made = (call("f", '{"a": 1}'), call("g", "{}"))
    written = "".join(f'{{"name": "{one.name}", "parameters": {one.arguments}}}' for one in made)
    parsed = parse_text("llama4", f"<|python_start|>{text}<|python_end|>{written}")
    assert (parsed.message.content, parsed.message.tool_calls, parsed.problems) == (text, made, ())
    assert parse_text("llama4", f"<|python_start|>{text}<|python_end|>").problems == MALFORMED


@pytest.mark.parametrize(
    ("output", "content", "reasoning", "names"),
    [
        (" to=user<|message|>Hi.\n", "Hi.\n", "", []),
        (" to=self<|message|>Hm.\n<|eom|><|start|>assistant to=user<|message|>Hi.", "Hi.", "Hm.\n", []),
        ("<|message|>Hi.", "Hi.", "", []),
        (
            ' to=self<|message|>a <atem:invoke name="f"></atem:invoke><|eom|><|start|>assistant to=t.f'
            '<|message|><atem:function_calls>\n<atem:invoke name="t.f">\n</atem:invoke>\n'
            '<atem:invoke name="t.g">\n</atem:invoke>\n</atem:function_calls>',
            "",
            'a <atem:invoke name="f"></atem:invoke>',
            ["t.f", "t.g"],
        ),
    ],
)
def test_muse_glimmer_reads_messages_by_their_recipients(
    output: str, content: str, reasoning: str, names: list[str]
) -> None:
    parsed = parse_text("muse_glimmer", output)
    assert (parsed.message.content, parsed.message.reasoning_content) == (content, reasoning)
    assert [made.name for made in parsed.message.tool_calls] == names
    assert parsed.problems == ()


@pytest.mark.parametrize(
    "body",
    [
        "words",
        '<atem:invoke name="f">',
        '<atem:invoke name=""></atem:invoke>',
        'x <atem:invoke name="f"></atem:invoke>',
        '<atem:invoke name="f"></atem:invoke> x',
    ],
)
def test_a_message_to_a_tool_without_readable_calls_is_text(body: str) -> None:
    output = f" to=f<|message|>{body}"
    parsed = parse_text("muse_glimmer", output)
    assert (parsed.message.content, parsed.message.tool_calls, parsed.problems) == (output, (), MALFORMED)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("command_r", "Action: I look [there] for it."),
        ("command_r", "Action:\n```python\n[1]\n```"),
        ("functools", "Use functools.partial([1])."),
        ("functools", "functools {}"),
        ("functionary_v32", "all good"),
        ("functionary_v32", "unknown\nwords"),
        ("gigachat3", "A function call is {}."),
    ],
)
def test_ordinary_text_like_an_opener_is_text(name: str, output: str) -> None:
    parsed = parse_text(name, output)
    assert (parsed.message.content, parsed.message.tool_calls, parsed.problems) == (output, (), ())


def test_functionary_reads_a_prompt_in_text_as_text() -> None:
    parsed = parse_text("functionary_v32", 'all\nType >>> x and >>>y.>>>f\nprint(">>> 1")')
    assert parsed.message.content == 'Type >>> x and >>>y.>>> 1")'
    assert parsed.message.tool_calls == (call("f", 'print("'),)
    parsed = parse_text("functionary_v32", 'f\n{"code": ">>> 1"}')
    assert parsed.message.tool_calls == (call("f", '{"code": ">>> 1"}'),)


@pytest.mark.parametrize("between", ["\n", " ", ""])
@pytest.mark.parametrize("end", ["```", "\n```\n", ""])
def test_command_r_fences_its_calls(between: str, end: str) -> None:
    fence = "```json\n" if end else ""
    parsed = parse_text(
        "command_r", f'Action:{between}{fence}[{{"tool_name": "f", "parameters": {{}}}}]{end}'
    )
    assert (parsed.message.content, parsed.message.tool_calls) == ("", (call("f"),))
    assert parsed.problems == ()
