"""A rendered reply is whole if every part of it is there as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.chat.generic.whole_reply import WholeReply, find_whole_reply
from branchline.core.message import Message, ToolCall

Change = Callable[[str], str]
CHANGES: dict[str, Change] = {
    "none": str,
    "strip": str.strip,
    "upper": str.upper,
    "cut": lambda text: text[:2],
    "last part": lambda text: text.split("|")[-1],
    "one space": lambda text: text.replace("  ", " "),
    "if short": lambda text: text if len(text) < 3 else "",
    "hidden": lambda text: "",
    "other": lambda text: "a",
}
texts = st.text("aAß| \n", max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.just(0.5) | st.text('a"\\é\n7', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)


def has_scalar(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value)
    return any(map(has_scalar, value)) if isinstance(value, list) else True


def is_whole(message: Message, render: Callable[[Message], str]) -> bool:
    return find_whole_reply(message, render(message), render, lambda value: value) is not None


@given(texts, texts, st.sampled_from(sorted(CHANGES)), st.sampled_from(sorted(CHANGES)))
def test_texts_are_whole_if_the_template_does_not_change_them(
    content: str, reasoning: str, change: str, other: str
) -> None:
    def render(message: Message) -> str:
        thought = CHANGES[other](message.reasoning_content)
        return f"[{thought}]{CHANGES[change](message.content)}<>"

    message = Message("assistant", content, reasoning_content=reasoning)
    is_same = all(
        CHANGES[name](text).strip() == text.strip() and (name != "other" or not text.strip())
        for name, text in ((change, content), (other, reasoning))
    )
    # Where there is no text, what the template writes in its place is its own.
    is_alone = {"other"} & {change, other} and not (content.strip() and reasoning.strip())
    assert is_whole(message, render) == is_same or is_alone


@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), values, max_size=3), st.data())
def test_arguments_are_whole_if_all_are_written(arguments: dict[str, Any], data: st.DataObject) -> None:
    separators = data.draw(st.sampled_from([(",", ":"), (" , ", ": ")]))
    text = json.dumps(arguments, separators=separators, ensure_ascii=data.draw(st.booleans()))
    message = Message("assistant", tool_calls=(ToolCall("f", text),))
    in_python = data.draw(st.booleans())

    def render(shown: Message, without: str | None = None) -> str:
        (call,) = shown.tool_calls
        read = {key: value for key, value in json.loads(call.arguments).items() if key != without}
        rendered = (
            ", ".join(f"{key}={value}" for key, value in read.items() if not isinstance(value, dict | list))
            if in_python and not any(isinstance(value, dict | list) for value in arguments.values())
            else json.dumps(read, ensure_ascii=False)
        )
        return f"{call.name}({rendered})"

    assert is_whole(message, render)
    for position in range(len(arguments)):

        def leave_one_out(shown: Message, position: int = position) -> str:
            (call,) = shown.tool_calls
            return render(shown, list(json.loads(call.arguments))[position])

        assert not is_whole(message, leave_one_out)
    assert is_whole(message, lambda shown: shown.tool_calls[0].name) == (not arguments)
    keys_only = is_whole(message, lambda shown: "f " + ";".join(json.loads(shown.tool_calls[0].arguments)))
    assert not keys_only or not any(has_scalar(value) for value in arguments.values())
    assert not is_whole(message, lambda shown: shown.tool_calls[0].arguments)


@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "a", refusal="no"),
        Message("assistant", tool_calls=(ToolCall("f", '{"a": '),)),
        Message("assistant", tool_calls=(ToolCall("f", "[1]"),)),
        Message("assistant", "\U00100000"),
    ],
)
def test_what_cannot_be_compared_is_not_whole(message: Message) -> None:
    assert not is_whole(message, repr)


def test_the_end_of_the_parts_is_known() -> None:
    message = Message("assistant", " b\n", reasoning_content="c")
    first = find_whole_reply(
        message, "(c)b-", lambda shown: f"({shown.reasoning_content}){shown.content.strip()}-", str
    )
    last = find_whole_reply(
        message, " b\n(c)", lambda shown: f"{shown.content}({shown.reasoning_content})", str
    )
    assert first == WholeReply(parts_end=4, ends_with_content=True)
    assert last == WholeReply(parts_end=5, ends_with_content=False)
