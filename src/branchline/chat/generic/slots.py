"""Slots: sampled messages inside a rendered conversation, found by marks around their fields.

A template is shown every sampled message with its fields in brackets (a nonce before and after). Where all
brackets come out again, a stop token follows and the added tokens between are those of the sample, the
template shows the message in full, in whatever style: its text is the sample's place, and the ids that were
sampled stand there. Otherwise the template dropped or rewrote something, and that is a fork.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np

from branchline.chat.generic.dialect import has_odd_arguments
from branchline.chat.generic.segments import SegmentEncoder
from branchline.core.message import Message
from branchline.core.runs import Ids

CONTENT, REASONING, FIRST_CALL = 0, 1, 2
"""Fields of a message, by the number their brackets carry."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a slot stands in a text: the sampled ids go from `start` to `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a slot cannot be kept."""

    reason: str


class Brackets:
    """Marks fields of messages and finds them again."""

    def __init__(self, salt: str = "") -> None:
        self.salt = salt or "Zq" + secrets.token_hex(4)
        # Ends in a character nothing combines with, so that normalisation leaves it alone.
        self._any = re.compile(re.escape(self.salt) + r"\d+x\d+[ab]_")

    def occurs_in(self, messages: Iterable[Message]) -> bool:
        """Whether somebody wrote our nonce; then another one is needed."""
        return any(
            self.salt in message.text
            or self.salt in message.reasoning
            or any(self.salt in call.arguments for call in message.calls)
            for message in messages
        )

    def marker(self, index: int) -> Callable[[int, str], str]:
        """A function that brackets a field of the message at an index."""
        return lambda field, text: f"{self._mark(index, field, 'a')}{text}{self._mark(index, field, 'b')}"

    def _mark(self, index: int, field: int, side: str) -> str:
        return f"{self.salt}{index}x{field}{side}_"

    def strip(self, text: str) -> str:
        return self._any.sub("", text) if self.salt in text else text

    def first(self, text: str, index: int, start: int) -> int:
        """The place of the first bracket of a message, or -1."""
        return text.find(f"{self.salt}{index}x", start)

    def last_end(self, text: str, index: int, message: Message, start: int) -> int:
        """The place behind the last bracket of a message; -1 where one is missing."""
        last = -1
        for field in _fields(message):
            # Each is looked for by itself: a template that sorts keys may show the second mark first.
            for side in "ab":
                mark = self._mark(index, field, side)
                place = text.find(mark, start)
                if place < 0:
                    return -1
                last = max(last, place + len(mark))
        return last


def _fields(message: Message) -> list[int]:
    fields = [FIRST_CALL + place for place in range(len(message.calls))]
    if message.reasoning:
        fields.append(REASONING)
    if message.text or not fields:
        fields.append(CONTENT)
    return fields


class SlotFinder:
    """Decides where a sampled message stands in a rendered text, and whether it is all there."""

    def __init__(
        self,
        encoder: SegmentEncoder,
        brackets: Brackets,
        stops: Iterable[int],
        vocab: int,
        meaning: Callable[[bytes, bool, bool, bool], object],
    ) -> None:
        self._encoder = encoder
        self._meaning = meaning
        """What the bytes of a reply say, given whether it was cut, whether it begins inside thinking and
        whether its calls are known by their names alone; equal meanings are one reply in two spellings."""
        self._brackets = brackets
        self.stops = frozenset(stops)
        markers = encoder.marker_ids
        self._is_marker = np.zeros(max([vocab, *(token + 1 for token in markers)]), np.bool_)
        self._is_marker[markers] = True

    def find(self, text: str, index: int, message: Message, sampled: Ids, start: int) -> Span | Misfit:
        """The span of a slot whose opening ends at `start`."""
        last = self._brackets.last_end(text, index, message, start)
        if last < 0:
            return Misfit("dropped")
        stop = self.next_stop(text, last)
        if stop is None:
            return Misfit("no_terminator")
        stop_start, stop_end, stop_id = stop
        stopped = self.is_stopped(sampled)
        if stopped and int(sampled[-1]) != stop_id:
            return Misfit("foreign_stop")
        said = self._markers(sampled[:-1] if stopped else sampled)
        shown = [
            token for _, _, token in self._encoder.added_in(text, start, stop_start) if self._is_marker[token]
        ]
        odd = has_odd_arguments(message)
        # What stands in for odd arguments has markers of its own, but the reply begins as it did.
        same = said[:1] == shown[:1] if odd else said == (shown if stopped else shown[: len(said)])
        if not same:
            return Misfit("dropped" if len(shown) < len(said) else "rewritten")
        if (stopped or message.text) and not self._says_the_same(
            text[start:stop_start], sampled, stopped, odd
        ):
            return Misfit("rewritten")
        if stopped:
            return Span(start, stop_end)
        # Cut: what closes the message is not the sample's, nor is the end of thinking that was left open.
        return Span(start, stop_start if odd or len(said) == len(shown) else last)

    def _says_the_same(self, text: str, sampled: Ids, stopped: bool, odd: bool) -> bool:
        """Whether the template's text means what was sampled; mostly it is the very same text."""
        shown = self._brackets.strip(text).encode("utf-8", "replace")
        said = self._encoder.spell_bytes(sampled[:-1] if stopped else sampled)
        return shown == said or any(
            self._meaning(shown, not stopped, inside, odd) == self._meaning(said, not stopped, inside, odd)
            for inside in (False, True)
        )

    def start_before(self, text: str, cursor: int, bracket: int, sampled: Ids) -> int:
        """Where a sample begins in front of its first bracket, in a template that opens replies with nothing.

        A sample that begins with a marker (`[TOOL_CALLS]`) begins at that marker; one that begins with text,
        behind the last marker that is not its own.
        """
        begins = self._markers(sampled[:1])
        start = cursor
        for opened, closed, token in self._encoder.added_in(text, cursor, bracket):
            if begins and token == begins[0]:
                return opened
            if self._is_marker[token]:
                start = closed
        return start

    def with_brackets(self, brackets: Brackets) -> SlotFinder:
        """The same finder for texts marked with other brackets."""
        other = copy(self)
        other._brackets = brackets
        return other

    def is_stopped(self, sampled: Ids) -> bool:
        """Whether a sample ended by itself, and was not cut."""
        return len(sampled) > 0 and int(sampled[-1]) in self.stops

    def next_stop(self, text: str, start: int) -> tuple[int, int, int] | None:
        """The first token at or after a place that ends a message."""
        for found in self._encoder.added_in(text, start):
            if found[2] in self.stops:
                return found
        return None

    def _markers(self, ids: Ids) -> list[int]:
        known = ids[(ids >= 0) & (ids < len(self._is_marker))]
        markers: list[int] = known[self._is_marker[known]].tolist()
        return markers
