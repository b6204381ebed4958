"""Where each message ends in a rendered conversation, and what stands there: sampled ids or text.

A layout covers messages from some index on: a span for each slot, an end for each message. Ends of context
messages are only a matter of which node holds which ids; a prompt is the same wherever they fall.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from branchline.chat.base import Recorded, Shown
from branchline.chat.generic.slots import Brackets, SlotFinder, Span
from branchline.core.message import Message
from branchline.core.runs import Ids

Entry = Recorded | Shown


@dataclass
class Layout:
    """Messages `first` … of a text."""

    first: int
    ends: list[int] = field(default_factory=list)
    spans: dict[int, Span] = field(default_factory=dict)
    misfits: dict[int, str] = field(default_factory=dict)
    """Slots that cannot be kept, with the reason."""


def lay_out(
    text: str,
    entries: Sequence[Entry],
    slots: Collection[int],
    *,
    first: int,
    cursor: int,
    openings: Sequence[str],
    finder: SlotFinder,
    brackets: Brackets,
) -> Layout:
    """Lays out entries[first:] in a text whose earlier messages end at `cursor`.

    `openings` are what may stand before a reply: the generation prompt, and what history shows instead.
    """
    layout = Layout(first)
    for index in range(first, len(entries)):
        entry = entries[index]
        if index in slots:
            sampled = entry.sampled_ids
            assert sampled is not None
            start = _slot_start(text, index, cursor, openings, sampled, finder, brackets)
            found = finder.find(text, index, entry.message, sampled, start)
            if isinstance(found, Span):
                layout.spans[index] = found
                cursor = found.end
            else:
                layout.misfits[index] = found.reason
        elif index == len(entries) - 1:
            cursor = _body_end(text, entry.message, cursor, openings[0])
        else:
            following = next((later for later in range(index + 1, len(entries)) if later in slots), None)
            limit = -1 if following is None else brackets.first(text, following, cursor)
            cursor = _context_end(text, entries, index, cursor, limit if limit >= 0 else len(text), finder)
        layout.ends.append(cursor)
    return layout


def _body_end(text: str, message: Message, cursor: int, generation_prompt: str) -> int:
    """Where the last message ends: before the generation prompt, whatever that holds this time."""
    opened = (
        text.rfind(generation_prompt, _text_end(text, message, cursor, len(text)))
        if generation_prompt
        else -1
    )
    return opened if opened >= 0 else len(text)


def _slot_start(
    text: str,
    index: int,
    cursor: int,
    openings: Sequence[str],
    sampled: Ids,
    finder: SlotFinder,
    brackets: Brackets,
) -> int:
    """Behind the opening before a slot's first bracket; without one, where the sample begins."""
    first = max(cursor, brackets.first(text, index, cursor))
    for opening in openings:
        opened = text.rfind(opening, cursor, first) if opening else -1
        if opened >= 0:
            return opened + len(opening)
    return finder.start_before(text, cursor, first, sampled)


def _context_end(
    text: str, entries: Sequence[Entry], index: int, cursor: int, limit: int, finder: SlotFinder
) -> int:
    """Where a context message ends: behind its terminator, or right behind its text where it has none.

    The next slot is as far as it can reach: some templates show an early message late.
    """
    end = _text_end(text, entries[index].message, cursor, limit)
    needle = _first_words(entries[index + 1].message)
    place = text.find(needle, end, limit) if needle else -1
    limit = place if place >= 0 else limit
    stop = finder.next_stop(text, end)
    if stop is None or stop[0] >= limit:
        return end
    end = stop[1]
    while end < limit and text[end].isspace():
        end += 1
    return end


def _first_words(message: Message) -> str:
    return message.text.strip() or (message.calls[0].name if message.calls else "")


def _text_end(text: str, message: Message, cursor: int, limit: int) -> int:
    for needle in (message.text.strip(), *(call.name for call in message.calls)):
        place = text.find(needle, cursor, limit) if needle else -1
        if place >= 0:
            cursor = place + len(needle)
    return cursor
