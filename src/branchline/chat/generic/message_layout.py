"""Where each message ends in a rendered conversation, and what stands there: sampled ids or text.

A layout covers messages from some index on: a span for each slot, an end for each message. Ends of context
messages are only a matter of which node holds which ids; a prompt is the same wherever they fall.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from branchline.chat.base import NewMessage, PathMessage
from branchline.chat.generic.field_markers import FieldMarkers, SpanFinder, TextSpan
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

PromptMessage = PathMessage | NewMessage


@dataclass
class MessageLayout:
    """Messages `first` … of a text."""

    first: int
    message_ends: list[int] = field(default_factory=list)
    spans: dict[int, TextSpan] = field(default_factory=dict)
    mismatches: dict[int, str] = field(default_factory=dict)
    """Slots that cannot be kept, with the reason."""


def locate_messages(
    text: str,
    entries: Sequence[PromptMessage],
    slots: Collection[int],
    *,
    first: int,
    cursor: int,
    reply_prefixes: Sequence[str],
    span_finder: SpanFinder,
    markers: FieldMarkers,
) -> MessageLayout:
    """Lays out entries[first:] in a text whose earlier messages end at `cursor`.

    `openings` are what may stand before a reply: the generation prompt, and what history shows instead.
    """
    layout = MessageLayout(first)
    for index in range(first, len(entries)):
        entry = entries[index]
        if index in slots:
            sampled = entry.sampled_ids
            assert sampled is not None
            start = _reply_start(text, index, cursor, reply_prefixes, sampled, span_finder, markers)
            found = span_finder.find(text, index, entry.message, sampled, start)
            if isinstance(found, TextSpan):
                layout.spans[index] = found
                cursor = found.end
            else:
                layout.mismatches[index] = found.reason
        elif index == len(entries) - 1:
            cursor = _last_message_end(text, entry.message, cursor, reply_prefixes[0])
        else:
            following = next((later for later in range(index + 1, len(entries)) if later in slots), None)
            limit = -1 if following is None else markers.find_first(text, following, cursor)
            cursor = _context_message_end(
                text, entries, index, cursor, limit if limit >= 0 else len(text), span_finder
            )
        layout.message_ends.append(cursor)
    return layout


def _last_message_end(text: str, message: Message, cursor: int, generation_prompt: str) -> int:
    """Where the last message ends: before the generation prompt, whatever that holds this time."""
    opened = (
        text.rfind(generation_prompt, _text_end(text, message, cursor, len(text)))
        if generation_prompt
        else -1
    )
    return opened if opened >= 0 else len(text)


def _reply_start(
    text: str,
    index: int,
    cursor: int,
    openings: Sequence[str],
    sampled: Ids,
    finder: SpanFinder,
    brackets: FieldMarkers,
) -> int:
    """Behind the opening before a slot's first bracket; without one, where the sample begins."""
    first = max(cursor, brackets.find_first(text, index, cursor))
    for opening in openings:
        opened = text.rfind(opening, cursor, first) if opening else -1
        if opened >= 0:
            return opened + len(opening)
    return finder.find_reply_start(text, cursor, first, sampled)


def _context_message_end(
    text: str, entries: Sequence[PromptMessage], index: int, cursor: int, limit: int, finder: SpanFinder
) -> int:
    """Where a context message ends: behind its terminator, or right behind its text where it has none.

    The next slot is as far as it can reach: some templates show an early message late.
    """
    end = _text_end(text, entries[index].message, cursor, limit)
    needle = _first_text(entries[index + 1].message)
    place = text.find(needle, end, limit) if needle else -1
    limit = place if place >= 0 else limit
    stop = finder.find_next_stop(text, end)
    if stop is None or stop[0] >= limit:
        return end
    end = stop[1]
    while end < limit and text[end].isspace():
        end += 1
    return end


def _first_text(message: Message) -> str:
    return message.content.strip() or (message.tool_calls[0].name if message.tool_calls else "")


def _text_end(text: str, message: Message, cursor: int, limit: int) -> int:
    for needle in (message.content.strip(), *(call.name for call in message.tool_calls)):
        place = text.find(needle, cursor, limit) if needle else -1
        if place >= 0:
            cursor = place + len(needle)
    return cursor
