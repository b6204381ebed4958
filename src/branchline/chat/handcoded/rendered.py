"""Sampled ids woven into a conversation that a renderer wrote out as ids.

A renderer says of every id which message it belongs to and whether the model would sample it. Where those
ids of a message mean what was sampled for it, in whatever style, the sampled ids stand in their place; where
the renderer dropped or rewrote something, its own ids do. The rest of the render is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import Extension, Piece, Recorded, Shown
from branchline.chat.generic.dialect import has_odd_arguments
from branchline.core.runs import NO_IDS, Ids, Origin, as_ids, runs_of

Entry = Recorded | Shown


@dataclass(frozen=True)
class Render:
    """A conversation as ids: whose each is (-1: nobody's), and whether the model would sample it."""

    ids: Ids
    owners: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    count: int
    """How many messages there are."""

    @cached_property
    def ends(self) -> list[int]:
        """Where each message ends; what nobody owns belongs to the message behind it."""
        ends = np.zeros(self.count, np.int64)
        owned = np.flatnonzero(self.owners >= 0)
        np.maximum.at(ends, self.owners[owned], owned + 1)
        found: list[int] = np.maximum.accumulate(ends).tolist()
        return found

    def own(self, index: int) -> Ids:
        """The ids of one message, without what stands between it and the one before."""
        return as_ids(self.ids[self.owners == index])

    def sampled_span(self, index: int) -> tuple[int, int] | None:
        """Where the ids stand that the model would sample for a message."""
        return self._sampled_spans.get(index)

    @cached_property
    def _sampled_spans(self) -> dict[int, tuple[int, int]]:
        spans: dict[int, tuple[int, int]] = {}
        places = np.flatnonzero(self.sampled & (self.owners >= 0))
        for place, owner in zip(places.tolist(), self.owners[places].tolist(), strict=True):
            start, _ = spans.get(owner, (place, 0))
            spans[owner] = start, place + 1
        return spans

    @property
    def opening(self) -> Ids:
        return self.ids[self.ends[-1] :]


@dataclass(frozen=True)
class Reading:
    """How to read ids: their bytes, their markers, and what they mean."""

    spell: Callable[[Ids], bytes]
    markers: Callable[[Ids], list[int]]
    """The added tokens among ids."""
    meaning: Callable[[bytes, bool, bool], object]
    """What an output without its stop says; the flags: it was cut, its calls are known by name alone."""
    encode: Callable[[str], Ids]
    stops: frozenset[int]

    def is_stopped(self, sampled: Ids) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.stops


@dataclass(frozen=True, slots=True)
class Fit:
    """A sampled message that is shown in full."""

    head: Ids
    """What stands before it."""
    end: int
    """Where the render goes on behind it."""
    closers: Ids
    """What closes it if it was cut in the middle of something, such as its thinking."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a message stands in a render, and which ids of the render lead up to it."""

    index: int
    cursor: int
    lead: Ids = field(default_factory=lambda: NO_IDS)
    """Closers of the message before."""


class Weaver:
    """Puts sampled ids in their places in one render."""

    def __init__(self, render: Render, entries: Sequence[Entry], reading: Reading) -> None:
        self._render = render
        self._entries = entries
        self._reading = reading
        self.misfits: dict[int, str] = {}
        """Sampled messages that are not shown in full, and why."""

    def by_template(self, recorded: int) -> Extension:
        """The prompt as rendered, sampled ids in it; as much of the path is kept as it has."""
        pieces, opening = self._weave(_Place(0, 0))
        kept = 0
        while kept < recorded and np.array_equal(pieces[kept].ids, self._recorded(kept).ids):
            kept += 1
        reason = ""
        if kept < recorded:
            thought = self._entries[kept].message.reasoning and kept in self.misfits
            reason = "think_strip" if thought else self.misfits.get(kept, "rewritten")
        return self._extension(kept, pieces[kept:], opening, reason)

    def verbatim(self, recorded: int, alone: Callable[[], Render]) -> Extension | None:
        """The whole path and what is new behind it; None where the render does not show how they join.

        `alone` renders the path without what is new, where its last message is still shown in full.
        """
        last = recorded - 1
        entry = self._recorded(last)
        if entry.ends_sampled:
            place = self._behind_sampled(last, alone)
        else:
            own = self._render.own(last)
            joins = len(own) > 0 and np.array_equal(entry.ids[len(entry.ids) - len(own) :], own)
            place = _Place(recorded, self._render.ends[last]) if joins else None
        if place is None:
            return None
        pieces, opening = self._weave(place)
        return self._extension(recorded, pieces, opening, "")

    def _behind_sampled(self, index: int, alone: Callable[[], Render]) -> _Place | None:
        span = self._render.sampled_span(index)
        sampled = self._entries[index].sampled_ids
        if span is None or sampled is None:
            return None
        stop_start, stop_end = self._stop(span[1], index)
        if self._reading.is_stopped(sampled):
            return _Place(index + 1, stop_end)
        closers = NO_IDS
        for shown_alone in (False, True):
            weaver = Weaver(alone(), self._entries, self._reading) if shown_alone else self
            start = weaver._render.ends[index - 1] if index else 0
            fit = weaver._fit(_Place(index, start), sampled)
            if isinstance(fit, Fit):
                closers = fit.closers
                break
        return _Place(index + 1, stop_start, closers)

    # -- weaving -------------------------------------------------------------------------------------

    def _weave(self, place: _Place) -> tuple[list[Piece], Ids]:
        """The ids of every message from a place on, and of the opening."""
        pieces: list[Piece] = []
        cursor, lead = place.cursor, place.lead
        for index in range(place.index, len(self._entries)):
            sampled = self._entries[index].sampled_ids
            fit = self._fit(_Place(index, cursor, lead), sampled) if sampled is not None else ""
            if isinstance(fit, Fit):
                assert sampled is not None
                spans = runs_of(((len(fit.head), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
                pieces.append(Piece(_join(fit.head, sampled), spans))
                cursor, lead = fit.end, fit.closers
                continue
            if fit:
                self.misfits[index] = fit
            end = max(cursor, self._render.ends[index])
            ids = _join(lead, self._render.ids[cursor:end])
            pieces.append(Piece(ids, runs_of(((len(ids), Origin.CONTEXT),))))
            cursor, lead = end, NO_IDS
        return pieces, _join(lead, self._render.ids[cursor:])

    def _extension(self, kept: int, pieces: list[Piece], opening: Ids, rewritten: str) -> Extension:
        encoded = len(opening)
        for index, piece in enumerate(pieces, start=kept):
            sampled = self._entries[index].sampled_ids
            reused = len(sampled) if sampled is not None and index not in self.misfits else 0
            encoded += len(piece.ids) - reused
        return Extension(kept, tuple(pieces), opening, encoded, rewritten)

    def _fit(self, place: _Place, sampled: Ids) -> Fit | str:
        """How a sampled message fits into the render, or why it does not."""
        read, render = self._reading, self._render
        span = render.sampled_span(place.index)
        if span is None:
            return "dropped"
        shown_end, end = self._stop(span[1], place.index)
        stopped = read.is_stopped(sampled)
        if stopped and end == shown_end:
            return "no_terminator"
        if stopped and int(render.ids[shown_end]) != int(sampled[-1]):
            return "foreign_stop"
        body = sampled[:-1] if stopped else sampled
        before = _join(place.lead, render.ids[place.cursor : shown_end])
        heads = self._heads(place, span[0])
        for head in heads:
            if np.array_equal(before, _join(head, body)):
                return Fit(head, end if stopped else shown_end, NO_IDS)
        said, marks = read.spell(body), read.markers(body)
        text, all_marks = read.spell(before), read.markers(before)
        odd = has_odd_arguments(self._entries[place.index].message)
        for head in heads:
            head_text, head_marks = read.spell(head), read.markers(head)
            if not text.startswith(head_text) or all_marks[: len(head_marks)] != head_marks:
                continue
            shown, shown_marks = text[len(head_text) :], all_marks[len(head_marks) :]
            # What stands in for odd arguments has markers of its own, but the reply begins as it did.
            same_marks = shown_marks[:1] == marks[:1] if odd else shown_marks == marks
            if same_marks and self._same(shown, said, cut=not stopped, by_name=odd):
                return Fit(head, end if stopped else shown_end, NO_IDS)
            if not stopped and shown_marks[: len(marks)] == marks:
                closers = _behind(shown, said)
                if closers is not None:
                    return Fit(head, shown_end, read.encode(closers))
        return "rewritten"

    def _heads(self, place: _Place, start: int) -> list[Ids]:
        """What may stand before a sample: what stood there, the render's, or that and a begun answer."""
        entry = self._entries[place.index]
        heads: list[Ids] = []
        if not isinstance(entry, Shown) and entry.ends_sampled and entry.sampled_ids is not None:
            heads.append(entry.ids[: len(entry.ids) - len(entry.sampled_ids)])
        plain = _join(place.lead, self._render.ids[place.cursor : start])
        heads.append(plain)
        opening = self._render.opening
        for cut in range(len(opening) - 1, 0, -1):
            if np.array_equal(plain[len(plain) - cut :], opening[:cut]):
                # Some generation prompts begin the answer (`<think>`), which history shows as the model's.
                heads.append(_join(plain, opening[cut:]))
                break
        return heads

    def _stop(self, end: int, index: int) -> tuple[int, int]:
        """Where the stop of a message begins and ends; both are the same where it has none."""
        ids, stops = self._render.ids, self._reading.stops
        if int(ids[end - 1]) in stops:
            return end - 1, end
        if end < len(ids) and int(ids[end]) in stops and self._render.owners[end] == index:
            return end, end + 1
        return end, end

    def _same(self, shown: bytes, said: bytes, *, cut: bool, by_name: bool) -> bool:
        meaning = self._reading.meaning
        return shown == said or meaning(shown, cut, by_name) == meaning(said, cut, by_name)

    def _recorded(self, index: int) -> Recorded:
        entry = self._entries[index]
        assert not isinstance(entry, Shown)
        return entry


def _behind(shown: bytes, said: bytes) -> str | None:
    """What a render puts behind a sample that was cut, if it shows the sample."""
    whole, begun = shown.decode("utf-8", "replace"), said.decode("utf-8", "replace").rstrip()
    return whole[len(begun) :] if whole.startswith(begun) else None


def _join(*parts: Ids) -> Ids:
    return as_ids(np.concatenate(parts))
