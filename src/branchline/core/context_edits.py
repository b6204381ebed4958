"""Edits of a conversation: deleted messages become stubs, summarised messages become one message.

A history only grows, and the index of a message in it is the message's id. A view is the history with edits
applied: it is what the model is shown. Edits change no message of the history, so every edit can be taken
back. A stub keeps the structure of the conversation: an assistant's tool names, and a result's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from branchline.core.errors import InputError
from branchline.core.message import Message

DELETED_CONTENT = "Content has been deleted to save space."
"""The text of a stub."""
SUMMARY_HEADING = "Summary of the earlier conversation, which has been removed to save space:"
_SUMMARY_PREFIX = SUMMARY_HEADING + "\n"
MESSAGE_ID, INVOKING_ID = "msg_id", "msg_id(invoking_assistant)"
"""Fields of a tool result: its own id, and the id of the assistant message that called the tool."""
_STUB_ARGUMENTS = msgspec.json.encode({"message": DELETED_CONTENT}).decode()


class ContextEdit(msgspec.Struct, frozen=True):
    """Messages that a view shows as stubs, or as one summary if there is one."""

    message_ids: tuple[int, ...]
    summary: str = ""


@dataclass(frozen=True)
class ContextView:
    """The messages that a model is shown."""

    messages: tuple[Message, ...]
    message_ids: tuple[int, ...]
    """The id of each message in the history; for a summary, that of the first message it replaces."""
    summarized_ids: frozenset[int] = frozenset()
    """Messages of the history that summaries replace."""


def build_view(history: Sequence[Message], edits: Sequence[ContextEdit]) -> ContextView:
    """The view of a history.

    Of several summaries of a message the last one counts, and a summary replaces stubs.

    >>> history = [Message("user", "Hi."), Message("assistant", "Hello, how are you?")]
    >>> build_view(history, [ContextEdit((1,))]).messages[1].content
    'Content has been deleted to save space.'
    """
    summary_of: dict[int, ContextEdit] = {}
    deleted: set[int] = set()
    for edit in edits:
        if edit.summary:
            summary_of.update(dict.fromkeys(edit.message_ids, edit))
        else:
            deleted.update(edit.message_ids)
    messages: list[Message] = []
    message_ids: list[int] = []
    shown: list[ContextEdit] = []
    for index, message in enumerate(history):
        summary = summary_of.get(index)
        if summary is not None:
            if any(summary is one for one in shown):
                continue
            shown.append(summary)
            message = Message("user", _SUMMARY_PREFIX + summary.summary)
        elif index in deleted:
            message = stub_message(message)
        messages.append(message)
        message_ids.append(index)
    return ContextView(tuple(messages), tuple(message_ids), frozenset(summary_of))


def stub_message(message: Message) -> Message:
    """The stub of an assistant message or a tool result. Raises InputError for any other role.

    An assistant message keeps its tool names. A tool result that has ids keeps them, its status and the name
    of its tool; media are removed.
    """
    if message.role == "assistant":
        calls = tuple([structs.replace(call, arguments=_STUB_ARGUMENTS) for call in message.tool_calls])
        return structs.replace(
            message, content=DELETED_CONTENT, reasoning_content="", refusal="", tool_calls=calls, parts=()
        )
    if message.role not in ("tool", "function"):
        raise InputError(
            f"role: got {message.role!r}, expected 'assistant' or 'tool': others are not deleted"
        )
    fields = read_result_fields(message.content)
    content = DELETED_CONTENT
    if MESSAGE_ID in fields:
        stub = {name: fields[name] for name in (MESSAGE_ID, INVOKING_ID) if name in fields}
        stub |= {
            "status": fields.get("status", "success"),
            "message": DELETED_CONTENT,
            "original_tool": message.name,
        }
        content = msgspec.json.encode(stub).decode()
    return structs.replace(message, content=content, parts=())


def expand_summaries(message_ids: Iterable[int], edits: Sequence[ContextEdit]) -> tuple[int, ...]:
    """These ids, and all ids that a summary among them replaces, in order."""
    expanded = set(message_ids)
    for edit in reversed(edits):
        if edit.summary and not expanded.isdisjoint(edit.message_ids):
            expanded.update(edit.message_ids)
    return tuple(sorted(expanded))


def read_summary(message: Message) -> str:
    """The summary in a message that replaces others; empty for any other message."""
    is_summary = message.role == "user" and message.content.startswith(_SUMMARY_PREFIX)
    return message.content.removeprefix(_SUMMARY_PREFIX) if is_summary else ""


def is_deletion_stub(message: Message) -> bool:
    """Whether a message is a stub that `stub_message` made."""
    if message.role == "assistant" or message.content == DELETED_CONTENT:
        return message.content == DELETED_CONTENT
    return (
        message.role == "tool"
        and DELETED_CONTENT in message.content
        and read_result_fields(message.content).get("message") == DELETED_CONTENT
    )


def read_result_fields(content: str) -> dict[str, Any]:
    """The fields of a tool result that is a JSON object; none for any other text."""
    if not content.startswith("{"):
        return {}
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
