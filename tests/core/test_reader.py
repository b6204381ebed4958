"""Messages are read in every form that clients use; errors name the field."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.errors import MessageError
from branchline.core.message import ROLES, Message, ToolCall, WireShape, is_same_message
from branchline.core.reader import read_message, read_messages, write_message

WAV = base64.b64encode(b"RIFF").decode()
LINK = "https://a.example/x"


def assistant_message(content: Any, **fields: Any) -> Message:
    return read_message({"role": "assistant", "content": content, **fields})


def user_message(*parts: Any) -> Message:
    return read_message({"role": "user", "content": list(parts)})


def read_tool_call(call: Any) -> ToolCall:
    return assistant_message(None, tool_calls=[call]).tool_calls[0]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# -- roles and content -------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_read(role: Any) -> None:
    assert read_message({"role": role, "content": "hi"}) == Message(role, "hi")
    assert read_message({"role": role, "content": "hi", "name": "x"}) == Message(role, "hi", name="x")


@pytest.mark.parametrize(
    ("raw", "content", "shape"),
    [
        ({"content": "hi"}, "hi", WireShape.PLAIN),
        ({"content": ""}, "", WireShape.PLAIN),
        ({"content": None}, "", WireShape.NULL_CONTENT),
        ({}, "", WireShape.ABSENT_CONTENT),
        ({"content": []}, "", WireShape.PART_LIST),
        ({"content": [text_part("hi")]}, "hi", WireShape.PART_LIST),
        ({"content": ["hi"]}, "hi", WireShape.PART_LIST),
        ({"content": [{"type": "input_text", "text": "hi"}]}, "hi", WireShape.PART_LIST),
        ({"content": [{"type": "output_text", "text": "hi", "annotations": []}]}, "hi", WireShape.PART_LIST),
        ({"content": "hi", "tool_calls": None}, "hi", WireShape.NULL_CALLS),
        ({"content": "hi", "tool_calls": []}, "hi", WireShape.EMPTY_CALLS),
        ({"content": None, "tool_calls": None}, "", WireShape.NULL_CONTENT | WireShape.NULL_CALLS),
        ({"content": [text_part("hi")], "tool_calls": []}, "hi", WireShape.PART_LIST | WireShape.EMPTY_CALLS),
    ],
)
def test_every_form_of_a_text_is_read_and_recorded_as_wire_shape(
    raw: dict[str, Any], content: str, shape: WireShape
) -> None:
    message = read_message({"role": "assistant", **raw})
    assert (message.content, message.parts, message.wire_shape) == (content, (), shape)
    assert message.key == Message("assistant", content).key


def test_several_texts_are_joined_and_kept_in_order() -> None:
    message = user_message(text_part("a"), text_part(""), "b")
    assert (message.content, message.parts) == ("ab", ("a", "", "b"))
    assert message.key == Message("user", "ab").key
    assert user_message("a", "b").parts == ("a", "b")


def test_unknown_fields_are_ignored() -> None:
    ignored: dict[str, Any] = {"annotations": [], "audio": None, "cache_control": {"a": 1}}
    raw = {"role": "assistant", "content": "hi", **ignored}
    assert read_message(raw) == Message("assistant", "hi")


def test_null_equals_an_absent_field() -> None:
    nothing = dict.fromkeys(
        ["refusal", "name", "tool_call_id", "id", "function_call", "reasoning_content", "reasoning_details"]
    )
    assert assistant_message("hi", **nothing) == Message("assistant", "hi")


def test_ids_are_read() -> None:
    message = read_message({"role": "tool", "content": "1", "tool_call_id": "c1", "id": "m1", "name": "f"})
    assert message == Message("tool", "1", tool_call_id="c1", id="m1", name="f")


def test_messages_are_read_in_order() -> None:
    read = read_messages([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert read == (Message("system", "s"), Message("user", "u"))


# -- reasoning and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"reasoning_text": "hm"},
        {"reasoning_content": "", "reasoning": "hm"},
        {"reasoning_content": None, "thinking": "hm"},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "h"},
                {"type": "reasoning.text", "text": "m"},
            ]
        },
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"text": "hm"}]},
        {
            "reasoning_details": [],
            "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        },
        {"reasoning_details": ["h", "m"]},
        {"reasoning": "hm", "reasoning_details": [{"text": "hm"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, text_part("hi")]},
        {"content": [{"type": "reasoning", "text": "hm"}, text_part("hi")]},
        {
            "content": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                text_part("hi"),
            ]
        },
        {"content": [{"type": "reasoning_text", "text": "hm"}, text_part("hi")]},
        {"content": [{"type": "thinking", "thinking": [text_part("h"), text_part("m")]}, text_part("hi")]},
        {
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "hm"},
                "hi",
            ]
        },
        {"content": [text_part("hi")], "reasoning_content": "hm"},
    ],
)
def test_reasoning_is_read_from_every_known_field(fields: dict[str, Any]) -> None:
    message = read_message({"role": "assistant", "content": "hi", **fields})
    assert (message.content, message.reasoning_content, message.parts) == ("hi", "hm", ())


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "", "refusal": "no"},
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": [{"type": "refusal", "refusal": "o"}], "refusal": "n"},
    ],
)
def test_a_refusal_is_read_as_a_field_or_a_part(fields: dict[str, Any]) -> None:
    message = read_message({"role": "assistant", **fields})
    assert (message.content, message.refusal) == ("", "no")


# -- tool calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "type": None, "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "index": 0},
        {"id": "c1", "name": "f", "arguments": {"a": 1}},
    ],
)
def test_a_call_is_read_in_every_form(call: dict[str, Any]) -> None:
    assert read_tool_call(call) == ToolCall("f", '{"a":1}', id="c1")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ({"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls -la"}}, "custom"),
        ({"id": "c1", "type": "custom", "name": "sh", "input": "ls -la"}, "custom"),
        ({"id": "c1", "type": "shell", "function": {"name": "sh", "arguments": "ls -la"}}, "shell"),
    ],
)
def test_calls_of_other_tool_types_are_read(call: dict[str, Any], kind: str) -> None:
    assert read_tool_call(call) == ToolCall("sh", "ls -la", id="c1", kind=kind)


@pytest.mark.parametrize(
    "body", [{"name": "f"}, {"name": "f", "arguments": None}, {"name": "f", "arguments": ""}]
)
def test_a_call_without_arguments_has_empty_ones(body: dict[str, Any]) -> None:
    assert read_tool_call({"id": "c1", "function": body}) == ToolCall("f", "", id="c1")


@pytest.mark.parametrize("ids", [{}, {"id": None}, {"id": ""}])
def test_a_call_may_have_no_id(ids: dict[str, Any]) -> None:
    assert read_tool_call({"function": {"name": "f", "arguments": "{}"}, **ids}) == ToolCall("f", "{}")


def test_a_legacy_function_call_is_a_call_without_an_id() -> None:
    message = assistant_message(None, function_call={"name": "f", "arguments": '{"a": 1}'})
    assert message.tool_calls == (ToolCall("f", '{"a": 1}'),)
    assert assistant_message(None, function_call={"name": "g"}, tool_calls=None).tool_calls == (
        ToolCall("g"),
    )


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"b": [1, True, None], "a": "é"}, '{"b":[1,true,null],"a":"é"}'),
        ({}, "{}"),
        ([1], "[1]"),
        (0, "0"),
        (False, "false"),
        ({"a": 10**30}, '{"a":1000000000000000000000000000000}'),
        ({"a": "\ud800"}, '{"a":"\ufffd"}'),
        # Not valid JSON; `null` would be another call.
        ({"a": float("nan")}, '{"a":NaN}'),
    ],
)
def test_arguments_that_are_not_a_string_are_serialized(arguments: Any, written: str) -> None:
    assert read_tool_call({"function": {"name": "f", "arguments": arguments}}).arguments == written


# -- errors ------------------------------------------------------------------------------------------

IMAGE = "image_url"
INVALID_MESSAGES: list[tuple[Any, str]] = [
    (None, ""),
    ("hi", ""),
    ([], ""),
    ({}, "role"),
    ({"role": None}, "role"),
    ({"role": "wizard", "content": "hi"}, "role"),
    ({"role": ["user"], "content": "hi"}, "role"),
    ({"role": {}, "content": "hi"}, "role"),
    ({"role": 1, "content": "hi"}, "role"),
    ({"content": 1}, "content"),
    ({"content": False}, "content"),
    ({"content": {"type": "text", "text": "hi"}}, "content"),
    ({"content": [1]}, "content[0]"),
    ({"content": ["a", None]}, "content[1]"),
    ({"content": [[]]}, "content[0]"),
    ({"content": [{}]}, "content[0].type"),
    ({"content": [{"text": "hi"}]}, "content[0].type"),
    ({"content": [{"type": "hologram"}]}, "content[0].type"),
    ({"content": [{"type": ["text"]}]}, "content[0].type"),
    ({"content": [{"type": "text"}]}, "content[0].text"),
    ({"content": ["a", {"type": "text", "text": None}]}, "content[1].text"),
    ({"content": [{"type": "refusal", "refusal": 1}]}, "content[0].refusal"),
    ({"content": [{"type": IMAGE}]}, "content[0]"),
    ({"content": [{"type": IMAGE, IMAGE: ""}]}, "content[0]"),
    ({"content": [{"type": IMAGE, IMAGE: {}}]}, "content[0].image_url"),
    ({"content": [{"type": IMAGE, IMAGE: {"url": 1}}]}, "content[0].image_url"),
    (
        {"content": [{"type": IMAGE, IMAGE: {"url": LINK, "detail": 1}}]},
        "content[0].image_url.detail",
    ),
    ({"content": [{"type": IMAGE, IMAGE: {"url": "data:x"}}]}, "content[0].image_url.url"),
    ({"content": [{"type": IMAGE, IMAGE: {"url": "data:,"}}]}, "content[0].image_url.url"),
    ({"content": [{"type": IMAGE, IMAGE: {"url": "data:;base64,"}}]}, "content[0].image_url.url"),
    (
        {"content": [{"type": IMAGE, IMAGE: {"url": "data:;base64,!"}}]},
        "content[0].image_url.url",
    ),
    ({"content": [{"type": IMAGE, IMAGE: "data:;base64,A"}]}, "content[0].image_url"),
    (
        {"content": [{"type": "input_audio", "input_audio": {"data": "é", "format": "wav"}}]},
        "content[0].input_audio.data",
    ),
    (
        {"content": [{"type": "input_audio", "input_audio": {"data": WAV, "format": 1}}]},
        "content[0].input_audio.format",
    ),
    ({"content": [{"type": "image", "source": {"data": "?"}}]}, "content[0].source.data"),
    ({"content": [{"type": "thinking", "thinking": 1}], "name": 1}, "name"),
    ({"content": "hi", "name": 1}, "name"),
    ({"content": "hi", "id": {}}, "id"),
    ({"content": "hi", "tool_call_id": 7}, "tool_call_id"),
    ({"content": "hi", "refusal": []}, "refusal"),
    ({"content": "hi", "reasoning_content": 1}, "reasoning_content"),
    ({"content": "hi", "reasoning": {"effort": "low"}}, "reasoning"),
    ({"content": "hi", "thinking": ["hm"]}, "thinking"),
    ({"content": "hi", "reasoning_details": "hm"}, "reasoning_details"),
    ({"content": "hi", "reasoning_details": {}}, "reasoning_details"),
    ({"content": "hi", "thinking_blocks": [{"thinking": "h"}, 1]}, "thinking_blocks[1]"),
    ({"tool_calls": {}}, "tool_calls"),
    ({"tool_calls": ""}, "tool_calls"),
    ({"tool_calls": 0}, "tool_calls"),
    ({"tool_calls": {"a": 1}}, "tool_calls"),
    ({"tool_calls": [None]}, "tool_calls[0]"),
    ({"tool_calls": [{"name": "f"}, "f"]}, "tool_calls[1]"),
    ({"tool_calls": [{}]}, "tool_calls[0].function"),
    ({"tool_calls": [{"id": "c1", "type": "function"}]}, "tool_calls[0].function"),
    ({"tool_calls": [{"function": None}]}, "tool_calls[0].function"),
    ({"tool_calls": [{"function": "f"}]}, "tool_calls[0].function"),
    ({"tool_calls": [{"function": {}}]}, "tool_calls[0].function.name"),
    ({"tool_calls": [{"function": {"name": ""}}]}, "tool_calls[0].function.name"),
    ({"tool_calls": [{"name": 1}]}, "tool_calls[0].name"),
    ({"tool_calls": [{"type": "custom", "custom": 1}]}, "tool_calls[0].custom"),
    ({"tool_calls": [{"type": "custom", "custom": {}}]}, "tool_calls[0].custom.name"),
    ({"tool_calls": [{"type": ["f"], "function": {"name": "f"}}]}, "tool_calls[0].type"),
    ({"tool_calls": [{"id": 1, "function": {"name": "f"}}]}, "tool_calls[0].id"),
    (
        {"tool_calls": [{"function": {"name": "f", "arguments": {1, 2}}}]},
        "tool_calls[0].function.arguments",
    ),
    ({"function_call": "f"}, "function_call"),
    ({"function_call": {"arguments": "{}"}}, "function_call.name"),
]


@pytest.mark.parametrize(
    ("raw", "field"),
    INVALID_MESSAGES,
    ids=[json.dumps(raw, default=list)[:70] for raw, _ in INVALID_MESSAGES],
)
def test_an_invalid_message_is_rejected_with_its_field(raw: Any, field: str) -> None:
    if isinstance(raw, dict) and raw and "role" not in raw:
        raw = {"role": "assistant", **raw}
    with pytest.raises(MessageError) as caught:
        read_messages([{"role": "user", "content": "hi"}] * 3 + [raw])
    path = f"messages[3].{field}" if field else "messages[3]"
    assert caught.value.field == path
    assert str(caught.value).startswith(f"{path}: got ")


@pytest.mark.parametrize("raw", [None, [], (), {}, "hi", 0, {"role": "user", "content": "hi"}])
def test_a_request_without_messages_is_rejected(raw: Any) -> None:
    with pytest.raises(MessageError) as caught:
        read_messages(raw)
    assert caught.value.field == "messages"


def test_an_error_in_a_single_message_names_its_path() -> None:
    for where, index, field in (("message", None, "message.role"), ("choices[0].message", 2, None)):
        with pytest.raises(MessageError) as caught:
            read_message({"role": "wizard"}, where, index)
        assert caught.value.field == (field or "choices[0].message[2].role")


def test_an_error_shows_the_value_and_the_expectation() -> None:
    with pytest.raises(MessageError) as caught:
        read_message({"role": "wizard"})
    assert str(caught.value) == (
        "message.role: got 'wizard', expected one of system, developer, user, assistant, tool, function"
    )
    assert caught.value.__cause__ is None


def test_arguments_nested_too_deep_are_rejected() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for arguments in (endless, deep):
        with pytest.raises(MessageError) as caught:
            read_tool_call({"function": {"name": "f", "arguments": arguments}})
        assert caught.value.field == "message.tool_calls[0].function.arguments"


# -- writing -----------------------------------------------------------------------------------------


def test_a_message_is_written_in_chat_completions_form() -> None:
    message = Message(
        "assistant",
        "hi",
        reasoning_content="hm",
        tool_calls=(ToolCall("f", '{"a": 1}', id="c1"),),
        refusal="no",
        name="ann",
    )
    assert write_message(message) == {
        "role": "assistant",
        "content": "hi",
        "reasoning_content": "hm",
        "refusal": "no",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        ],
        "name": "ann",
    }
    assert write_message(Message("tool", "1", tool_call_id="c1")) == {
        "role": "tool",
        "content": "1",
        "tool_call_id": "c1",
    }


# -- properties --------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3)
any_json = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
# Values that are right somewhere, so that a draw gets past the first check.
plausible_values = st.sampled_from(
    (*ROLES, "", "text", "image_url", "input_audio", "file", "refusal", "thinking", "function", "custom")
) | st.sampled_from(
    ("name", "data:", "data:,", "data:;base64,QQ", "data:a;base64,\ud800", "data:,%", LINK, "QQ==", "{}")
)
fields = (
    st.sampled_from(
        ("role", "content", "name", "id", "tool_call_id", "refusal", "tool_calls", "function_call")
    )
    | st.sampled_from(("type", "text", "function", "custom", "arguments", "input", "reasoning", "thinking"))
    | st.sampled_from(("reasoning_details", "summary", "image_url", "image", "input_audio", "source", "file"))
    | st.sampled_from(("url", "data", "file_data", "detail", "format"))
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(fields, values, max_size=5)


nearly_messages = st.recursive(
    plausible_values | any_json,
    lambda inner: objects(inner) | st.lists(objects(inner) | inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=400)
@given(
    st.one_of(
        nearly_messages,
        objects(nearly_messages),
        objects(nearly_messages).map(lambda raw: {**raw, "role": "assistant"}),
    )
)
def test_no_json_value_raises_anything_but_a_message_error(raw: Any) -> None:
    try:
        message = read_message(raw)
    except MessageError:
        return
    again = read_message(write_message(message))
    assert again.key == message.key
    assert is_same_message(again, message)


short = st.text(st.characters(), max_size=4)
payloads = st.binary(min_size=1, max_size=5)
mimes = st.sampled_from(["", "image/png", "a,b", "text/plain;charset=utf-8", "wav"])


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return text_part(draw(short))
    kind = draw(st.sampled_from(["image", "video", "audio", "file"]))
    data = base64.b64encode(draw(payloads)).decode()
    source = draw(st.sampled_from([LINK, f"data:image/png;base64,{data}", f"data:,{draw(short)}x"]))
    body = {"url": source} if draw(st.booleans()) else {"data": data, "format": draw(mimes)}
    if draw(st.booleans()):
        body["detail"] = draw(short)
    name = kind if kind == "file" or draw(st.booleans()) else f"{kind}_url"
    return {"type": name, name: body}


@st.composite
def wire_messages(draw: st.DrawFn) -> dict[str, Any]:
    calls = st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": short.filter(bool)}, optional={"arguments": short | any_json}
            )
        },
        optional={"id": short, "type": st.sampled_from(["function", "custom"])},
    )
    optional = {
        "content": st.none() | short | st.lists(parts(), max_size=3),
        "reasoning": short,
        "refusal": short,
        "tool_calls": st.none() | st.lists(calls, max_size=3),
        "name": short,
        "tool_call_id": short,
        "id": short,
    }
    return draw(st.fixed_dictionaries({"role": st.sampled_from(ROLES)}, optional=optional))


@settings(max_examples=200)
@given(wire_messages())
def test_a_written_message_reads_back_equal(raw: dict[str, Any]) -> None:
    message = read_message(raw)
    again = read_message(write_message(message))
    assert again.key == message.key
    assert is_same_message(again, message)
    assert (again.content, again.reasoning_content, again.tool_call_id) == (
        message.content,
        message.reasoning_content,
        message.tool_call_id,
    )
    assert [(call.id, call.arguments) for call in again.tool_calls] == [
        (call.id, call.arguments) for call in message.tool_calls
    ]
    assert [(media.digest, media.payload) for media in again.media] == [
        (media.digest, media.payload) for media in message.media
    ]
