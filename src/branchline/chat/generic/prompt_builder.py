"""Builds one prompt: what is rendered, how much of the path is kept, and what is encoded.

`build_from_template` keeps as much of the recorded path as the template still shows; `build_verbatim` keeps
all of it and renders only what is new. The text of the last prompt of a path is remembered, so that one
comparison of texts shows whether the path still stands; if not, the prompt forks at the first message that
changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

import numpy as np

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    MessageTokens,
    NewMessage,
    PromptMessage,
    RewriteReason,
    Tools,
)
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.field_markers import FieldMarkers, MessageLayout, SpanFinder, TextSpan
from branchline.chat.generic.template_probe import EMPTY_THINK
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer_codec import ReplyReader
from branchline.core.cache import ByteLimitedCache
from branchline.core.call import ToolList
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Origin, as_ids, normalize_runs

_CACHE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class TemplateProfile:
    """What is known about one template under one set of template arguments."""

    template: ChatTemplate
    traits: TemplateTraits
    chat_template_kwargs: ChatTemplateKwargs
    reader: ReplyReader
    terminator_ids: frozenset[int]
    """The added tokens that the template writes after a reply; several if a reply ends with the opener of
    the next message (GLM)."""
    has_local_tail: bool
    """The text after a reply does not depend on the messages before it."""
    keep_empty_think: bool
    """An empty reasoning block of the generation prompt is kept although history does not show it."""


@dataclass(frozen=True)
class RenderedPrompt:
    """The marked text of a prompt, and where each message ends in it."""

    text: str
    message_ends: tuple[int, ...]
    marked: frozenset[int]
    """The indices of the messages with markers."""
    last_ids: Ids
    """The ids of the last message. Their identity is the cache key, so they are kept alive here."""

    @property
    def body_end(self) -> int:
        return self.message_ends[-1]

    @property
    def generation_prompt(self) -> str:
        return self.text[self.body_end :]


class PromptCache:
    """The rendered prompts of recent paths, and the markers with which they were rendered."""

    def __init__(self) -> None:
        self.markers = FieldMarkers()
        self._prompts: ByteLimitedCache[RenderedPrompt] = ByteLimitedCache(
            _CACHE_BYTES, lambda prompt: len(prompt.text) + 2000
        )

    def get(self, last_ids: Ids) -> RenderedPrompt | None:
        """Returns the prompt whose last message has exactly this array of ids."""
        prompt = self._prompts.get(id(last_ids))
        return prompt if prompt is not None and prompt.last_ids is last_ids else None

    def put(self, prompt: RenderedPrompt) -> None:
        self._prompts.put(id(prompt.last_ids), prompt)

    def clear(self) -> None:
        """Drops all prompts; later prompts are the same but cost more."""
        self._prompts.clear()


@dataclass(frozen=True)
class KeptPrefix:
    """The messages of a path that the template still shows: their ends, and why there are no more."""

    message_ends: tuple[int, ...]
    reason: RewriteReason = RewriteReason.NONE


class PromptBuilder:
    """Builds the next prompt of a conversation whose first `path_length` messages are on a path."""

    def __init__(
        self,
        profile: TemplateProfile,
        cache: PromptCache,
        messages: Sequence[PromptMessage],
        path_length: int,
        tools: Tools,
        now: datetime,
    ) -> None:
        self._profile = profile
        self._cache = cache
        self._messages = messages
        self._path_length = path_length
        tool_list = tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))
        self._tools = tool_list.cached_json_dicts or None
        self._now = now
        self._encoder = profile.reader.segment_encoder
        self._encoded_tokens = 0
        self._set_markers(cache.markers)

    def _set_markers(self, markers: FieldMarkers) -> None:
        traits = self._profile.traits
        self._markers = markers
        prefixes = (traits.generation_prompt, traits.history_reply_prefix)
        self._span_finder = SpanFinder(self._profile.reader, markers, prefixes)

    # -- history="template" --------------------------------------------------------------------------

    def build_from_template(self) -> Extension:
        """Returns the prompt that shows what the template shows for this conversation."""
        remembered = self._remembered_prompt()
        covered = len(remembered.message_ends) if remembered is not None else 0
        # The messages of a remembered prompt were searched for the nonce when it was built.
        if self._renew_markers_if_used(self._messages[covered:]):
            remembered, covered = None, 0
        marked = set(remembered.marked) if remembered is not None else set()
        marked |= {index for index in range(covered, len(self._messages)) if self._is_marked(index)}
        text = self._render(self._messages, marked)
        kept_prefix = (
            self._compare_with_remembered(text, remembered)
            if remembered is not None
            else self._compare_with_path_ids(text, marked)
        )
        kept = len(kept_prefix.message_ends)
        cursor = kept_prefix.message_ends[-1] if kept_prefix.message_ends else 0
        mismatches: dict[int, RewriteReason] = {}
        newly_marked = self._replies_after(kept) - marked
        if newly_marked:
            marked |= newly_marked
            before, text = text, self._render(self._messages, marked)
            if text[:cursor] != before[:cursor]:
                kept = cursor = 0
        while True:
            layout = self._span_finder.locate_messages(text, self._messages, marked, kept, cursor)
            if not layout.mismatches:
                break
            mismatches |= layout.mismatches
            marked -= layout.mismatches.keys()
            before, text = text, self._render(self._messages, marked)
            if text[:cursor] != before[:cursor]:
                # Rendering one message without markers changed an earlier one: keep nothing of the path.
                kept = cursor = 0
        reason = RewriteReason.NONE
        if kept < self._path_length:
            mismatch = None if kept in newly_marked else mismatches.get(kept)
            reason = self._rewrite_reason(kept, mismatch or kept_prefix.reason)
        extension = self._assemble(text, layout, cursor, reason)
        self._remember(text, (*kept_prefix.message_ends[:kept], *layout.message_ends), marked, extension)
        return extension

    def _remember(
        self, text: str, message_ends: tuple[int, ...], marked: set[int], extension: Extension
    ) -> None:
        tokens = extension.message_tokens
        last_ids = tokens[-1].ids if tokens else self._path_ids(len(self._messages) - 1)
        if self._markers is self._cache.markers and len(last_ids):
            self._cache.put(RenderedPrompt(text, message_ends, frozenset(marked), last_ids))

    def _replies_after(self, kept: int) -> set[int]:
        """Returns the sampled messages after the kept ones. Since they are rendered again, they may now be
        shown as they were sampled even if the path shows them differently."""
        return {
            index
            for index in range(kept, self._path_length)
            if self._messages[index].sampled_ids is not None and not self._messages[index].message.media
        }

    def _remembered_prompt(self) -> RenderedPrompt | None:
        """Returns the last prompt of the path, if it is remembered."""
        covered = self._path_length - (self._path_length > 0 and self._is_marked(self._path_length - 1))
        if not covered or self._markers is not self._cache.markers:
            return None
        return self._cache.get(self._path_ids(covered - 1))

    def _compare_with_remembered(self, text: str, remembered: RenderedPrompt) -> KeptPrefix:
        """Returns how much of the path the text shows, by comparison with the path's last prompt."""
        ends = remembered.message_ends
        if not text.startswith(remembered.text[: remembered.body_end]):
            first = bisect_right(ends, _first_difference(text, remembered.text))
            return KeptPrefix(ends[:first], RewriteReason.REWRITTEN)
        if len(ends) == self._path_length:
            return KeptPrefix(ends)
        start = self._match_text_at(text, remembered.body_end, remembered.generation_prompt)
        if start is None:
            return KeptPrefix(ends, RewriteReason.REWRITTEN)
        span = self._find_span(text, len(ends), start)
        return KeptPrefix((*ends, span.end)) if isinstance(span, TextSpan) else KeptPrefix(ends, span)

    def _compare_with_path_ids(self, text: str, marked: set[int]) -> KeptPrefix:
        """Returns the same if no prompt is remembered: recorded ids are decoded and compared one by one."""
        ends: list[int] = []
        cursor = 0
        for index in range(self._path_length):
            ids = self._path_ids(index)
            sampled = self._messages[index].sampled_ids if index in marked else None
            recorded = self._encoder.decode(ids if sampled is None else ids[: len(ids) - len(sampled)])
            end = self._match_text_at(text, cursor, recorded) if recorded is not None else None
            if end is None:
                return KeptPrefix(tuple(ends), RewriteReason.REWRITTEN)
            if sampled is not None:
                span = self._find_span(text, index, end)
                if not isinstance(span, TextSpan):
                    return KeptPrefix(tuple(ends), span)
                end = span.end
            cursor = end
            ends.append(cursor)
        return KeptPrefix(tuple(ends))

    def _match_text_at(self, text: str, offset: int, recorded: str) -> int | None:
        """Returns the end of recorded text at an offset, or None if the text differs. An empty reasoning
        block at its end may be missing."""
        if text.startswith(recorded, offset):
            return offset + len(recorded)
        if self._profile.keep_empty_think and recorded.endswith(EMPTY_THINK):
            recorded = recorded.removesuffix(EMPTY_THINK)
            if text.startswith(recorded, offset):
                return offset + len(recorded)
        return None

    def _find_span(self, text: str, index: int, start: int) -> TextSpan | RewriteReason:
        entry = self._messages[index]
        assert entry.sampled_ids is not None
        return self._span_finder.find(text, index, entry.message, entry.sampled_ids, start)

    def _rewrite_reason(self, kept: int, reason: RewriteReason) -> RewriteReason:
        strips_thinking = reason == RewriteReason.DROPPED and self._messages[kept].message.reasoning_content
        return RewriteReason.THINK_STRIP if strips_thinking else reason

    # -- history="verbatim" --------------------------------------------------------------------------

    def build_verbatim(self) -> Extension:
        """Returns the path as it was sampled and the new messages, rendered after as little as possible."""
        last_reply = next((i for i in reversed(range(self._path_length)) if self._is_marked(i)), None)
        if last_reply is None:
            # The path contains nothing sampled.
            return self.build_from_template()
        tail = [NewMessage(Message("user", ".")), *self._messages[last_reply:]]
        for messages in (tail, self._messages) if self._profile.has_local_tail else (self._messages,):
            for simplification in range(3):
                extension = self._build_after_last_reply(messages, last_reply, simplification)
                if extension is not None:
                    return extension
        return self.build_from_template()

    def _build_after_last_reply(
        self, messages: Sequence[PromptMessage], last_reply: int, simplification: int
    ) -> Extension | None:
        """Returns what follows the path, rendered in a conversation that ends like ours, or None if the end
        of the path is not found in its text.

        At simplification 1 the last reply is rendered without reasoning, which templates leave out once a
        user message follows; at 2 also without its text, which some templates take apart.
        """
        shift = len(messages) - len(self._messages)
        reply_index = last_reply + shift
        if simplification:
            message = messages[reply_index].message
            text = "." if simplification == 2 else message.content or "." * (not message.tool_calls)
            simple = NewMessage(
                Message("assistant", text, tool_calls=message.tool_calls), messages[reply_index].sampled_ids
            )
            messages = [*messages[:reply_index], simple, *messages[reply_index + 1 :]]
        self._renew_markers_if_used(messages)
        first = self._path_length + shift
        marked = {reply_index} | {i for i in range(first, len(messages)) if self._is_marked(i - shift)}
        reply = messages[reply_index]
        assert reply.sampled_ids is not None
        while True:
            try:
                text = self._render(messages, marked, include_tools=shift == 0)
            except TemplateError:
                return None
            cursor = self._span_finder.find_last_reply_end(
                text,
                reply_index,
                reply.message,
                reply.sampled_ids,
                stop_opens_next_message=len(self._profile.terminator_ids) > 1,
            )
            for index in range(last_reply + 1, self._path_length):
                recorded = self._encoder.decode(self._path_ids(index))
                if cursor is None or recorded is None or not text.startswith(recorded, cursor):
                    return None
                cursor += len(recorded)
            if cursor is None:
                return None
            layout = self._span_finder.locate_messages(text, messages, marked, first, cursor)
            if not layout.mismatches:
                return self._assemble(text, layout, cursor, RewriteReason.NONE, shift)
            marked -= layout.mismatches.keys()

    # -- both ----------------------------------------------------------------------------------------

    def _renew_markers_if_used(self, messages: Sequence[PromptMessage]) -> bool:
        """Replaces the markers if a message contains their nonce. Returns whether it did."""
        if not self._markers.nonce_occurs_in(entry.message for entry in messages):
            return False
        self._set_markers(FieldMarkers())
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
        self, messages: Sequence[PromptMessage], marked: set[int], *, include_tools: bool = True
    ) -> str:
        profile = self._profile
        markers = {index: self._markers.field_marker(index) for index in marked}
        raw = profile.traits.to_template_messages([entry.message for entry in messages], markers)
        tools = self._tools if include_tools else None
        text = profile.template.render(raw, tools, profile.chat_template_kwargs, now=self._now)
        return self._encoder.normalize(text)

    def _assemble(
        self, text: str, layout: MessageLayout, cursor: int, reason: RewriteReason, shift: int = 0
    ) -> Extension:
        """Returns the ids of every message of a layout, with sampled ids reused, and the generation prompt.

        A token may cross the end of a message; the end in the layout then moves to the end of the token, so
        that no character is encoded twice.
        """
        tokens: list[MessageTokens] = []
        offsets = [cursor]
        for index, end in enumerate(layout.message_ends, start=layout.first):
            span = layout.spans.get(index)
            if span is None:
                offsets.append(end)
                continue
            *context, prefix = self._encode(text, [*offsets, span.start], layout, index)
            tokens += [_context_tokens(ids) for ids in context]
            sampled = self._messages[index - shift].sampled_ids
            assert sampled is not None
            spans = normalize_runs(((len(prefix), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
            tokens.append(MessageTokens(as_ids(np.concatenate((prefix, sampled))), spans))
            offsets = [span.end]
        last = layout.first + len(layout.message_ends)
        *context, generation_prompt = self._encode(text, [*offsets, len(text)], layout, last)
        tokens += [_context_tokens(ids) for ids in context]
        return Extension(layout.first - shift, tuple(tokens), generation_prompt, self._encoded_tokens, reason)

    def _encode(self, text: str, offsets: Sequence[int], layout: MessageLayout, until: int) -> list[Ids]:
        """Encodes the text between the first and the last offset at once and splits the ids at the others,
        which are the ends of the messages before index `until`."""
        stretches = [self._markers.strip(text[start:end]) for start, end in pairwise(offsets)]
        whole = "".join(stretches)
        ids = self._encoder.encode(whole)
        self._encoded_tokens += len(ids)
        cuts = np.cumsum([len(stretch) for stretch in stretches[:-1]]).tolist()
        parts, actual = self._encoder.split_ids(whole, ids, cuts)
        for back, (cut, end) in enumerate(zip(reversed(cuts), reversed(actual), strict=True), start=1):
            layout.message_ends[until - back - layout.first] += end - cut
        return [as_ids(part) for part in parts]


def _context_tokens(ids: Ids) -> MessageTokens:
    return MessageTokens(ids, normalize_runs(((len(ids), Origin.CONTEXT),)))


def _first_difference(one: str, other: str) -> int:
    """Returns the length of the common prefix, by bisection."""
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
