"""The deltas add up to the same message for every chunking, in every format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.chat.parsing.base import REPLACEMENT_CHARACTER, MessageDelta, ParseProblem
from branchline.chat.parsing.framed import CallFormat
from branchline.chat.parsing.json_scan import is_json_object
from branchline.chat.parsing.output_parser import (
    REASONING_MARKERS,
    TOOL_FORMATS,
    OutputFormat,
    OutputParser,
    ParsedOutput,
)
from branchline.core.message import Message
from tests.chat.parsing.samples import CONVERTED, FORMATS, FRAMED_TEXT, WRITERS, byte_parser, call

MARKERS = {
    "plain": [],
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {'],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=k>",
                    "</parameter>"],
    "harmony": ["<|start|>assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f",
                "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json"],
    "llama3": ["<|python_tag|>", '{"name": "f", "parameters": {', "};", ";"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '[{"name": "f", "arguments": {'],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                 "<｜tool▁call▁end｜>", "function<｜tool▁sep｜>f\n```json\n", "```"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
             "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0"],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>",
                '<parameter name="k">', "</parameter>"],
    "llama4": ["<|python_start|>", "<|python_end|>", "[f(", "k=", "'", ")]", '{"name": "f", "parameters": {'],
    "lfm2": ["[f(", "k=", "'", ")]"],
    "gemma4": ["call:f{", "k:", '<|"|>'],
    "cohere": ['[{"tool_name": "f", "parameters": {'],
    "apertus": ['[{"f": {'],
    "tool_calls": ['{"name": "f", "arguments": {'],
    "nemotron_v2": ['[{"name": "f", "arguments": {'],
    "granite": ['[{"name": "f", "arguments": {'],
    "gigachat": ['{"name": "f", "arguments": {'],
    "solar": ["<|tool_call:name|>f", "<|tool_call:args|>"],
    "functionary": ["f>"],
    "seed": ["<function=f>", "</function>", "<parameter=k>", "</parameter>"],
    "hunyuan": ["f<tool_sep:opensource>", "<arg_key:opensource>", "</arg_value:opensource>"],
    "minimax_m3": ["]<]minimax[>[", '"f">', "<k>", "</k>", "<item>"],
    "deepseek_v32": ['"f">', '<｜DSML｜parameter name="k" string="true">', "</｜DSML｜parameter>"],
    "deepseek_v4": ['"f">', '<｜DSML｜parameter name="k" string="false">', "</｜DSML｜parameter>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", '"f"', '<|open|>argument key="k" type="string"<|sep|>'],
    "minicpm5": ['"f">', '<param name="k">', "<![CDATA[", "]]>", "</param>"],
    "gigachat3": ['{"name": "f", "arguments": {'],
    "functionary_v32": [">>>", "all\n", "f\n", ">>>f\n{"],
    "command_r": ["Action:", "```json", "```", '[{"tool_name": "f", "parameters": {'],
    "functools": ["functools", '[{"name": "f", "arguments": {'],
    "muse_glimmer": ["<|start|>assistant", " to=self", " to=user", " to=f", "<|message|>", "<|eom|>",
                     "<|eot|>", '<atem:invoke name="f">', '<atem:parameter name="k">', "</atem:parameter>",
                     "</atem:invoke>", "<atem:function_calls>", "</atem:function_calls>"],
}  # fmt: skip
FRAGMENTS = [
    "{",
    "}",
    "}}",
    '"',
    "\\",
    ":",
    "[",
    "]",
    "{}",
    "null",
    "\n",
    "\n\n",
    " ",
    "<",
    "f",
    "é",
    "漢",
    "😀",
    "\ufffd",
]
STOP = 256


def complete_outputs(name: str) -> list[str]:
    """Returns well-formed outputs."""
    escaped = '{"k": "\\\\\\"</tool_call>[ARGS]}\\n"}'
    made = [call("f", escaped, format=name), call("g", "{}", 1, format=name)]
    written = [
        write(text, made[:n]) for own, write in WRITERS if own == name for text in ("", "Hi.") for n in (1, 2)
    ]
    return [text for text in written if text]


def malformed_outputs(name: str) -> list[str]:
    """Returns outputs whose arguments are not an object: JSON, not JSON, or with unclosed strings."""
    if name in CONVERTED:
        cuts = ("=k", ' name="k"', "</arg_value>", "k=", '<|"|>', ' key="k"', "</k>")
        return [text.replace(cut, "") for text in complete_outputs(name) for cut in cuts if cut in text]
    malformed = ("[1]", "null", '{"k": 1,}', '{"k": "x}', '{"k": "\n"}', "{k: 1}", "words")
    good = call("g", "{}", 1, format=name)
    return [
        write("", [call("f", arguments, format=name), good])
        for own, write in WRITERS
        if own == name and name != "plain"
        for arguments in malformed
    ]


def outputs(name: str) -> st.SearchStrategy[list[int]]:
    """Generates ids: markers, partial markers, fragments of JSON, calls, any bytes, stop ids."""
    markers = [*MARKERS[name], *itertools.chain(*REASONING_MARKERS.values())]
    if isinstance(tool_format := TOOL_FORMATS[name], CallFormat):
        markers += tool_format.splitter.markers
    halves = st.sampled_from(markers).flatmap(lambda text: st.integers(1, len(text)).map(lambda n: text[:n]))
    known = [*markers, *FRAGMENTS, *complete_outputs(name), *malformed_outputs(name)]
    texts = st.sampled_from(known) | halves | st.text(max_size=4)
    encoded = texts.map(lambda text: list(text.encode("utf-8", "surrogatepass")))
    encoded = encoded | st.lists(st.integers(0, 255), max_size=3) | st.just([STOP])
    return st.lists(encoded, max_size=12).map(lambda pieces: list(itertools.chain(*pieces)))


def join_deltas(deltas: Sequence[MessageDelta]) -> Message:
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    assert [delta.index for delta in deltas if delta.tool_call] == list(range(len(calls)))
    assert all(
        bool(d.content) + bool(d.reasoning_content) + (d.tool_call is not None) == 1 for d in deltas
    ), "one of three"
    text, reasoning = "".join(d.content for d in deltas), "".join(d.reasoning_content for d in deltas)
    return Message("assistant", text, reasoning_content=reasoning, tool_calls=tuple(calls))


def parse_chunks(
    chunks: Sequence[Sequence[int]], finish_reason: str, name: str, reasoning: str, inside: bool
) -> ParsedOutput:
    output = byte_parser(OutputFormat(name, reasoning, inside), [STOP])
    deltas = [delta for chunk in chunks for delta in output.feed(chunk)]
    deltas += output.finish(finish_reason)
    assert join_deltas(deltas) == output.message
    return ParsedOutput(output.message, output.problems)


settings_of_reasoning = st.sampled_from(
    [
        ("none", False),
        ("think", False),
        ("think", True),
        ("mistral", True),
        ("kimi_k3", True),
        ("solar", False),
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80)
@given(data=st.data())
def test_deltas_of_any_chunking_equal_the_whole_parse(name: str, data: st.DataObject) -> None:
    ids = data.draw(outputs(name))
    finish = data.draw(st.sampled_from(["stop", "length", "abort"]))
    reasoning, inside = data.draw(settings_of_reasoning)
    whole = parse_chunks([ids], finish, name, reasoning, inside)
    assert parse_chunks([[token] for token in ids], finish, name, reasoning, inside) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    assert parse_chunks(chunks, finish, name, reasoning, inside) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_no_character_is_lost_or_invented(name: str, data: st.DataObject) -> None:
    ids = data.draw(outputs(name).map(lambda ids: [token for token in ids if token != STOP]))
    text = bytes(ids).decode("utf-8", "replace")
    message = parse_chunks([ids], "length", name, "none", False).message
    if name not in FRAMED_TEXT and not message.tool_calls:
        assert message.content == text, "no call, no framing"
    rest = iter(text)
    assert all(char in rest for char in message.content), "the text occurs in the output, in order"
    if message.tool_calls:
        # The name of a call occurs in the output.
        assert all(made.name in text for made in message.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_malformed_arguments_occur_in_the_output_and_are_reported(name: str, data: st.DataObject) -> None:
    ids = data.draw(outputs(name).map(lambda ids: [token for token in ids if token != STOP]))
    text = bytes(ids).decode("utf-8", "replace")
    finish = data.draw(st.sampled_from(["stop", "length"]))
    parsed = parse_chunks([ids], finish, name, "none", False)
    malformed = [made.arguments for made in parsed.message.tool_calls if not is_json_object(made.arguments)]
    assert bool(malformed) == (ParseProblem.MALFORMED_ARGUMENTS in parsed.problems)
    assert all(arguments in text for arguments in malformed)
    if name not in CONVERTED:
        assert all(made.arguments in text for made in parsed.message.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_may_be_split_anywhere(name: str) -> None:
    for text in [*complete_outputs(name), *malformed_outputs(name)]:
        ids = list(f"<think>\nä\n</think>\n\n{text}".encode())
        whole = parse_chunks([ids], "stop", name, "think", False)
        assert whole.message.reasoning_content.startswith("ä")
        for cut in range(len(ids) + 1):
            assert parse_chunks([ids[:cut], ids[cut:]], "stop", name, "think", False) == whole


@given(
    st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\xff", b"a", b"\xef\xbf\xbd"]))
)
def test_bytes_decode_as_in_a_whole_decode(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    parsed = parse_chunks([list(piece) for piece in pieces], "stop", "plain", "none", False)
    assert parsed.message.content == data.decode("utf-8", "replace")
    try:
        data.decode()
    except UnicodeDecodeError:
        assert parsed.problems == ("invalid_utf8",)
    else:
        assert parsed.problems == ()


VOCABULARY = [
    b"a",
    b" plain words",
    b"<tool_call>",
    b"<tool",
    b"_call>\n",
    b'{"name": "f", "arguments": {}}',
    b"\n</tool_call>",
    b"<think>",
    b"</think>\n\n",
    b"",
    "é".encode(),
    b"x\xe2",
    b"\x82",
    b"\xacy",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xff",
]
"""Tokens with complete characters, and with first, middle, last and invalid bytes of characters."""
STOPS = (len(VOCABULARY), len(VOCABULARY) + 1)
TOKEN_BYTES = [*VOCABULARY, b"<stop>", b"\xe2<stop>"]
UNKNOWN = len(TOKEN_BYTES) + 7


@settings(max_examples=300)
@given(
    ids=st.lists(st.integers(0, len(TOKEN_BYTES) - 1) | st.just(UNKNOWN), max_size=16),
    cuts=st.lists(st.integers(0, 16), max_size=6),
    finish=st.sampled_from(["stop", "length"]),
    name=st.sampled_from(["plain", "hermes"]),
)
def test_single_tokens_parse_like_the_whole(ids: list[int], cuts: list[int], finish: str, name: str) -> None:
    def parsed(chunks: Sequence[Sequence[int]]) -> ParsedOutput:
        output = OutputParser(OutputFormat(name, "think").create_parser(), TOKEN_BYTES.__getitem__, STOPS)
        deltas = [delta for chunk in chunks for delta in output.feed(chunk)]
        deltas += output.finish(finish)
        assert join_deltas(deltas) == output.message
        return ParsedOutput(output.message, output.problems)

    whole = parsed([ids])
    assert parsed([[token] for token in ids]) == whole
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    assert parsed([ids[a:b] for a, b in itertools.pairwise(places)]) == whole
    if name == "plain" and b"think>" not in b"".join(TOKEN_BYTES[token] for token in ids if token != UNKNOWN):
        last_is_stop = bool(ids) and ids[-1] in STOPS
        encoded = [
            TOKEN_BYTES[token] if token != UNKNOWN else REPLACEMENT_CHARACTER
            for token in (ids[:-1] if last_is_stop else ids)
        ]
        assert whole.message.content == b"".join(encoded).decode("utf-8", "replace")
    assert (ParseProblem.UNKNOWN_ID in whole.problems) == (UNKNOWN in ids)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(st.characters(), max_size=30), split=st.integers(0, 30))
def test_a_text_parser_accepts_any_text(name: str, text: str, split: int) -> None:
    first, second = (
        OutputFormat(name, "think").create_parser(),
        OutputFormat(name, "think").create_parser(),
    )
    whole = join_deltas([*first.feed(text), *first.finish(True)])
    assert (
        join_deltas([*second.feed(text[:split]), *second.feed(text[split:]), *second.finish(True)]) == whole
    )
