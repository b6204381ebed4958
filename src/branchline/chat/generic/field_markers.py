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

from branchline.chat.generic.segment_encoder import SegmentEncoder
from branchline.chat.generic.template_traits import has_malformed_arguments
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

CONTENT, REASONING, FIRST_CALL = 0, 1, 2
"""Fields of a message, by the number their brackets carry."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Where a slot stands in a text: the sampled ids go from `start` to `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a slot cannot be kept."""

    reason: str


class FieldMarkers:
    """Marks fields of messages and finds them again."""

    def __init__(self, salt: str = "") -> None:
        self.nonce = salt or "Zq" + secrets.token_hex(4)
        # Ends in a character nothing combines with, so that normalisation leaves it alone.
        self._pattern = re.compile(re.escape(self.nonce) + r"\d+x\d+[ab]_")

    def nonce_occurs_in(self, messages: Iterable[Message]) -> bool:
        """Whether somebody wrote our nonce; then another one is needed."""
        return any(
            self.nonce in message.content
            or self.nonce in message.reasoning_content
            or any(self.nonce in call.arguments for call in message.tool_calls)
            for message in messages
        )

    def field_marker(self, index: int) -> Callable[[int, str], str]:
        """A function that brackets a field of the message at an index."""
        return lambda field, text: (
            f"{self._marker_text(index, field, 'a')}{text}{self._marker_text(index, field, 'b')}"
        )

    def _marker_text(self, index: int, field: int, side: str) -> str:
        return f"{self.nonce}{index}x{field}{side}_"

    def strip(self, text: str) -> str:
        return self._pattern.sub("", text) if self.nonce in text else text

    def find_first(self, text: str, index: int, start: int) -> int:
        """The place of the first bracket of a message, or -1."""
        return text.find(f"{self.nonce}{index}x", start)

    def find_last_end(self, text: str, index: int, message: Message, start: int) -> int:
        """The place behind the last bracket of a message; -1 where one is missing."""
        last = -1
        for field in _marked_fields(message):
            # Each is looked for by itself: a template that sorts keys may show the second mark first.
            for side in "ab":
                mark = self._marker_text(index, field, side)
                place = text.find(mark, start)
                if place < 0:
                    return -1
                last = max(last, place + len(mark))
        return last


def _marked_fields(message: Message) -> list[int]:
    fields = [FIRST_CALL + place for place in range(len(message.tool_calls))]
    if message.reasoning_content:
        fields.append(REASONING)
    if message.content or not fields:
        fields.append(CONTENT)
    return fields


class SpanFinder:
    """Decides where a sampled message stands in a rendered text, and whether it is all there."""

    def __init__(
        self,
        encoder: SegmentEncoder,
        brackets: FieldMarkers,
        stops: Iterable[int],
        vocab: int,
        meaning: Callable[[bytes, bool, bool, bool], object],
    ) -> None:
        self._segment_encoder = encoder
        self._normalize_reply = meaning
        """What the bytes of a reply say, given whether it was cut, whether it begins inside thinking and
        whether its calls are known by their names alone; equal meanings are one reply in two spellings."""
        self._markers = brackets
        self.stop_ids = frozenset(stops)
        markers = encoder.control_token_ids
        self._is_control_token = np.zeros(max([vocab, *(token + 1 for token in markers)]), np.bool_)
        self._is_control_token[markers] = True

    def find(self, text: str, index: int, message: Message, sampled: Ids, start: int) -> TextSpan | Mismatch:
        """The span of a slot whose opening ends at `start`."""
        last = self._markers.find_last_end(text, index, message, start)
        if last < 0:
            return Mismatch("dropped")
        stop = self.find_next_stop(text, last)
        if stop is None:
            return Mismatch("no_terminator")
        stop_start, stop_end, stop_id = stop
        stopped = self.ends_with_stop(sampled)
        if stopped and int(sampled[-1]) != stop_id:
            return Mismatch("foreign_stop")
        said = self._control_tokens_in(sampled[:-1] if stopped else sampled)
        shown = [
            token
            for _, _, token in self._segment_encoder.find_added_tokens(text, start, stop_start)
            if self._is_control_token[token]
        ]
        odd = has_malformed_arguments(message)
        # What stands in for odd arguments has markers of its own, but the reply begins as it did.
        same = said[:1] == shown[:1] if odd else said == (shown if stopped else shown[: len(said)])
        if not same:
            return Mismatch("dropped" if len(shown) < len(said) else "rewritten")
        if (stopped or message.content) and not self._has_same_meaning(
            text[start:stop_start], sampled, stopped, odd
        ):
            return Mismatch("rewritten")
        if stopped:
            return TextSpan(start, stop_end)
        # Cut: what closes the message is not the sample's, nor is the end of thinking that was left open.
        return TextSpan(start, stop_start if odd or len(said) == len(shown) else last)

    def _has_same_meaning(self, text: str, sampled: Ids, stopped: bool, odd: bool) -> bool:
        """Whether the template's text means what was sampled; mostly it is the very same text."""
        shown = self._markers.strip(text).encode("utf-8", "replace")
        said = self._segment_encoder.decode_bytes(sampled[:-1] if stopped else sampled)
        return shown == said or any(
            self._normalize_reply(shown, not stopped, inside, odd)
            == self._normalize_reply(said, not stopped, inside, odd)
            for inside in (False, True)
        )

    def find_reply_start(self, text: str, cursor: int, bracket: int, sampled: Ids) -> int:
        """Where a sample begins in front of its first bracket, in a template that opens replies with nothing.

        A sample that begins with a marker (`[TOOL_CALLS]`) begins at that marker; one that begins with text,
        behind the last marker that is not its own.
        """
        begins = self._control_tokens_in(sampled[:1])
        start = cursor
        for opened, closed, token in self._segment_encoder.find_added_tokens(text, cursor, bracket):
            if begins and token == begins[0]:
                return opened
            if self._is_control_token[token]:
                start = closed
        return start

    def with_markers(self, brackets: FieldMarkers) -> SpanFinder:
        """The same finder for texts marked with other brackets."""
        other = copy(self)
        other._markers = brackets
        return other

    def ends_with_stop(self, sampled: Ids) -> bool:
        """Whether a sample ended by itself, and was not cut."""
        return len(sampled) > 0 and int(sampled[-1]) in self.stop_ids

    def find_next_stop(self, text: str, start: int) -> tuple[int, int, int] | None:
        """The first token at or after a place that ends a message."""
        for found in self._segment_encoder.find_added_tokens(text, start):
            if found[2] in self.stop_ids:
                return found
        return None

    def _control_tokens_in(self, ids: Ids) -> list[int]:
        known = ids[(ids >= 0) & (ids < len(self._is_control_token))]
        markers: list[int] = known[self._is_control_token[known]].tolist()
        return markers
