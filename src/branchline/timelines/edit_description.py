"""What was done to a conversation where it forked, in words: which message, which field, from what to what.

message 11 (assistant), arguments of Bash: command: 'cd /srv && ' taken out at letter 0

Tokens say where two sides part; this says what a client changed there, which is what can be mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from branchline.core.message import Message, ToolCall

_MAX_EXCERPT_CHARS = 60
"""Letters shown of what changed."""


def describe_edit(old: Sequence[Message], new: Sequence[Message], place: int) -> str:
    """What made `new` of `old`, two runs of messages that stand at the same place; nothing where both begin
    with the same message."""
    if not old or not new or old[0].key == new[0].key:
        return ""
    kept = next((index for index, message in enumerate(old) if message.key == new[0].key), 0)
    if kept:
        return f"{_count_messages(kept)} left out at {place}: {_excerpts(old[:kept])}"
    before = next((index for index, message in enumerate(new) if message.key == old[0].key), 0)
    if before:
        return f"{_count_messages(before)} put in at {place}: {_excerpts(new[:before])}"
    if old[0].role != new[0].role:
        return f"message {place}: {_excerpt(old[0])} became {_excerpt(new[0])}"
    return f"message {place} ({new[0].role}), " + "; ".join(_field_changes(old[0], new[0]))


def _field_changes(old: Message, new: Message) -> Iterator[str]:
    """The fields that differ; equal ones make equal keys, so there is one."""
    if old.content != new.content:
        yield f"text: {_text_change(old.content, new.content)}"
    names = [[call.name for call in message.tool_calls] for message in (old, new)]
    if names[0] != names[1]:
        yield f"calls: {', '.join(names[0]) or 'none'} became {', '.join(names[1]) or 'none'}"
    else:
        for one, other in zip(old.tool_calls, new.tool_calls, strict=True):
            if one.canonical_arguments != other.canonical_arguments:
                yield f"arguments of {one.name}: " + "; ".join(_argument_changes(one, other))
    if old.media != new.media:
        yield f"media: {len(old.media)} became {len(new.media)}, or others"
    for name, before, after in (
        ("reasoning", old.reasoning_content, new.reasoning_content),
        ("refusal", old.refusal, new.refusal),
        ("name", old.name, new.name),
    ):
        if before != after:
            yield f"{name}: {_text_change(before, after)}"


def _argument_changes(old: ToolCall, new: ToolCall) -> Iterator[str]:
    one, other = _arguments_object(old), _arguments_object(new)
    if one is None or other is None:
        yield _text_change(old.arguments, new.arguments)
        return
    for name in {**one, **other}:
        if name not in other:
            yield f"{name} left out (it was {_json(one[name])})"
        elif name not in one:
            yield f"{name} added ({_json(other[name])})"
        elif one[name] != other[name]:
            before, after = one[name], other[name]
            if not isinstance(before, str) or not isinstance(after, str):
                before, after = _json(before), _json(after)
            yield f"{name}: {_text_change(before, after)}"


def _arguments_object(call: ToolCall) -> dict[str, Any] | None:
    value = msgspec.json.decode(call.canonical_arguments) if call.is_json else None
    return value if isinstance(value, dict) else None


def _json(value: Any) -> str:
    return _truncate(msgspec.json.encode(value).decode())


def _text_change(old: str, new: str) -> str:
    """Where two texts differ, and what stands there.

    >>> _text_change("cd /srv && cat it", "cat it")
    "'cd /srv && ' taken out at letter 0"
    """
    start = _common_prefix_length(old, new)
    end = _common_prefix_length(old[start:][::-1], new[start:][::-1])
    gone, come = (text[start : len(text) - end] for text in (old, new))
    if gone and come:
        return f"{_truncate(gone)!r} became {_truncate(come)!r} at letter {start}"
    longer, shorter, done = (old, new, "taken out") if gone else (new, old, "put in")
    if longer.endswith(shorter):
        # It stood before everything, though what follows may begin with the same letter.
        start = 0
    size = len(longer) - len(shorter)
    return f"{_truncate(longer[start : start + size])!r} {done} at letter {start}"


def _common_prefix_length(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _count_messages(messages: int) -> str:
    return f"{messages} message{'s' * (messages != 1)}"


def _excerpts(messages: Sequence[Message]) -> str:
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return _excerpt(messages[0]) + more


def _excerpt(message: Message) -> str:
    called = " ".join([f"{call.name}({call.arguments})" for call in message.tool_calls])
    return f"{message.role} {_truncate(message.content or called)!r}"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "…"
