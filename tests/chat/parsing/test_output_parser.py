"""OutputParser: stop ids, unknown ids, when deltas are emitted, and cost."""

from __future__ import annotations

import time

import numpy as np
import pytest

from branchline.chat.parsing.base import MessageDelta, ParseProblem
from branchline.chat.parsing.output_parser import OutputFormat, OutputParser
from tests.chat.parsing.samples import FORMATS, byte_parser, call, glm, harmony, hermes

STOP, OTHER = 256, 257


def test_a_trailing_stop_id_is_not_text() -> None:
    parsed = byte_parser(OutputFormat("plain"), [STOP]).parse([*b"hi", STOP], "stop")
    assert (parsed.message.content, parsed.problems) == ("hi", ())
    assert byte_parser(OutputFormat("plain"), [STOP]).parse([STOP], "stop").message.is_empty


def test_a_stop_id_that_is_not_last_is_text() -> None:
    parser = byte_parser(OutputFormat("plain"), [STOP, OTHER])
    assert parser.feed([104, STOP]) == [MessageDelta(content="h")]
    assert parser.feed([OTHER]) == [MessageDelta(content="<stop 256>")]
    assert parser.finish("stop") == []
    assert parser.message.content == "h<stop 256>"


def test_ids_may_be_an_array() -> None:
    ids = np.frombuffer("hé".encode(), np.uint8).astype(np.int32)
    assert byte_parser(OutputFormat("plain")).parse(ids, "stop").message.content == "hé"


def test_an_unknown_id_is_reported_and_does_not_raise() -> None:
    parsed = OutputParser(OutputFormat("plain").create_parser(), {1: b"a"}.__getitem__).parse(
        [1, 99, 1], "stop"
    )
    assert (parsed.message.content, parsed.problems) == ("a\ufffda", (ParseProblem.UNKNOWN_ID,))


def test_a_character_cut_by_length_is_reported() -> None:
    parsed = byte_parser(OutputFormat("hermes")).parse("a€".encode()[:-1], "length")
    assert (parsed.message.content, parsed.problems) == ("a\ufffd", (ParseProblem.INVALID_UTF8,))


def test_an_output_that_ends_in_a_stop_id_was_not_cut() -> None:
    ids = [*harmony("", [call("f")]).removesuffix("<|call|>").encode(), STOP]
    assert byte_parser(OutputFormat("harmony"), [STOP]).parse(ids, "length").message.tool_calls == (
        call("f"),
    )
    assert byte_parser(OutputFormat("harmony"), [STOP]).parse(ids[:-1], "length").problems == (
        ParseProblem.CUT_CALL,
    )


def test_a_stop_that_opens_the_next_message_is_not_text() -> None:
    # GLM stops by generating the opener of the tool result.
    ids = [*glm("Hm.", [call("f")]).encode(), STOP]
    assert byte_parser(OutputFormat("glm"), [STOP]).parse(ids, "stop").message.content == "Hm."


def test_text_is_emitted_at_once_and_a_call_when_it_is_complete() -> None:
    parser = OutputFormat("hermes").create_parser()
    assert parser.feed("Hi") == [MessageDelta(content="Hi")]
    assert parser.feed(" <b") == [MessageDelta(content=" <b")], "not the start of a marker"
    assert parser.feed(" <t\n") == [MessageDelta(content=" <t")]
    assert parser.feed("\n<tool") == [], "newlines and partial markers are held back"
    assert parser.feed("box>") == [MessageDelta(content="\n\n<toolbox>")]
    output = hermes("", [call("f")])
    start, last = output[:-1], output[-1]
    assert parser.feed(start) == []
    assert parser.feed(last) == [MessageDelta(tool_call=call("f"))]
    assert parser.feed("\n") == parser.finish(False) == []


def test_reasoning_is_emitted_while_it_arrives() -> None:
    parser = OutputFormat("hermes", "think").create_parser()
    assert parser.feed("<think>\n") == []
    assert parser.feed("so\n") == [MessageDelta(reasoning_content="so")]
    assert parser.feed("what") == [MessageDelta(reasoning_content="\nwhat")]


OPENINGS = {"llama3": b'{"name": "', "mistral": b'[TOOL_CALLS][{"', "harmony": b"<|channel|>final<|message|>"}
BODIES = {
    "text": b"word <b> ",
    "newlines": b"\n",
    "call": b'\\"[x]}',
    "markers": b"<",
    # Each opens a string that contains all that follows.
    "strings": b'<tool_call>"\\"</tool_call>',
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", BODIES)
def test_cost_is_linear_in_the_length_of_the_output(name: str, kind: str) -> None:
    start = OPENINGS.get(name, b"<tool_call>") if kind == "call" else b""

    def cpu_seconds(tokens: int) -> float:
        parser = OutputParser(OutputFormat(name, "think").create_parser(), [start, BODIES[kind]].__getitem__)
        began = time.process_time()
        for token in [0] + [1] * tokens:
            parser.feed([token])
        parser.finish("stop")
        return time.process_time() - began

    # Quadratic cost would be 64 times as much, each time; what else the machine does may double one of them.
    short = min(cpu_seconds(1_000) for _ in range(3))
    assert any(cpu_seconds(8_000) < 20 * short + 0.05 for _ in range(10))
