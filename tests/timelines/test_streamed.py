"""Logged streams are read as the response they carried, whatever the server split them into."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.core.errors import MessageError
from branchline.timelines.log import LoggedCall, read_call

REQUEST = {"model": "asked", "messages": [{"role": "user", "content": "a"}], "stream": True}


def chunk(index: int = 0, ids: list[int] | None = None, finish: str | None = None, **delta: Any) -> Any:
    entry: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
    if ids is not None:
        entry["token_ids"] = ids
        entry["logprobs"] = {"content": [{"token": "x", "logprob": -0.25 * token} for token in ids]}
    return {"id": "chatcmpl-1", "model": "served", "object": "chat.completion.chunk", "choices": [entry]}


FIRST = {**chunk(role="assistant", content=""), "prompt_token_ids": [1, 2]}
USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
STREAM = [
    FIRST,
    chunk(ids=[3], reasoning_content="hm"),
    chunk(ids=[4], content="b"),
    chunk(ids=[5], finish="stop", content=""),
    USAGE,
]


def read(response: object) -> LoggedCall:
    return read_call({"request": REQUEST, "response": response}, 1)


def as_events(chunks: list[Any], newline: str = "\n") -> str:
    events = [f"data: {json.dumps(one)}" for one in chunks]
    return (newline * 2).join([": ping", *events, "data: [DONE]", ""])


def ids_of(call: LoggedCall) -> list[list[int]]:
    return [output.ids.tolist() if output.ids is not None else [] for output in call.outputs]


@pytest.mark.parametrize(
    "response",
    [STREAM, as_events(STREAM), as_events(STREAM, "\r\n")],
    ids=["chunks", "events", "events with CRLF"],
)
def test_a_stream_is_the_response_it_carried(response: object) -> None:
    call = read(response)
    assert (call.id, call.model) == ("chatcmpl-1", "served")
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, 2]
    (output,) = call.outputs
    assert (output.message.content, output.message.reasoning_content) == ("b", "hm")
    assert output.finish_reason == "stop"
    assert ids_of(call) == [[3, 4, 5]]
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-0.75, -1.0, -1.25]


def test_choices_may_alternate() -> None:
    call = read(
        [
            FIRST,
            chunk(1, [8], content="x"),
            chunk(0, [3], content="b"),
            chunk(1, [9], "length", content="y"),
            chunk(0, [4], "stop", content="c"),
        ]
    )
    assert [output.message.content for output in call.outputs] == ["bc", "xy"]
    assert [output.finish_reason for output in call.outputs] == ["stop", "length"]
    assert ids_of(call) == [[3, 4], [8, 9]]


def test_parts_of_parallel_tool_calls_are_joined() -> None:
    def part(index: int | None, name: str, arguments: str, call_id: str = "") -> dict[str, Any]:
        body: dict[str, Any] = {"function": {"name": name or None, "arguments": arguments}}
        return {
            **body,
            **({"index": index} if index is not None else {}),
            **({"id": call_id} if call_id else {}),
        }

    for indexes in ((0, 1), (None, None)):
        call = read(
            [
                chunk(ids=[3], tool_calls=[part(indexes[0], "look", "", "call_a")]),
                chunk(ids=[4], tool_calls=[part(indexes[0], "", '{"at": ')]),
                chunk(ids=[5], tool_calls=[part(indexes[0], "", "1}")]),
                chunk(ids=[6], finish="tool_calls", tool_calls=[part(indexes[1], "go", "{}", "call_b")]),
            ]
        )
        calls = call.outputs[0].message.tool_calls
        assert [(one.name, one.arguments, one.id) for one in calls] == [
            ("look", '{"at": 1}', "call_a"),
            ("go", "{}", "call_b"),
        ]


def test_a_character_that_two_chunks_share_is_whole() -> None:
    line = json.dumps([chunk(content="\ud83d"), chunk(content="\ude00!", finish="stop")])
    (output,) = read(json.loads(line)).outputs
    assert output.message.content == "\U0001f600!"


def test_what_is_said_again_is_read_once() -> None:
    again = [{**one, "model": "served", "prompt_token_ids": [1, 2]} for one in STREAM]
    call = read([{**FIRST, "id": "", "model": ""}, *again[1:], chunk(finish="stop"), chunk(finish="")])
    assert (call.id, call.model, ids_of(call)) == ("chatcmpl-1", "served", [[3, 4, 5]])
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, 2]


def test_a_choice_keeps_its_index_and_the_ids_of_its_prompt() -> None:
    only = chunk(1, [3], "stop", content="b")
    only["choices"][0]["prompt_token_ids"] = [1, 2]
    call = read([only])
    assert [output.index for output in call.outputs] == [1]
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, 2]


@pytest.mark.parametrize("response", [STREAM[:3], as_events(STREAM)[:-290]], ids=["chunks", "events"])
def test_a_stream_without_a_finish_reason_was_cut_off(response: object) -> None:
    call = read(response)
    assert [output.finish_reason for output in call.outputs] == ["cancelled"]
    assert ids_of(call)[0] == [3, 4]


def test_an_error_ends_a_stream() -> None:
    call = read([*STREAM[:3], {"error": {"message": "gone"}}])
    assert call.outputs[0].finish_reason == "cancelled"


def test_ids_without_logprobs_are_not_measured() -> None:
    bare = chunk(content="b")
    bare["choices"][0]["token_ids"] = [7]
    for chunks in ([bare, STREAM[2]], [STREAM[2], bare]):
        (output,) = read([FIRST, *chunks]).outputs
        assert output.logprobs is not None
        assert sorted(str(value) for value in output.logprobs.tolist()) == ["-1.0", "nan"]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ([], "response.choices: got [], expected a non-empty list"),
        ([USAGE], "response.choices: got [], expected a non-empty list"),
        ("", "response: got '', expected an object, a list of chunks, or server-sent events"),
        ("no events", "expected an object, a list of chunks, or server-sent events"),
        ([3], "response[0]: got 3, expected a chunk of a chat completion"),
        ([{"type": "message_start"}], "response[0]: got {'type': 'message_start'}, expected a chunk"),
        ([*STREAM[:2], {**STREAM[2], "id": "other"}], "response[2].id: got 'other', expected 'chatcmpl-1'"),
        ([*STREAM[:2], {**STREAM[2], "model": "n"}], "response[2].model: got 'n', expected 'served'"),
        ([FIRST, {**STREAM[1], "prompt_token_ids": [9]}], "response[1].prompt_token_ids: got [9], expected "),
        (
            [FIRST, {**chunk(), "choices": [{"delta": {}, "prompt_token_ids": [9]}]}],
            "response.choices[0].prompt_token_ids: got [9], expected those of response.prompt_token_ids",
        ),
        ([*STREAM, chunk(finish="length")], "choices[0].finish_reason: got 'length', expected 'stop'"),
        ([*STREAM, chunk(ids=[6], content="c")], "expected none after the finish reason 'stop'"),
        ([*STREAM, chunk(content="c")], "expected none after the finish reason 'stop'"),
        ([{"error": {"message": "busy"}}], "response[0].error: got {'message': 'busy'}"),
        ([{"choices": 3}], "response[0].choices: got 3, expected a list"),
        ([{"choices": [3]}], "response[0].choices[0]: got 3, expected a choice"),
        ([{"choices": [{"message": {"content": "x"}}]}], "a complete response is no list"),
        ([{"choices": [{"index": True, "delta": {}}]}], "response[0].choices[0].index: got True"),
        ([{"choices": [{"delta": "x"}]}], "response[0].choices[0].delta: got 'x', expected an object"),
        ([chunk(content=3)], "response[0].choices[0].delta.content: got 3, expected a string or null"),
        ([chunk(tool_calls=3)], "delta.tool_calls: got 3, expected a list or null"),
        ([chunk(tool_calls=[{"index": "0"}])], "delta.tool_calls[0].index: got '0', expected an integer"),
        ([*STREAM[:2], chunk(content="b", finish="stop")], "response[2].choices[0].token_ids: got None"),
        ("data: {\n\ndata: {}\n\n", "response: event 0: got '{', expected JSON"),
    ],
)
def test_what_is_no_stream_is_refused_with_its_position(response: object, problem: str) -> None:
    with pytest.raises(MessageError) as error:
        read(response)
    assert problem in str(error.value)


texts = st.lists(st.text("ab😀", max_size=3), min_size=1, max_size=6)


@given(texts, texts, st.randoms(use_true_random=False))
def test_any_split_of_a_response_reads_as_the_response(one: list[str], other: list[str], random: Any) -> None:
    chunks: list[list[Any]] = []
    for index, parts in enumerate((one, other)):
        utf16 = "".join(parts).encode("utf-16-le")
        units = [utf16[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(utf16), 2)]
        chunks.append([chunk(index, [at], content=unit) for at, unit in enumerate(units)])
        chunks[-1].append(chunk(index, [len(units)], "stop"))
    mixed: list[Any] = []
    while any(chunks):
        mixed.append(random.choice([queue for queue in chunks if queue]).pop(0))
    for response in (json.loads(json.dumps(mixed)), as_events(mixed)):
        call = read(response)
        found = {
            output.message.content: output.ids.tolist() for output in call.outputs if output.ids is not None
        }
        for parts in (one, other):
            text = "".join(parts)
            units_of_text = len(text.encode("utf-16-le")) // 2
            assert found[text] == list(range(units_of_text + 1))
