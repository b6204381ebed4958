"""A message's key is its meaning: equal for what means the same, different for everything else."""

from __future__ import annotations

import base64
import copy
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.arguments import Notation, canonical_arguments
from branchline.core.message import ROLES, Media, Message, ToolCall, WireShape, is_same_message
from branchline.core.reader import read_message

PNG = b"\x89PNG\r\n\x1a\n-a picture \xff\xfe\xfb"
CAT = Media("image", "d1", b"cat")
DOG = Media("image", "d2", b"dog")
LOOK = ToolCall("look", '{"at": 1}', id="c1")
LISTEN = ToolCall("listen", '{"to": 2}', id="c2")


def user(**fields: Any) -> Message:
    return Message("user", **{"content": "hi", **fields})


def assistant(**fields: Any) -> Message:
    return Message("assistant", **{"content": "hi", **fields})


# -- what is part of a key ---------------------------------------------------------------------------


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
def test_this_is_part_of_a_key(one: Message, other: Message) -> None:
    assert one.key != other.key
    assert not is_same_message(one, other)


def test_every_role_has_its_own_keys() -> None:
    assert len({Message(role, "hi").key for role in ROLES}) == len(ROLES)
    assert len({Message(role, "hi", tool_calls=(LOOK,)).key for role in ROLES}) == len(ROLES)


# -- what is not -------------------------------------------------------------------------------------


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
def test_this_is_not_part_of_a_key(one: Message, other: Message) -> None:
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
def test_what_clients_lose_of_an_answer_is_not_in_its_key_but_in_its_meaning(
    one: Message, other: Message
) -> None:
    assert one.key == other.key
    assert not is_same_message(one, other)
    assert not is_same_message(other, one)


def test_a_message_means_what_it_means() -> None:
    message = assistant(tool_calls=(LOOK,), reasoning_content="hm")
    assert is_same_message(message, message)
    assert is_same_message(message, assistant(tool_calls=(LOOK,), reasoning_content="hm", id="resp_1"))


# -- media -------------------------------------------------------------------------------------------


def image_message(source: str, **more: str) -> Message:
    part = {"type": "image_url", "image_url": {"url": source, **more}}
    return read_message({"role": "user", "content": [{"type": "text", "text": "see"}, part]})


STANDARD = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64," + base64.encodebytes(PNG).decode(),
        "data:image/png;base64," + STANDARD.replace("=", ""),
        "data:image/png;base64," + base64.urlsafe_b64encode(PNG).decode(),
        "data:image/png;base64," + STANDARD.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:image/jpeg;base64," + STANDARD,
        "data:;base64," + STANDARD,
        "data:image/png;name=a.png;base64," + STANDARD,
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
def test_the_same_bytes_have_the_same_digest_however_they_are_written(source: str) -> None:
    plain = image_message("data:image/png;base64," + STANDARD)
    assert "+" in STANDARD or "/" in STANDARD
    assert STANDARD.endswith("=")
    assert image_message(source).media[0].payload == PNG
    assert image_message(source).media[0].digest == plain.media[0].digest
    assert image_message(source).key == plain.key


def test_other_bytes_have_another_digest() -> None:
    one, other = (
        image_message("data:image/png;base64," + base64.b64encode(data).decode()) for data in (b"1", b"2")
    )
    assert one.media[0].digest != other.media[0].digest
    assert one.key != other.key


def test_a_link_is_known_by_its_address_and_not_taken_for_data() -> None:
    link = image_message("https://a.example/1.png")
    assert link.media == (Media("image", "url:https://a.example/1.png", url="https://a.example/1.png"),)
    assert link.key == image_message("https://a.example/1.png").key
    assert link.key != image_message("https://a.example/2.png").key
    assert link.key != image_message("https://a.example/1.png", detail="high").key


def test_the_media_of_a_message_are_its_parts_that_are_no_text() -> None:
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
def test_a_copy_has_the_key_of_what_it_copies(message: Message, same: Any) -> None:
    assert same(message).key == message.key
    assert same(message).tool_calls == message.tool_calls


def test_a_changed_copy_has_the_key_of_what_it_says_now() -> None:
    assert msgspec.structs.replace(user(), content="ho").key == user(content="ho").key
    changed = msgspec.structs.replace(LOOK, arguments="{'at': 2}")
    assert (changed.canonical_arguments, changed.notation) == (b'{"at":2}', Notation.PYTHON)


def test_a_record_with_a_wrong_key_gets_the_right_one() -> None:
    assert Message("user", "hi", key=b"0" * 16).key == user().key
    assert ToolCall("f", "{}", canonical_arguments=b"[]").canonical_arguments == b"{}"


def test_a_call_knows_whether_its_arguments_are_json() -> None:
    texts = {"": True, '{"a": 1}': True, "{'a': 1}": False, "ls": False}
    assert {text: ToolCall("f", text).is_json for text in texts} == texts


def test_a_message_is_empty_when_it_says_nothing_at_all() -> None:
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
def test_lone_surrogates_neither_raise_nor_collapse(message: Message) -> None:
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

# Few letters, so that moving one from a field to its neighbour gives what another draw may give, too.
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
    """What a key stands for, spelled out."""
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
def test_keys_are_equal_exactly_where_meanings_are(one: Message, other: Message) -> None:
    assert (one.key == other.key) == (comparable_message(one) == comparable_message(other))


@given(st.lists(messages(), min_size=2, max_size=30))
def test_no_two_meanings_of_many_share_a_key(many: list[Message]) -> None:
    assert len({message.key for message in many}) == len(
        {repr(comparable_message(message)) for message in many}
    )


@settings(max_examples=300)
@given(
    st.text("ab", max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_a_letter_cannot_move_to_the_next_field_unnoticed(
    letters: str, cuts: list[int], others: list[int]
) -> None:
    def cut(places: list[int]) -> tuple[list[str], Message]:
        edges = [0, *sorted(places), len(letters)]
        text, refusal, name, tool, arguments = (letters[a:b] for a, b in pairwise(edges))
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
