"""One extension of one conversation: what is rendered, what of it is kept, what is encoded.

`by_template` keeps as much of the recorded path as the template still shows; `verbatim` keeps all of it and
renders only what is new. Both answer with the ids of each message behind the kept ones and the opening.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from branchline.chat.base import Extension, Piece, Shown
from branchline.chat.generic.layout import Entry, Layout, lay_out
from branchline.chat.generic.slots import Brackets, Misfit, Span
from branchline.chat.generic.voice import EMPTY_THINK, Rendered, Voice
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.reader import ToolList
from branchline.core.runs import Ids, Origin, as_ids, runs_of

Tools = Sequence[Mapping[str, Any]]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Stand:
    """How much of a path the template still shows: where each kept message ends, and why no more are."""

    ends: tuple[int, ...]
    reason: str


class Conversation:
    """A conversation of which the first `recorded` entries stand on a path."""

    def __init__(
        self,
        voice: Voice,
        entries: Sequence[Entry],
        recorded: int,
        tools: Tools,
        values: Values,
        now: datetime,
    ) -> None:
        self._voice = voice
        self._entries = entries
        self._recorded = recorded
        self._tools = (tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))).constants or None
        self._values = values
        self._now = now
        self._brackets = voice.brackets
        self._finder = voice.finder
        self._encoded = 0

    # -- what the template shows ---------------------------------------------------------------------

    def by_template(self) -> Extension:
        """The prompt shows what the template shows for this conversation."""
        known = self._known()
        # What is remembered was looked through when it was new.
        if self._avoid_nonce(self._entries[len(known.ends) if known is not None else 0 :]):
            known = None
        slots = set(known.slots) if known is not None else set()
        covered = len(known.ends) if known is not None else 0
        slots |= {index for index in range(covered, len(self._entries)) if self._is_slot(index)}
        text = self._render(self._entries, slots)
        stand = self._compare(text, known) if known is not None else self._walk(text, slots)
        kept = len(stand.ends)
        cursor = stand.ends[-1] if stand.ends else 0
        misfits: dict[int, str] = {}
        again = self._shown_again(kept) - slots
        if again:
            slots |= again
            before, text = text, self._render(self._entries, slots)
            if text[:cursor] != before[:cursor]:
                kept = cursor = 0
        while True:
            layout = self._lay_out(text, self._entries, slots, kept, cursor)
            if not layout.misfits:
                break
            misfits |= layout.misfits
            slots -= layout.misfits.keys()
            before, text = text, self._render(self._entries, slots)
            if text[:cursor] != before[:cursor]:
                # Showing one message otherwise changed another: nothing of the path can be trusted.
                kept = cursor = 0
        reason = stand.reason if kept in again else misfits.get(kept) or stand.reason
        why = "" if kept == self._recorded else self._why(kept, reason)
        extension = self._assemble(text, layout, cursor, why)
        last_ids = (
            extension.pieces[-1].ids if extension.pieces else self._recorded_ids(len(self._entries) - 1)
        )
        if self._brackets is self._voice.brackets and len(last_ids):
            ends = (*stand.ends[:kept], *layout.ends)
            self._voice.texts.put(id(last_ids), Rendered(text, ends, frozenset(slots), last_ids))
        return extension

    def _shown_again(self, kept: int) -> set[int]:
        """Replies behind what is kept that the path shows otherwise than they were sampled: now that they are
        written anew they may stand there as they were, thinking and all."""
        lost = range(kept, self._recorded)
        return {
            i for i in lost if self._entries[i].sampled_ids is not None and not self._entries[i].message.media
        }

    def _known(self) -> Rendered | None:
        """What the last prompt of the path rendered to, if that is remembered."""
        covered = self._recorded - (self._recorded > 0 and self._is_slot(self._recorded - 1))
        if covered == 0 or self._brackets is not self._voice.brackets:
            return None
        last_ids = self._recorded_ids(covered - 1)
        known = self._voice.texts.get(id(last_ids))
        return known if known is not None and known.last_ids is last_ids else None

    def _compare(self, text: str, known: Rendered) -> Stand:
        """How much of the path stands, by comparing with what its last prompt rendered to."""
        body = known.body_end
        if not text.startswith(known.text[:body]):
            first = bisect_right(known.ends, _first_difference(text, known.text))
            return Stand(known.ends[:first], "rewritten")
        if len(known.ends) == self._recorded:
            return Stand(known.ends, "")
        start = self._open(text, body, known.opening)
        found = self._find(text, len(known.ends), start) if start is not None else Misfit("rewritten")
        if isinstance(found, Span):
            return Stand((*known.ends, found.end), "")
        return Stand(known.ends, found.reason)

    def _walk(self, text: str, slots: set[int]) -> Stand:
        """The same where nothing is remembered: recorded ids are spelled out and looked for, one by one."""
        ends: list[int] = []
        cursor = 0
        for index in range(self._recorded):
            entry, ids = self._entries[index], self._recorded_ids(index)
            sampled = entry.sampled_ids if index in slots else None
            spelled = self._voice.encoder.spell(ids if sampled is None else ids[: len(ids) - len(sampled)])
            place = self._open(text, cursor, spelled) if spelled is not None else None
            if place is None:
                return Stand(tuple(ends), "rewritten")
            if sampled is not None:
                found = self._find(text, index, place)
                if isinstance(found, Misfit):
                    return Stand(tuple(ends), found.reason)
                place = found.end
            cursor = place
            ends.append(cursor)
        return Stand(tuple(ends), "")

    def _open(self, text: str, place: int, shown: str) -> int | None:
        """The end of recorded text that stands at a place; an empty thought at its end may be missing."""
        if text.startswith(shown, place):
            return place + len(shown)
        if self._voice.keep_empty_think and shown.endswith(EMPTY_THINK):
            shown = shown.removesuffix(EMPTY_THINK)
            if text.startswith(shown, place):
                return place + len(shown)
        return None

    def _find(self, text: str, index: int, start: int) -> Span | Misfit:
        entry = self._entries[index]
        assert entry.sampled_ids is not None
        return self._finder.find(text, index, entry.message, entry.sampled_ids, start)

    def _why(self, kept: int, reason: str) -> str:
        return "think_strip" if reason == "dropped" and self._entries[kept].message.reasoning else reason

    # -- verbatim ------------------------------------------------------------------------------------

    def verbatim(self) -> Extension:
        """The path stays as it was sampled; only what is new is rendered, behind as little as will do."""
        said = next((index for index in reversed(range(self._recorded)) if self._is_slot(index)), None)
        if said is None:
            # Nothing sampled to keep: the conversation is as good as new.
            return self.by_template()
        few = [Shown(Message("user", ".")), *self._entries[said:]]
        for entries in (few, self._entries) if self._voice.tail_is_local else (self._entries,):
            for plainness in range(3):
                extension = self._behind(entries, said, entries is self._entries, plainness)
                if extension is not None:
                    return extension
        return self.by_template()

    def _behind(
        self, entries: Sequence[Entry], said: int, is_whole: bool, plainness: int
    ) -> Extension | None:
        """What follows the path in a conversation that ends like ours; None where its end is not found.

        `said` is the last sampled message of the path. Shown more plainly it has no thinking, which templates
        leave out once somebody answers, or not even its text, which some take apart.
        """
        shift = len(entries) - len(self._entries)
        at = said + shift
        if plainness:
            message = entries[at].message
            text = "." if plainness == 2 else message.text or "." * (not message.calls)
            plain = Message("assistant", text, calls=message.calls)
            entries = [*entries[:at], Shown(plain, entries[at].sampled_ids), *entries[at + 1 :]]
        self._avoid_nonce(entries)
        first = self._recorded + shift
        slots = {at} | {index for index in range(first, len(entries)) if self._is_slot(index - shift)}
        while True:
            try:
                text = self._render(entries, slots, all_tools=is_whole)
            except TemplateError:
                return None
            cursor = self._end_of_said(text, entries[at], at)
            for index in range(said + 1, self._recorded):
                spelled = self._voice.encoder.spell(self._recorded_ids(index))
                if cursor is None or spelled is None or not text.startswith(spelled, cursor):
                    return None
                cursor += len(spelled)
            if cursor is None:
                return None
            layout = self._lay_out(text, entries, slots, first, cursor)
            if not layout.misfits:
                return self._assemble(text, layout, cursor, "", shift)
            slots -= layout.misfits.keys()

    def _end_of_said(self, text: str, entry: Entry, index: int) -> int | None:
        """Where a sampled message ends in a text that may show it otherwise than it was sampled."""
        sampled = entry.sampled_ids
        assert sampled is not None
        behind = self._brackets.last_end(text, index, entry.message, 0)
        if behind < 0:
            return None
        start = max(0, self._brackets.first(text, index, 0))
        found = self._finder.find(text, index, entry.message, sampled, start)
        if isinstance(found, Span):
            return found.end
        stop = self._finder.next_stop(text, behind)
        if stop is None:
            return behind
        if not self._finder.is_stopped(sampled):
            return stop[0]
        # Where the stop is the next message's opener, another opener than was sampled must still be written.
        return stop[0] if self._voice.stop_opens and int(sampled[-1]) != stop[2] else stop[1]

    # -- common --------------------------------------------------------------------------------------

    def _avoid_nonce(self, entries: Sequence[Entry]) -> bool:
        """Takes other brackets where somebody wrote ours."""
        if not self._brackets.occurs_in(entry.message for entry in entries):
            return False
        self._brackets = Brackets()
        self._finder = self._voice.finder.with_brackets(self._brackets)
        return True

    def _is_slot(self, index: int) -> bool:
        entry = self._entries[index]
        if entry.message.media:
            return False
        return entry.sampled_ids is not None if isinstance(entry, Shown) else entry.ends_sampled

    def _recorded_ids(self, index: int) -> Ids:
        entry = self._entries[index]
        assert not isinstance(entry, Shown)
        return entry.ids

    def _render(self, entries: Sequence[Entry], slots: set[int], *, all_tools: bool = True) -> str:
        voice = self._voice
        bracket = {index: self._brackets.marker(index) for index in slots}
        messages = voice.dialect.write([entry.message for entry in entries], bracket)
        tools = self._tools if all_tools else None
        text = voice.template.render(messages, tools, self._values, now=self._now)
        return unicodedata.normalize("NFC", text) if voice.composes and not text.isascii() else text

    def _lay_out(
        self, text: str, entries: Sequence[Entry], slots: set[int], first: int, cursor: int
    ) -> Layout:
        return lay_out(
            text,
            entries,
            slots,
            first=first,
            cursor=cursor,
            openings=(self._voice.dialect.generation_prompt, self._voice.dialect.history_prompt),
            finder=self._finder,
            brackets=self._brackets,
        )

    def _assemble(self, text: str, layout: Layout, cursor: int, rewritten: str, shift: int = 0) -> Extension:
        """The ids of every message of a layout, sampled ones reused, and of the opening.

        Ends in the layout move to where the tokens that cross them end, so that no letter is written twice.
        """
        pieces: list[Piece] = []
        places = [cursor]
        for index, end in enumerate(layout.ends, start=layout.first):
            span = layout.spans.get(index)
            if span is None:
                places.append(end)
                continue
            *before, head = self._encode(text, [*places, span.start], layout, index)
            pieces += [_context(ids) for ids in before]
            sampled = self._entries[index - shift].sampled_ids
            assert sampled is not None
            spans = runs_of(((len(head), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
            pieces.append(Piece(as_ids(np.concatenate((head, sampled))), spans))
            places = [span.end]
        *before, opening = self._encode(text, [*places, len(text)], layout, layout.first + len(layout.ends))
        pieces += [_context(ids) for ids in before]
        return Extension(layout.first - shift, tuple(pieces), opening, self._encoded, rewritten)

    def _encode(self, text: str, places: Sequence[int], layout: Layout, until: int) -> list[Ids]:
        """The ids of the stretches between places, which end the messages before `until`: one text is
        encoded, then cut."""
        stretches = [self._brackets.strip(text[start:end]) for start, end in pairwise(places)]
        whole = "".join(stretches)
        ids = self._voice.encoder.encode(whole)
        self._encoded += len(ids)
        cuts = np.cumsum([len(stretch) for stretch in stretches[:-1]]).tolist()
        parts, reached = self._voice.encoder.split(whole, ids, cuts)
        for back, (cut, place) in enumerate(zip(reversed(cuts), reversed(reached), strict=True), start=1):
            layout.ends[until - back - layout.first] += place - cut
        return [as_ids(part) for part in parts]


def _context(ids: Ids) -> Piece:
    return Piece(ids, runs_of(((len(ids), Origin.CONTEXT),)))


def _first_difference(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
