"""Builds one prompt: what is rendered, how much of the path is kept, and what is encoded.

`build_from_template` keeps as much of the recorded path as the template still shows; `verbatim_builder` keeps
all of it and renders only what is new. The text of the last prompt of a path is remembered, so that one
comparison of texts shows whether the path still stands; if not, the prompt forks at the first message that
changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise

import numpy as np

from branchline.chat.base import (
    ChatTemplateKwargs,
    Extension,
    MessageTokens,
    NewMessage,
    PathMessage,
    PromptMessage,
    RewriteReason,
    Tools,
)
from branchline.chat.generic.chat_template import ChatTemplate, first_difference
from branchline.chat.generic.reply_endings import ReplyEndings
from branchline.chat.generic.span_finder import MessageLayout, SpanFinder, TextSpan
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.token_escapes import MessageEscapes
from branchline.chat.tokenizer_codec import ReplyReader
from branchline.chat.vision import ImageExpander
from branchline.core.cache import ByteLimitedCache
from branchline.core.call import ToolList
from branchline.core.token_arrays import Ids, Origin, as_ids, normalize_runs

_CACHE_BYTES = 128 * 1024 * 1024
_ENTRY_BYTES = 2000
"""What a remembered prompt takes besides its text."""


@dataclass(frozen=True)
class TemplateProfile:
    """What is known about one template under one set of template arguments."""

    template: ChatTemplate
    traits: TemplateTraits
    chat_template_kwargs: ChatTemplateKwargs
    reader: ReplyReader
    endings: ReplyEndings
    span_finder: SpanFinder
    has_local_tail: bool
    """The text after a reply does not depend on the messages before it."""
    keep_empty_think: bool
    """An empty reasoning block of the generation prompt is kept although history does not show it."""
    escapes: MessageEscapes
    """Keeps text of messages from becoming control tokens."""
    image_expander: ImageExpander | None = None
    """None if the model reads text only."""
    closed_by_stop: set[Hashable] = field(default_factory=set)
    """Kinds of replies and next messages between which the template was seen to write one stop token."""

    @property
    def terminator_ids(self) -> frozenset[int]:
        """The tokens that end a reply in a prompt."""
        return self.endings.terminator_ids


@dataclass(frozen=True)
class RenderedPrompt:
    """The marked text of a prompt, and where each message ends in it."""

    text: str
    message_ends: tuple[int, ...]
    marked: frozenset[int]
    """The indices of the messages with markers."""
    escaped: frozenset[int]
    """The indices of the messages that contain the text of a control token."""
    last_ids: Ids
    """The ids of the last message. Their identity is the cache key, so they are kept alive here."""


def create_prompt_cache() -> ByteLimitedCache[RenderedPrompt]:
    """Returns a cache of the rendered prompts of recent paths. It saves time and never changes a prompt."""
    return ByteLimitedCache(_CACHE_BYTES)


@dataclass(frozen=True)
class KeptPrefix:
    """The messages of a path that the template still shows: their ends, and why there are no more."""

    message_ends: tuple[int, ...]
    reason: RewriteReason = RewriteReason.NONE


class PromptBuilder:
    """Builds the next prompt of a path and new messages."""

    def __init__(
        self,
        profile: TemplateProfile,
        cache: ByteLimitedCache[RenderedPrompt],
        path: Sequence[PathMessage],
        new: Sequence[NewMessage],
        tools: Tools,
        now: datetime,
    ) -> None:
        self._profile = profile
        self._cache = cache
        self._path = path
        self._messages: list[PromptMessage] = [*path, *new]
        self._now = now
        self._encoder = profile.reader.segment_encoder
        self._escapes = profile.escapes
        tool_list = tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))
        self._tools = self._escapes.escape_tools(tool_list) or None
        self._finder = profile.span_finder.with_tools(tool_list) if tool_list else profile.span_finder

    # -- history="template" --------------------------------------------------------------------------

    def build_from_template(self) -> Extension:
        """Returns the prompt that shows what the template shows for this conversation."""
        remembered = self._remembered_prompt()
        covered = len(remembered.message_ends) if remembered is not None else 0
        # The messages of a remembered prompt were searched for the nonce when it was built.
        if self._finder.markers.nonce_occurs_in(entry.message for entry in self._messages[covered:]):
            self._finder = self._finder.with_new_markers()
            remembered, covered = None, 0
        marked = set(remembered.marked) if remembered is not None else set()
        marked |= {index for index in range(covered, len(self._messages)) if self._is_marked(index)}
        escaped = set(remembered.escaped) if remembered is not None else set()
        escaped |= {
            index
            for index in range(covered, len(self._messages))
            if self._escapes.occurs_in(self._messages[index].message)
        }
        text = self._render(self._messages, marked, escaped)
        kept_prefix = (
            self._compare_with_remembered(text, remembered, marked)
            if remembered is not None
            else self._compare_with_path_ids(text, marked)
        )
        if kept_prefix.message_ends and not self._is_marked(len(kept_prefix.message_ends) - 1):
            kept_prefix = self._without_joined_end(text, kept_prefix)
        kept = len(kept_prefix.message_ends)
        cursor = kept_prefix.message_ends[-1] if kept_prefix.message_ends else 0
        mismatches: dict[int, RewriteReason] = {}
        # Sampled messages after the kept ones are rendered again, so they may now be shown as they were
        # sampled even if the path shows them differently.
        newly_marked = {
            index
            for index in range(kept, len(self._path))
            if index not in marked
            and self._path[index].sampled_ids is not None
            and not self._path[index].message.media
        }
        if newly_marked:
            marked |= newly_marked
            before, text = text, self._render(self._messages, marked, escaped)
            if text[:cursor] != before[:cursor]:
                kept = cursor = 0
        while True:
            escapes = self._escapes.of_messages(self._messages, marked, escaped)
            layout = self._finder.locate_messages(text, self._messages, marked, kept, cursor, escapes)
            if not layout.mismatches:
                break
            mismatches |= layout.mismatches
            marked -= layout.mismatches.keys()
            before, text = text, self._render(self._messages, marked, escaped)
            if text[:cursor] != before[:cursor]:
                # Rendering one message without markers changed an earlier one: keep nothing of the path.
                kept = cursor = 0
        reason = RewriteReason.NONE
        if kept < len(self._path):
            mismatch = None if kept in newly_marked else mismatches.get(kept)
            reason = mismatch or kept_prefix.reason
            if reason == RewriteReason.DROPPED and self._path[kept].message.reasoning_content:
                reason = RewriteReason.THINK_STRIP
        extension = self._assemble(text, layout, cursor, reason)
        if self._finder.markers is self._profile.span_finder.markers:
            tokens = extension.message_tokens
            last_ids = tokens[-1].ids if tokens else self._path[-1].ids
            if len(last_ids):
                ends = (*kept_prefix.message_ends[:kept], *layout.message_ends)
                prompt = RenderedPrompt(text, ends, frozenset(marked), frozenset(escaped), last_ids)
                self._cache.put(id(last_ids), prompt, len(text) + _ENTRY_BYTES)
        return extension

    def _remembered_prompt(self) -> RenderedPrompt | None:
        """Returns the last prompt of the path, if it is remembered."""
        covered = len(self._path) - (len(self._path) > 0 and self._is_marked(len(self._path) - 1))
        if not covered or self._finder.markers is not self._profile.span_finder.markers:
            return None
        last_ids = self._path[covered - 1].ids
        prompt = self._cache.get(id(last_ids))
        return prompt if prompt is not None and prompt.last_ids is last_ids else None

    def _compare_with_remembered(self, text: str, remembered: RenderedPrompt, marked: set[int]) -> KeptPrefix:
        """Returns how much of the path the text shows, by comparison with the path's last prompt."""
        ends, body_end = remembered.message_ends, remembered.message_ends[-1]
        if not text.startswith(remembered.text[:body_end]):
            if self._kept_reasoning_block:
                # Some templates show an empty block up to the next question and drop it then.
                return self._compare_with_path_ids(text, marked)
            first = bisect_right(ends, first_difference(text, remembered.text))
            return KeptPrefix(ends[:first], RewriteReason.REWRITTEN)
        if len(ends) == len(self._path):
            return KeptPrefix(ends)
        start = self._match_text_at(text, body_end, remembered.text[body_end:])
        if start is None:
            return KeptPrefix(ends, RewriteReason.REWRITTEN)
        entry = self._path[len(ends)]
        assert entry.sampled_ids is not None
        span = self._finder.find_span(text, len(ends), entry.message, entry.sampled_ids, start)
        return KeptPrefix((*ends, span.end)) if isinstance(span, TextSpan) else KeptPrefix(ends, span)

    def _compare_with_path_ids(self, text: str, marked: set[int]) -> KeptPrefix:
        """Returns the same if no prompt is remembered: recorded ids are decoded and compared one by one."""
        ends: list[int] = []
        cursor = 0
        for index, entry in enumerate(self._path):
            sampled = entry.sampled_ids if index in marked else None
            prefix_length = len(entry.ids) - (len(sampled) if sampled is not None else 0)
            end = self._match_ids_at(text, cursor, entry.ids[:prefix_length], self._last_id(index))
            if end is None:
                return KeptPrefix(tuple(ends), RewriteReason.REWRITTEN)
            if sampled is not None:
                span = self._finder.find_span(text, index, entry.message, sampled, end)
                if not isinstance(span, TextSpan):
                    return KeptPrefix(tuple(ends), span)
                end = span.end
            cursor = end
            ends.append(cursor)
        return KeptPrefix(tuple(ends))

    def _without_joined_end(self, text: str, kept: KeptPrefix) -> KeptPrefix:
        """Drops the last kept message if a token now crosses its end: it was followed by a control token, and
        is followed by text since a reply was deleted."""
        *before, end = kept.message_ends
        index, start = len(before), before[-1] if before else 0
        ids = self._path[index].ids
        stop, *_ = next(self._encoder.find_added_tokens(text, end), (len(text),))
        if stop == end or not len(ids) or self._encoder.is_control[ids[-1]]:
            return kept
        parts = [self._finder.markers.strip(text[start:end]), self._finder.markers.strip(text[end:stop])]
        (shown, _), _ = self._encoder.encode_parts(parts, self._last_id(index))
        if np.array_equal(shown, ids):
            return kept
        return KeptPrefix(tuple(before), kept.reason or RewriteReason.REWRITTEN)

    def _match_ids_at(self, text: str, offset: int, ids: Ids, after: int | None) -> int | None:
        """Returns the end of the text at an offset that recorded ids show, or None if the text differs."""
        if not self._encoder.encodes_by_segment:
            return self._encoder.find_text_end(text, offset, ids, after)
        recorded = self._encoder.decode(ids)
        return None if recorded is None else self._match_text_at(text, offset, recorded)

    def _match_text_at(self, text: str, offset: int, recorded: str) -> int | None:
        """Returns the end of recorded text at an offset, or None if the text differs. An empty reasoning
        block at its end may be missing, or be shown in part."""
        if text.startswith(recorded, offset):
            return offset + len(recorded)
        traits = self._profile.traits
        block = self._kept_reasoning_block
        if block and recorded.endswith(block):
            before = recorded.removesuffix(block)
            for shown in (before + traits.history_reasoning_block, before):
                if text.startswith(shown, offset):
                    return offset + len(shown)
        return None

    @property
    def _kept_reasoning_block(self) -> str:
        """The empty reasoning block that is kept although history does not show it, if there is one."""
        return self._profile.traits.empty_reasoning_block if self._profile.keep_empty_think else ""

    # -- both histories ---------------------------------------------------------------------------------

    def _is_marked(self, index: int) -> bool:
        entry = self._messages[index]
        if entry.message.parts and entry.message.media:
            return False
        return entry.sampled_ids is not None if isinstance(entry, NewMessage) else entry.ends_sampled

    def _last_id(self, index: int) -> int | None:
        """Returns the last id of the path before an index, or None at the start of the prompt."""
        return next((int(entry.ids[-1]) for entry in reversed(self._path[:index]) if len(entry.ids)), None)

    def _render(
        self,
        messages: Sequence[PromptMessage],
        marked: set[int],
        escaped: set[int],
        *,
        include_tools: bool = True,
    ) -> str:
        profile = self._profile
        markers = {index: self._finder.markers.field_marker(index) for index in marked}
        escapes = self._escapes.of_messages(messages, marked, escaped)
        raw = profile.traits.to_template_messages([entry.message for entry in messages], markers, escapes)
        tools = self._tools if include_tools else None
        media = [part for entry in messages if entry.message.parts for part in entry.message.media]
        render = partial(
            profile.template.render,
            tools=tools,
            chat_template_kwargs=profile.chat_template_kwargs,
            now=self._now,
        )
        if media and profile.image_expander is not None:
            text = profile.image_expander.render(render, raw, media)
        else:
            text = render(raw)
        return text if text.isascii() else self._encoder.normalize(text)

    def _assemble(
        self, text: str, layout: MessageLayout, cursor: int, reason: RewriteReason, shift: int = 0
    ) -> Extension:
        """Returns the ids of every message of a layout, with sampled ids reused, and the generation prompt.

        A token may cross the end of a message; the end in the layout then moves to the end of the token, so
        that no character is encoded twice.
        """
        tokens: list[MessageTokens] = []
        encoded_tokens = 0
        after = self._last_id(layout.first - shift)
        last = len(layout.message_ends)
        offsets = [cursor]
        for number, end in enumerate([*layout.message_ends, len(text)]):
            span = layout.spans.get(layout.first + number)
            if span is None and number < last:
                offsets.append(end)
                continue
            # Encode everything up to the span, or to the end of the text, and split it into its messages.
            offsets.append(end if span is None else span.start)
            parts = [self._finder.markers.strip(text[start:stop]) for start, stop in pairwise(offsets)]
            message_ids, moves = self._encoder.encode_parts(parts, after)
            for earlier, move in enumerate(moves, number - len(moves)):
                layout.message_ends[earlier] += move
            *context, prefix = map(as_ids, message_ids)
            encoded_tokens += sum(map(len, message_ids))
            tokens += [MessageTokens(p, normalize_runs([(len(p), Origin.CONTEXT)])) for p in context]
            if span is not None:
                sampled = self._messages[layout.first + number - shift].sampled_ids
                assert sampled is not None
                spans = normalize_runs(((len(prefix), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT)))
                tokens.append(MessageTokens(as_ids(np.concatenate((prefix, sampled))), spans))
                offsets = [span.end]
                after = next((int(part[-1]) for part in (sampled, prefix) if len(part)), after)
        return Extension(layout.first - shift, tuple(tokens), prefix, encoded_tokens, reason)
