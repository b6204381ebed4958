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

from branchline.chat.base import Extension, MessageTokens, NewMessage, PathMessage
from branchline.chat.generic.template_traits import has_malformed_arguments
from branchline.core.token_arrays import NO_IDS, Ids, Origin, as_ids, normalize_runs

PromptMessage = PathMessage | NewMessage


@dataclass(frozen=True)
class RenderedIds:
    """A conversation as ids: whose each is (-1: nobody's), and whether the model would sample it."""

    ids: Ids
    message_indices: NDArray[np.int64]
    sampled_mask: NDArray[np.bool_]
    message_count: int
    """How many messages there are."""

    @cached_property
    def message_ends(self) -> list[int]:
        """Where each message ends; what nobody owns belongs to the message behind it."""
        ends = np.zeros(self.message_count, np.int64)
        owned = np.flatnonzero(self.message_indices >= 0)
        np.maximum.at(ends, self.message_indices[owned], owned + 1)
        found: list[int] = np.maximum.accumulate(ends).tolist()
        return found

    def message_ids(self, index: int) -> Ids:
        """The ids of one message, without what stands between it and the one before."""
        return as_ids(self.ids[self.message_indices == index])

    def sampled_span(self, index: int) -> tuple[int, int] | None:
        """Where the ids stand that the model would sample for a message."""
        return self._sampled_spans.get(index)

    @cached_property
    def _sampled_spans(self) -> dict[int, tuple[int, int]]:
        spans: dict[int, tuple[int, int]] = {}
        places = np.flatnonzero(self.sampled_mask & (self.message_indices >= 0))
        for place, owner in zip(places.tolist(), self.message_indices[places].tolist(), strict=True):
            start, _ = spans.get(owner, (place, 0))
            spans[owner] = start, place + 1
        return spans

    @property
    def generation_prompt_ids(self) -> Ids:
        return self.ids[self.message_ends[-1] :]


@dataclass(frozen=True)
class TokenReader:
    """How to read ids: their bytes, their markers, and what they mean."""

    decode: Callable[[Ids], bytes]
    control_tokens: Callable[[Ids], list[int]]
    """The added tokens among ids."""
    normalize_reply: Callable[[bytes, bool, bool], object]
    """What an output without its stop says; the flags: it was cut, its calls are known by name alone."""
    encode: Callable[[str], Ids]
    stop_ids: frozenset[int]

    def ends_with_stop(self, sampled: Ids) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids


@dataclass(frozen=True, slots=True)
class SpliceMatch:
    """A sampled message that is shown in full."""

    prefix: Ids
    """What stands before it."""
    end: int
    """Where the render goes on behind it."""
    closing_ids: Ids
    """What closes it if it was cut in the middle of something, such as its thinking."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a message stands in a render, and which ids of the render lead up to it."""

    index: int
    cursor: int
    prefix: Ids = field(default_factory=lambda: NO_IDS)
    """Closers of the message before."""


