"""The key of a message is equal for equal meanings and different for different ones."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.message import (
    ROLES,
    Media,
    Message,
    Notation,
    ToolCall,
    WireShape,
    canonical_arguments,
    is_same_message,
)

PNG = b"\x89PNG\r\n\x1a\n-a picture \xff\xfe\xfb"
CAT = Media("image", "d1", b"cat")
DOG = Media("image", "d2", b"dog")
LOOK = ToolCall("look", '{"at": 1}', id="c1")
LISTEN = ToolCall("listen", '{"to": 2}', id="c2")


def user(**fields: Any) -> Message:
    return Message("user", **{"content": "hi", **fields})


def assistant(**fields: Any) -> Message:
    return Message("assistant", **{"content": "hi", **fields})


# -- fields in the key -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(user(), user(content="ho"), id="text"),
        pytest.param(user(), user(content="hi "), id="whitespace of a user"),
        pytest.param(Message("tool", "1"), Message("tool", "1\n"), id="whitespace of a tool"),
        pytest.param(assistant(content="a b"), assistant(content="a  b"), id="whitespace inside"),
        pytest.param(user(), user(name="ann"), id="name of a user"),
        pytest.param(user(name="ann"), user(name="bob"), id="another name"),
        pytest.param(Message("function", "1", name="f"), Message("function", "1", name="g"), id="function"),
        pytest.param(user(), user(reasoning_content="hm"), id="reasoning of a user"),
        pytest.param(assistant(), assistant(refusal="no"), id="refusal"),
        pytest.param(assistant(content="no"), assistant(content="", refusal="no"), id="text for refusal"),
        pytest.param(assistant(), assistant(tool_calls=(LOOK,)), id="a call"),
        pytest.param(assistant(tool_calls=(LOOK,)), assistant(tool_calls=(LISTEN,)), id="another call"),
        pytest.param(assistant(tool_calls=(LOOK,)), assistant(tool_calls=(LOOK, LOOK)), id="a call twice"),
        pytest.param(
            assistant(content="", tool_calls=(ToolCall("f", '{"a": 1}'),)),
            assistant(content="", tool_calls=(ToolCall("f", '{"a": true}'),)),
            id="types of arguments",
        ),
        pytest.param(
            assistant(content="", tool_calls=(ToolCall("f", "{}"),)),
            assistant(content="", tool_calls=(ToolCall("g", "{}"),)),
            id="name of a tool",
        ),
        pytest.param(
            user(tool_calls=(LOOK, LISTEN)), user(tool_calls=(LISTEN, LOOK)), id="call order of a user"
        ),
        pytest.param(user(), user(parts=("hi", CAT)), id="media"),
        pytest.param(user(parts=("hi", CAT)), user(parts=("hi", DOG)), id="digest"),
        pytest.param(user(parts=("hi", CAT)), user(parts=(CAT, "hi")), id="place of media"),
        pytest.param(user(parts=(CAT, DOG)), user(parts=(DOG, CAT)), id="order of media"),
        pytest.param(user(parts=(CAT,)), user(parts=(CAT, CAT)), id="number of media"),
        pytest.param(user(parts=(CAT,)), user(parts=(Media("video", "d1", b"cat"),)), id="kind of media"),
        pytest.param(
            user(parts=(CAT,)), user(parts=(Media("image", "d1", b"cat", detail="low"),)), id="detail"
        ),
    ],
)
def test_this_changes_the_key(one: Message, other: Message) -> None:
    assert one.key != other.key
    assert not is_same_message(one, other)


def test_every_role_has_its_own_keys() -> None:
    assert len({Message(role, "hi").key for role in ROLES}) == len(ROLES)
    assert len({Message(role, "hi", tool_calls=(LOOK,)).key for role in ROLES}) == len(ROLES)


# -- fields not in the key----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(user(), user(id="msg_1"), id="id of a message"),
        pytest.param(assistant(), assistant(id="resp_1"), id="id of a response"),
        pytest.param(
            assistant(tool_calls=(LOOK,)),
            assistant(tool_calls=(ToolCall("look", '{"at": 1}', id="x"),)),
            id="call id",
        ),
        pytest.param(
            assistant(tool_calls=(LOOK,)),
            assistant(tool_calls=(ToolCall("look", '{ "at":1.0 }'),)),
            id="spelling",
        ),
        pytest.param(
            assistant(tool_calls=(ToolCall("f", "x"),)),
            assistant(tool_calls=(ToolCall("f", "x", kind="custom"),)),
            id="kind of a tool",
        ),
        pytest.param(
            Message("tool", "1", tool_call_id="c1"), Message("tool", "1", tool_call_id="c2"), id="answers"
        ),
        pytest.param(Message("tool", "1"), Message("tool", "1", name="look"), id="name on a result"),
        pytest.param(
            assistant(content=""), assistant(content="", wire_shape=int(WireShape.NULL_CONTENT)), id="form"
        ),
        pytest.param(user(content="ab"), user(content="ab", parts=("a", "b")), id="text in pieces"),
        pytest.param(user(parts=("ab", CAT)), user(parts=("a", "", "b", CAT, "")), id="pieces by media"),
        pytest.param(
            user(parts=(CAT,)), user(parts=(Media("image", "d1", mime="image/png"),)), id="payload and mime"
        ),
    ],
)
def test_this_does_not_change_the_key(one: Message, other: Message) -> None:
    assert one.key == other.key
    assert is_same_message(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(assistant(), assistant(reasoning_content="hm"), id="reasoning"),
        pytest.param(
            assistant(reasoning_content="hm"),
            assistant(reasoning_content="hm "),
            id="whitespace of reasoning",
        ),
        pytest.param(assistant(), assistant(content="\n hi\u00a0\n"), id="whitespace around the text"),
        pytest.param(
            assistant(tool_calls=(LOOK, LISTEN)), assistant(tool_calls=(LISTEN, LOOK)), id="order of calls"
        ),
    ],
)
def test_what_clients_drop_from_an_answer_is_not_in_its_key(one: Message, other: Message) -> None:
    assert one.key == other.key
    assert not is_same_message(one, other)
    assert not is_same_message(other, one)


def test_ids_do_not_distinguish_messages() -> None:
    message = assistant(tool_calls=(LOOK,), reasoning_content="hm")
    assert is_same_message(message, message)
    assert is_same_message(message, assistant(tool_calls=(LOOK,), reasoning_content="hm", id="resp_1"))


def test_media_are_the_parts_that_are_not_text() -> None:
    assert user(parts=("a", CAT, "b", DOG)).media == (CAT, DOG)
    assert user().media == ()


# -- construction ------------------------------------------------------------------------------------

FULL = Message(
    "assistant",
    " hi ",
    reasoning_content="hm",
    tool_calls=(LOOK, LISTEN),
    refusal="no",
    name="ann",
    parts=(" hi ", CAT),
    id="m1",
    wire_shape=int(WireShape.PART_LIST),
)


@pytest.mark.parametrize(
    "same",
    [
        lambda message: copy.deepcopy(message),
        lambda message: msgspec.structs.replace(message, id="m2"),
        lambda message: msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message),
        lambda message: msgspec.json.decode(msgspec.json.encode(message), type=Message),
        lambda message: msgspec.convert(msgspec.to_builtins(message), Message),
        lambda message: Message(*msgspec.structs.astuple(message)[:-1]),
    ],
)
@pytest.mark.parametrize("message", [FULL, user(), assistant(tool_calls=(LOOK,))])
def test_a_copy_has_the_key_of_its_original(message: Message, same: Any) -> None:
    assert same(message).key == message.key
    assert same(message).tool_calls == message.tool_calls


def test_a_changed_copy_has_a_new_key() -> None:
    assert msgspec.structs.replace(user(), content="ho").key == user(content="ho").key
    changed = msgspec.structs.replace(LOOK, arguments="{'at': 2}")
    assert (changed.canonical_arguments, changed.notation) == (b'{"at":2}', Notation.PYTHON)


def test_a_given_key_is_recomputed() -> None:
    assert Message("user", "hi", key=b"0" * 16).key == user().key
    assert ToolCall("f", "{}", canonical_arguments=b"[]").canonical_arguments == b"{}"


def test_is_json_tells_whether_arguments_are_json() -> None:
    texts = {"": True, '{"a": 1}': True, "{'a': 1}": False, "ls": False}
    assert {text: ToolCall("f", text).is_json for text in texts} == texts


def test_a_message_without_content_is_empty() -> None:
    assert Message("assistant").is_empty
    assert Message("assistant", wire_shape=int(WireShape.NULL_CONTENT), id="m1").is_empty
    for message in (
        user(),
        assistant(content="", reasoning_content="hm"),
        assistant(content="", tool_calls=(LOOK,)),
    ):
        assert not message.is_empty


@pytest.mark.parametrize(
    "message",
    [
        user(content="\ud800"),
        user(name="\ud800"),
        user(reasoning_content="\ud800"),
        assistant(refusal="\ud800"),
        assistant(tool_calls=(ToolCall("\ud800"),)),
        assistant(tool_calls=(ToolCall("f", '{"a": "\ud800"}'),)),
        user(parts=("\ud800", CAT)),
        user(parts=(Media("image", "url:\ud800", url="\ud800"),)),
        user(parts=(Media("image", "d", detail="\ud800"),)),
    ],
)
def test_lone_surrogates_have_distinct_keys(message: Message) -> None:
    def other(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("\ud800", "\ud801")
        return [other(item) for item in value] if isinstance(value, list | tuple) else value

    fields = {
        "content": other(message.content),
        "name": other(message.name),
        "reasoning_content": other(message.reasoning_content),
        "refusal": other(message.refusal),
        "tool_calls": tuple(ToolCall(other(call.name), other(call.arguments)) for call in message.tool_calls),
        "parts": tuple(
            other(part)
            if isinstance(part, str)
            else msgspec.structs.replace(part, digest=other(part.digest), detail=other(part.detail))
            for part in message.parts
        ),
    }
    assert Message(message.role, **fields).key != message.key


# -- properties --------------------------------------------------------------------------------------

# Few characters, so that draws often differ only in the field that holds a character.
short_texts = st.text(st.sampled_from('a" \x00'), max_size=2)
few_media = st.builds(
    Media,
    st.sampled_from(["image", "video"]),
    st.sampled_from(["a", "aa"]),
    detail=st.sampled_from(["", "a"]),
)
few_arguments = st.sampled_from(["", "a", "aa", "{}", '{"a":"a"}', '"a"'])
few_calls = st.lists(st.builds(ToolCall, st.sampled_from(["a", "aa"]), few_arguments), max_size=2)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    parts = tuple(draw(st.lists(short_texts | few_media, max_size=3)))
    texts = "".join(part for part in parts if isinstance(part, str))
    return Message(
        draw(st.sampled_from(["user", "assistant", "tool"])),
        texts if parts else draw(short_texts),
        reasoning_content=draw(short_texts),
        tool_calls=tuple(draw(few_calls)),
        refusal=draw(short_texts),
        name=draw(short_texts),
        parts=parts,
        id=draw(short_texts),
        tool_call_id=draw(short_texts),
    )


def comparable_message(message: Message) -> Any:
    """Returns the meaning of a message as a comparable value."""
    is_assistant = message.role == "assistant"
    content: list[Any] = [""]
    for part in message.parts:
        if isinstance(part, str):
            content[-1] += part
        else:
            content += [(part.kind, part.digest, part.detail), ""]
    if len(content) == 1:
        content = [message.content.strip() if is_assistant else message.content]
    calls = [(call.name, canonical_arguments(call.arguments)[0]) for call in message.tool_calls]
    return (
        message.role,
        content,
        "" if is_assistant else message.reasoning_content,
        sorted(calls) if is_assistant else calls,
        message.refusal,
        "" if message.role in ("tool", "assistant") else message.name,
    )


@settings(max_examples=300)
@given(messages(), messages())
def test_keys_are_equal_iff_meanings_are_equal(one: Message, other: Message) -> None:
    assert (one.key == other.key) == (comparable_message(one) == comparable_message(other))


@given(st.lists(messages(), min_size=2, max_size=30))
def test_different_meanings_have_different_keys(many: list[Message]) -> None:
    assert len({message.key for message in many}) == len(
        {repr(comparable_message(message)) for message in many}
    )


@settings(max_examples=300)
@given(
    st.text("ab", max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_moving_a_character_to_the_next_field_changes_the_key(
    characters: str, cuts: list[int], others: list[int]
) -> None:
    def cut(positions: list[int]) -> tuple[list[str], Message]:
        edges = [0, *sorted(positions), len(characters)]
        text, refusal, name, tool, arguments = (characters[a:b] for a, b in pairwise(edges))
        call = ToolCall("t" + tool, "x" + arguments)
        return [text, refusal, name, tool, arguments], Message(
            "user", text, refusal=refusal, name=name, tool_calls=(call,)
        )

    (one, one_message), (other, other_message) = cut(cuts), cut(others)
    assert (one_message.key == other_message.key) == (one == other)


@given(messages())
def test_any_copy_of_any_message_has_its_key(message: Message) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message).key == message.key
    assert is_same_message(message, copy.deepcopy(message))
