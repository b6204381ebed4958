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

from branchline.chat.base import Extension, MessageTokens, NewMessage
from branchline.chat.generic.field_markers import FieldMarkers, Mismatch, TextSpan
from branchline.chat.generic.message_layout import MessageLayout, PromptMessage, locate_messages
from branchline.chat.generic.template_profile import EMPTY_THINK, RenderedPrompt, TemplateProfile
from branchline.core.call import ToolList
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Origin, as_ids, normalize_runs

Tools = Sequence[Mapping[str, Any]]
ChatTemplateKwargs = Mapping[str, Any]


@dataclass(frozen=True)
class KeptPrefix:
    """How much of a path the template still shows: where each kept message ends, and why no more are."""

    message_ends: tuple[int, ...]
    reason: str


class PromptBuilder:
    """A conversation of which the first `recorded` entries stand on a path."""

    def __init__(
        self,
        voice: TemplateProfile,
        entries: Sequence[PromptMessage],
        recorded: int,
        tools: Tools,
        values: ChatTemplateKwargs,
        now: datetime,
    ) -> None:
        self._profile = voice
        self._messages = entries
        self._path_length = recorded
        self._tools = (
            tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))
        ).cached_json_dicts or None
        self._chat_template_kwargs = values
        self._now = now
        self._markers = voice.markers
        self._span_finder = voice.span_finder
        self._encoded_tokens = 0

    # -- what the template shows ---------------------------------------------------------------------

    def build_from_template(self) -> Extension:
        """The prompt shows what the template shows for this conversation."""
        known = self._remembered_prompt()
        # What is remembered was looked through when it was new.
        if self._renew_markers_if_used(self._messages[len(known.message_ends) if known is not None else 0 :]):
            known = None
        slots = set(known.marked) if known is not None else set()
        covered = len(known.message_ends) if known is not None else 0
        slots |= {index for index in range(covered, len(self._messages)) if self._is_marked(index)}
        text = self._render(self._messages, slots)
        stand = (
            self._compare_with_remembered(text, known)
            if known is not None
            else self._compare_with_path_ids(text, slots)
        )
        kept = len(stand.message_ends)
        cursor = stand.message_ends[-1] if stand.message_ends else 0
        misfits: dict[int, str] = {}
        again = self._replies_to_mark_again(kept) - slots
        if again:
            slots |= again
            before, text = text, self._render(self._messages, slots)
            if text[:cursor] != before[:cursor]:
                kept = cursor = 0
        while True:
            layout = self._locate_messages(text, self._messages, slots, kept, cursor)
            if not layout.mismatches:
                break
            misfits |= layout.mismatches
            slots -= layout.mismatches.keys()
            before, text = text, self._render(self._messages, slots)
            if text[:cursor] != before[:cursor]:
                # Showing one message otherwise changed another: nothing of the path can be trusted.
                kept = cursor = 0
        reason = stand.reason if kept in again else misfits.get(kept) or stand.reason
        why = "" if kept == self._path_length else self._rewrite_reason(kept, reason)
        extension = self._assemble(text, layout, cursor, why)
        last_ids = (
            extension.message_tokens[-1].ids
            if extension.message_tokens
            else self._path_ids(len(self._messages) - 1)
        )
        if self._markers is self._profile.markers and len(last_ids):
            ends = (*stand.message_ends[:kept], *layout.message_ends)
            self._profile.rendered_prompts.put(
                id(last_ids), RenderedPrompt(text, ends, frozenset(slots), last_ids)
            )
        return extension

    def _replies_to_mark_again(self, kept: int) -> set[int]:
        """Replies behind what is kept that the path shows otherwise than they were sampled: now that they are
        written anew they may stand there as they were, thinking and all."""
        lost = range(kept, self._path_length)
        return {
            i
            for i in lost
            if self._messages[i].sampled_ids is not None and not self._messages[i].message.media
        }

    def _remembered_prompt(self) -> RenderedPrompt | None:
        """What the last prompt of the path rendered to, if that is remembered."""
        covered = self._path_length - (self._path_length > 0 and self._is_marked(self._path_length - 1))
        if covered == 0 or self._markers is not self._profile.markers:
            return None
        last_ids = self._path_ids(covered - 1)
        known = self._profile.rendered_prompts.get(id(last_ids))
        return known if known is not None and known.last_ids is last_ids else None

    def _compare_with_remembered(self, text: str, known: RenderedPrompt) -> KeptPrefix:
        """How much of the path stands, by comparing with what its last prompt rendered to."""
        body = known.body_end
        if not text.startswith(known.text[:body]):
            first = bisect_right(known.message_ends, _first_difference(text, known.text))
            return KeptPrefix(known.message_ends[:first], "rewritten")
        if len(known.message_ends) == self._path_length:
            return KeptPrefix(known.message_ends, "")
        start = self._match_text_at(text, body, known.generation_prompt)
        found = (
            self._find_span(text, len(known.message_ends), start)
            if start is not None
            else Mismatch("rewritten")
        )
        if isinstance(found, TextSpan):
            return KeptPrefix((*known.message_ends, found.end), "")
        return KeptPrefix(known.message_ends, found.reason)

    def _compare_with_path_ids(self, text: str, slots: set[int]) -> KeptPrefix:
        """The same where nothing is remembered: recorded ids are spelled out and looked for, one by one."""
        ends: list[int] = []
        cursor = 0
        for index in range(self._path_length):
            entry, ids = self._messages[index], self._path_ids(index)
            sampled = entry.sampled_ids if index in slots else None
            spelled = self._profile.segment_encoder.decode(
                ids if sampled is None else ids[: len(ids) - len(sampled)]
            )
            place = self._match_text_at(text, cursor, spelled) if spelled is not None else None
            if place is None:
                return KeptPrefix(tuple(ends), "rewritten")
            if sampled is not None:
                found = self._find_span(text, index, place)
                if isinstance(found, Mismatch):
                    return KeptPrefix(tuple(ends), found.reason)
                place = found.end
            cursor = place
            ends.append(cursor)
        return KeptPrefix(tuple(ends), "")

    def _match_text_at(self, text: str, place: int, shown: str) -> int | None:
        """The end of recorded text that stands at a place; an empty thought at its end may be missing."""
        if text.startswith(shown, place):
            return place + len(shown)
        if self._profile.keep_empty_think and shown.endswith(EMPTY_THINK):
            shown = shown.removesuffix(EMPTY_THINK)
            if text.startswith(shown, place):
                return place + len(shown)
        return None

    def _find_span(self, text: str, index: int, start: int) -> TextSpan | Mismatch:
        entry = self._messages[index]
        assert entry.sampled_ids is not None
        return self._span_finder.find(text, index, entry.message, entry.sampled_ids, start)

    def _rewrite_reason(self, kept: int, reason: str) -> str:
        return (
            "think_strip"
            if reason == "dropped" and self._messages[kept].message.reasoning_content
            else reason
        )

    # -- verbatim ------------------------------------------------------------------------------------

    def build_verbatim(self) -> Extension:
        """The path stays as it was sampled; only what is new is rendered, behind as little as will do."""
        said = next((index for index in reversed(range(self._path_length)) if self._is_marked(index)), None)
        if said is None:
            # Nothing sampled to keep: the conversation is as good as new.
            return self.build_from_template()
        few = [NewMessage(Message("user", ".")), *self._messages[said:]]
        for entries in (few, self._messages) if self._profile.tail_is_local else (self._messages,):
            for plainness in range(3):
                extension = self._build_after_last_reply(entries, said, entries is self._messages, plainness)
                if extension is not None:
                    return extension
        return self.build_from_template()

    def _build_after_last_reply(
        self, entries: Sequence[PromptMessage], said: int, is_whole: bool, plainness: int
    ) -> Extension | None:
        """What follows the path in a conversation that ends like ours; None where its end is not found.

        `said` is the last sampled message of the path. Shown more plainly it has no thinking, which templates
        leave out once somebody answers, or not even its text, which some take apart.
        """
        shift = len(entries) - len(self._messages)
        at = said + shift
        if plainness:
            message = entries[at].message
            text = "." if plainness == 2 else message.content or "." * (not message.tool_calls)
            plain = Message("assistant", text, tool_calls=message.tool_calls)
            entries = [*entries[:at], NewMessage(plain, entries[at].sampled_ids), *entries[at + 1 :]]
        self._renew_markers_if_used(entries)
        first = self._path_length + shift
        slots = {at} | {index for index in range(first, len(entries)) if self._is_marked(index - shift)}
        while True:
            try:
                text = self._render(entries, slots, include_tools=is_whole)
            except TemplateError:
                return None
            cursor = self._last_reply_end(text, entries[at], at)
            for index in range(said + 1, self._path_length):
                spelled = self._profile.segment_encoder.decode(self._path_ids(index))
                if cursor is None or spelled is None or not text.startswith(spelled, cursor):
                    return None
                cursor += len(spelled)
            if cursor is None:
                return None
            layout = self._locate_messages(text, entries, slots, first, cursor)
            if not layout.mismatches:
                return self._assemble(text, layout, cursor, "", shift)
            slots -= layout.mismatches.keys()

    def _last_reply_end(self, text: str, entry: PromptMessage, index: int) -> int | None:
        """Where a sampled message ends in a text that may show it otherwise than it was sampled."""
        sampled = entry.sampled_ids
        assert sampled is not None
        behind = self._markers.find_last_end(text, index, entry.message, 0)
        if behind < 0:
            return None
        start = max(0, self._markers.find_first(text, index, 0))
        found = self._span_finder.find(text, index, entry.message, sampled, start)
        if isinstance(found, TextSpan):
            return found.end
        stop = self._span_finder.find_next_stop(text, behind)
        if stop is None:
            return behind
        if not self._span_finder.ends_with_stop(sampled):
            return stop[0]
        # Where the stop is the next message's opener, another opener than was sampled must still be written.
        return stop[0] if self._profile.stop_opens_next_message and int(sampled[-1]) != stop[2] else stop[1]

    # -- common --------------------------------------------------------------------------------------

    def _renew_markers_if_used(self, entries: Sequence[PromptMessage]) -> bool:
        """Takes other brackets where somebody wrote ours."""
        if not self._markers.nonce_occurs_in(entry.message for entry in entries):
            return False
        self._markers = FieldMarkers()
        self._span_finder = self._profile.span_finder.with_markers(self._markers)
        return True

    def _is_marked(self, index: int) -> bool:
        entry = self._messages[index]
        if entry.message.media:
            return False
        return entry.sampled_ids is not None if isinstance(entry, NewMessage) else entry.ends_sampled

    def _path_ids(self, index: int) -> Ids:
        entry = self._messages[index]
        assert not isinstance(entry, NewMessage)
        return entry.ids

    def _render(
        self, entries: Sequence[PromptMessage], slots: set[int], *, include_tools: bool = True
    ) -> str:
        voice = self._profile
        bracket = {index: self._markers.field_marker(index) for index in slots}
        messages = voice.traits.to_template_messages([entry.message for entry in entries], bracket)
        tools = self._tools if include_tools else None
        text = voice.template.render(messages, tools, self._chat_template_kwargs, now=self._now)
        return unicodedata.normalize("NFC", text) if voice.normalizes_nfc and not text.isascii() else text

    def _locate_messages(
        self, text: str, entries: Sequence[PromptMessage], slots: set[int], first: int, cursor: int
    ) -> MessageLayout:
        return locate_messages(
            text,
            entries,
            slots,
            first=first,
            cursor=cursor,
            reply_prefixes=(
                self._profile.traits.generation_prompt,
                self._profile.traits.history_reply_prefix,
            ),
            span_finder=self._span_finder,
            markers=self._markers,
        )

    def _assemble(
        self, text: str, layout: MessageLayout, cursor: int, rewritten: str, shift: int = 0
    ) -> Extension:
        """The ids of every message of a layout, sampled ones reused, and of the opening.

        Ends in the layout move to where the tokens that cross them end, so that no letter is written twice.
        """
        pieces: list[MessageTokens] = []
        places = [cursor]
        for index, end in enumerate(layout.message_ends, start=layout.first):
            span = layout.spans.get(index)
            if span is None:
                places.append(end)
                continue
            *before, head = self._encode(text, [*places, span.start], layout, index)
            pieces += [_context_tokens(ids) for ids in before]
            sampled = self._messages[index - shift].sampled_ids
            assert sampled is not None
            spans = normalize_runs(((len(head), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
            pieces.append(MessageTokens(as_ids(np.concatenate((head, sampled))), spans))
            places = [span.end]
        *before, opening = self._encode(
            text, [*places, len(text)], layout, layout.first + len(layout.message_ends)
        )
        pieces += [_context_tokens(ids) for ids in before]
        return Extension(layout.first - shift, tuple(pieces), opening, self._encoded_tokens, rewritten)

    def _encode(self, text: str, places: Sequence[int], layout: MessageLayout, until: int) -> list[Ids]:
        """The ids of the stretches between places, which end the messages before `until`: one text is
        encoded, then cut."""
        stretches = [self._markers.strip(text[start:end]) for start, end in pairwise(places)]
        whole = "".join(stretches)
        ids = self._profile.segment_encoder.encode(whole)
        self._encoded_tokens += len(ids)
        cuts = np.cumsum([len(stretch) for stretch in stretches[:-1]]).tolist()
        parts, reached = self._profile.segment_encoder.split_ids(whole, ids, cuts)
        for back, (cut, place) in enumerate(zip(reversed(cuts), reversed(reached), strict=True), start=1):
            layout.message_ends[until - back - layout.first] += place - cut
        return [as_ids(part) for part in parts]


def _context_tokens(ids: Ids) -> MessageTokens:
    return MessageTokens(ids, normalize_runs(((len(ids), Origin.CONTEXT),)))


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