class Splicer:
    """Puts sampled ids in their places in one render."""

    def __init__(self, render: RenderedIds, entries: Sequence[PromptMessage], reading: TokenReader) -> None:
        self._render = render
        self._messages = entries
        self._reader = reading
        self.mismatches: dict[int, str] = {}
        """Sampled messages that are not shown in full, and why."""

    def build_from_template(self, recorded: int) -> Extension:
        """The prompt as rendered, sampled ids in it; as much of the path is kept as it has."""
        pieces, opening = self._splice(_Position(0, 0))
        kept = 0
        while kept < recorded and np.array_equal(pieces[kept].ids, self._path_message(kept).ids):
            kept += 1
        reason = ""
        if kept < recorded:
            thought = self._messages[kept].message.reasoning_content and kept in self.mismatches
            reason = "think_strip" if thought else self.mismatches.get(kept, "rewritten")
        return self._extension(kept, pieces[kept:], opening, reason)

    def build_verbatim(self, recorded: int, alone: Callable[[], RenderedIds]) -> Extension | None:
        """The whole path and what is new behind it; None where the render does not show how they join.

        `alone` renders the path without what is new, where its last message is still shown in full.
        """
        last = recorded - 1
        entry = self._path_message(last)
        if entry.ends_sampled:
            place = self._position_after_sampled(last, alone)
        else:
            own = self._render.message_ids(last)
            joins = len(own) > 0 and np.array_equal(entry.ids[len(entry.ids) - len(own) :], own)
            place = _Position(recorded, self._render.message_ends[last]) if joins else None
        if place is None:
            return None
        pieces, opening = self._splice(place)
        return self._extension(recorded, pieces, opening, "")

    def _position_after_sampled(self, index: int, alone: Callable[[], RenderedIds]) -> _Position | None:
        span = self._render.sampled_span(index)
        sampled = self._messages[index].sampled_ids
        if span is None or sampled is None:
            return None
        stop_start, stop_end = self._stop_span(span[1], index)
        if self._reader.ends_with_stop(sampled):
            return _Position(index + 1, stop_end)
        closers = NO_IDS
        for shown_alone in (False, True):
            weaver = Splicer(alone(), self._messages, self._reader) if shown_alone else self
            start = weaver._render.message_ends[index - 1] if index else 0
            fit = weaver._match(_Position(index, start), sampled)
            if isinstance(fit, SpliceMatch):
                closers = fit.closing_ids
                break
        return _Position(index + 1, stop_start, closers)

    # -- weaving -------------------------------------------------------------------------------------

    def _splice(self, place: _Position) -> tuple[list[MessageTokens], Ids]:
        """The ids of every message from a place on, and of the opening."""
        pieces: list[MessageTokens] = []
        cursor, lead = place.cursor, place.prefix
        for index in range(place.index, len(self._messages)):
            sampled = self._messages[index].sampled_ids
            fit = self._match(_Position(index, cursor, lead), sampled) if sampled is not None else ""
            if isinstance(fit, SpliceMatch):
                assert sampled is not None
                spans = normalize_runs(((len(fit.prefix), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
                pieces.append(MessageTokens(_concatenate(fit.prefix, sampled), spans))
                cursor, lead = fit.end, fit.closing_ids
                continue
            if fit:
                self.mismatches[index] = fit
            end = max(cursor, self._render.message_ends[index])
            ids = _concatenate(lead, self._render.ids[cursor:end])
            pieces.append(MessageTokens(ids, normalize_runs(((len(ids), Origin.CONTEXT),))))
            cursor, lead = end, NO_IDS
        return pieces, _concatenate(lead, self._render.ids[cursor:])

    def _extension(self, kept: int, pieces: list[MessageTokens], opening: Ids, rewritten: str) -> Extension:
        encoded = len(opening)
        for index, piece in enumerate(pieces, start=kept):
            sampled = self._messages[index].sampled_ids
            reused = len(sampled) if sampled is not None and index not in self.mismatches else 0
            encoded += len(piece.ids) - reused
        return Extension(kept, tuple(pieces), opening, encoded, rewritten)

    def _match(self, place: _Position, sampled: Ids) -> SpliceMatch | str:
        """How a sampled message fits into the render, or why it does not."""
        read, render = self._reader, self._render
        span = render.sampled_span(place.index)
        if span is None:
            return "dropped"
        shown_end, end = self._stop_span(span[1], place.index)
        stopped = read.ends_with_stop(sampled)
        if stopped and end == shown_end:
            return "no_terminator"
        if stopped and int(render.ids[shown_end]) != int(sampled[-1]):
            return "foreign_stop"
        body = sampled[:-1] if stopped else sampled
        before = _concatenate(place.prefix, render.ids[place.cursor : shown_end])
        heads = self._prefix_candidates(place, span[0])
        for head in heads:
            if np.array_equal(before, _concatenate(head, body)):
                return SpliceMatch(head, end if stopped else shown_end, NO_IDS)
        said, marks = read.decode(body), read.control_tokens(body)
        text, all_marks = read.decode(before), read.control_tokens(before)
        odd = has_malformed_arguments(self._messages[place.index].message)
        for head in heads:
            head_text, head_marks = read.decode(head), read.control_tokens(head)
            if not text.startswith(head_text) or all_marks[: len(head_marks)] != head_marks:
                continue
            shown, shown_marks = text[len(head_text) :], all_marks[len(head_marks) :]
            # What stands in for odd arguments has markers of its own, but the reply begins as it did.
            same_marks = shown_marks[:1] == marks[:1] if odd else shown_marks == marks
            if same_marks and self._has_same_meaning(shown, said, cut=not stopped, by_name=odd):
                return SpliceMatch(head, end if stopped else shown_end, NO_IDS)
            if not stopped and shown_marks[: len(marks)] == marks:
                closers = _text_after(shown, said)
                if closers is not None:
                    return SpliceMatch(head, shown_end, read.encode(closers))
        return "rewritten"

    def _prefix_candidates(self, place: _Position, start: int) -> list[Ids]:
        """What may stand before a sample: what stood there, the render's, or that and a begun answer."""
        entry = self._messages[place.index]
        heads: list[Ids] = []
        if not isinstance(entry, NewMessage) and entry.ends_sampled and entry.sampled_ids is not None:
            heads.append(entry.ids[: len(entry.ids) - len(entry.sampled_ids)])
        plain = _concatenate(place.prefix, self._render.ids[place.cursor : start])
        heads.append(plain)
        opening = self._render.generation_prompt_ids
        for cut in range(len(opening) - 1, 0, -1):
            if np.array_equal(plain[len(plain) - cut :], opening[:cut]):
                # Some generation prompts begin the answer (`<think>`), which history shows as the model's.
                heads.append(_concatenate(plain, opening[cut:]))
                break
        return heads

    def _stop_span(self, end: int, index: int) -> tuple[int, int]:
        """Where the stop of a message begins and ends; both are the same where it has none."""
        ids, stops = self._render.ids, self._reader.stop_ids
        if int(ids[end - 1]) in stops:
            return end - 1, end
        if end < len(ids) and int(ids[end]) in stops and self._render.message_indices[end] == index:
            return end, end + 1
        return end, end

    def _has_same_meaning(self, shown: bytes, said: bytes, *, cut: bool, by_name: bool) -> bool:
        meaning = self._reader.normalize_reply
        return shown == said or meaning(shown, cut, by_name) == meaning(said, cut, by_name)

    def _path_message(self, index: int) -> PathMessage:
        entry = self._messages[index]
        assert not isinstance(entry, NewMessage)
        return entry


def _text_after(shown: bytes, said: bytes) -> str | None:
    """What a render puts behind a sample that was cut, if it shows the sample."""
    whole, begun = shown.decode("utf-8", "replace"), said.decode("utf-8", "replace").rstrip()
    return whole[len(begun) :] if whole.startswith(begun) else None


def _concatenate(*parts: Ids) -> Ids:
    return as_ids(np.concatenate(parts))
