"""Variants of a reply: as a client sends it back, and in other shapes for models that cannot express it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from branchline.core.message import Message, ToolCall, WireShape


def similar_replies(message: Message, other_text: str, other_reasoning: str) -> Iterator[Message]:
    """Yields replies like this one, the most similar first: without or with reasoning, without or with text,
    with fewer calls."""
    text, reasoning = message.content, message.reasoning_content
    texts = (text, "" if text else other_text)
    for count in range(len(message.tool_calls), -1, -1):
        for content in texts:
            for thought in (reasoning, "" if reasoning else other_reasoning):
                if content or count:
                    calls = message.tool_calls[:count]
                    yield Message("assistant", content, reasoning_content=thought, tool_calls=calls)


def echo_as_client(output: Message, rng: Random) -> Message:
    """Returns a reply as a client sends it back: the same meaning in another form."""
    calls = list(output.tool_calls)
    shape = 0
    if calls:
        if rng.random() < 0.3:
            calls = [
                ToolCall(call.name, _reserialize_arguments(call.arguments, rng), call.id) for call in calls
            ]
        if len(calls) > 1 and rng.random() < 0.3:
            calls.reverse()
    if not output.content and rng.random() < 0.5:
        shape |= rng.choice((WireShape.NULL_CONTENT, WireShape.ABSENT_CONTENT))
    elif rng.random() < 0.2:
        shape |= WireShape.PART_LIST
    text = output.content if rng.random() < 0.8 else f" {output.content}\n"
    reasoning = output.reasoning_content if rng.random() < 0.5 else ""
    return Message(
        "assistant", text, reasoning_content=reasoning, tool_calls=tuple(calls), wire_shape=int(shape)
    )


def _reserialize_arguments(arguments: str, rng: Random) -> str:
    value = json.loads(arguments)
    if rng.random() < 0.3:
        return repr(value)
    return json.dumps(dict(reversed(value.items())), separators=(",", ":"))
