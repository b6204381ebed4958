"""Splices sampled ids into a conversation that a renderer wrote as ids.

A renderer reports for every id which message it belongs to and whether the model would sample it. If these
ids of a message mean what was sampled for it, in whatever style, the sampled ids replace them. If the
renderer dropped or rewrote something, its own ids stay. The rest of the render is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import (
    Extension,
    MessageTokens,
    NewMessage,
    PathMessage,
    PromptMessage,
    RewriteReason,
)
from branchline.chat.template_traits import has_malformed_arguments
from branchline.chat.tokenizer_codec import ReplyReader
from branchline.core.token_arrays import NO_IDS, Ids, Origin, as_ids, normalize_runs


@dataclass(frozen=True)
class RenderedIds:
    """A conversation as ids, with the message of each id and whether the model would sample it."""

    ids: Ids
    message_indices: NDArray[np.int64]
    """The index of the message that each id belongs to; -1 for none."""
    sampled_mask: NDArray[np.bool_]
    message_count: int

    @cached_property
    def message_ends(self) -> list[int]:
        """Where each message ends; ids of no message belong to the message after them."""
        ends = np.zeros(self.message_count, np.int64)
        owned = np.flatnonzero(self.message_indices >= 0)
        np.maximum.at(ends, self.message_indices[owned], owned + 1)
        found: list[int] = np.maximum.accumulate(ends).tolist()
        return found

    def message_ids(self, index: int) -> Ids:
        """Returns the ids of one message, without those of no message before it."""
        return as_ids(self.ids[self.message_indices == index])

    def sampled_span(self, index: int) -> tuple[int, int] | None:
        """Returns the start and end of the ids that the model would sample for a message."""
        return self._sampled_spans.get(index)

    @cached_property
    def _sampled_spans(self) -> dict[int, tuple[int, int]]:
        spans: dict[int, tuple[int, int]] = {}
        positions = np.flatnonzero(self.sampled_mask & (self.message_indices >= 0))
        owners = self.message_indices[positions].tolist()
        for position, owner in zip(positions.tolist(), owners, strict=True):
            start, _ = spans.get(owner, (position, 0))
            spans[owner] = start, position + 1
        return spans

    @property
    def generation_prompt_ids(self) -> Ids:
        return self.ids[self.message_ends[-1] :]


@dataclass(frozen=True, slots=True)
class SpliceMatch:
    """A sampled message that the render shows in full."""

    prefix: Ids
    """The ids before it."""
    end: int
    """Where the render continues after it."""
    closing_ids: Ids
    """The ids that close it if it was cut inside something, such as its reasoning."""


@dataclass(frozen=True, slots=True)
class _Position:
    """The start of a message in a render."""

    index: int
    cursor: int
    prefix: Ids = field(default_factory=lambda: NO_IDS)
    """The closing ids of the message before."""


class Splicer:
    """Splices sampled ids into one render."""

    def __init__(self, render: RenderedIds, messages: Sequence[PromptMessage], reader: ReplyReader) -> None:
        self._render = render
        self._messages = messages
        self._reader = reader
        self._encoder = reader.segment_encoder
        self.mismatches: dict[int, RewriteReason] = {}
        """The sampled messages that are not shown in full, with the reason."""

    def build_from_template(self, path_length: int) -> Extension:
        """Returns the prompt as rendered, with sampled ids; keeps as much of the path as it contains."""
        tokens, generation_prompt = self._splice(_Position(0, 0))
        kept = 0
        while kept < path_length and np.array_equal(tokens[kept].ids, self._path_message(kept).ids):
            kept += 1
        reason = RewriteReason.NONE
        if kept < path_length:
            reason = self.mismatches.get(kept, RewriteReason.REWRITTEN)
            if kept in self.mismatches and self._messages[kept].message.reasoning_content:
                reason = RewriteReason.THINK_STRIP
        return self._extension(kept, tokens[kept:], generation_prompt, reason)

    def build_verbatim(self, path_length: int, render_path: Callable[[], RenderedIds]) -> Extension | None:
        """Returns the whole path and the new messages, or None if the render does not show how they join.

        `render_path` renders the path without the new messages: there its last message is shown in full.
        """
        last = path_length - 1
        entry = self._path_message(last)
        if entry.ends_sampled:
            position = self._position_after_sampled(last, render_path)
        else:
            own_ids = self._render.message_ids(last)
            joins = len(own_ids) > 0 and np.array_equal(entry.ids[len(entry.ids) - len(own_ids) :], own_ids)
            position = _Position(path_length, self._render.message_ends[last]) if joins else None
        if position is None:
            return None
        tokens, generation_prompt = self._splice(position)
        return self._extension(path_length, tokens, generation_prompt, RewriteReason.NONE)

    def _position_after_sampled(self, index: int, render_path: Callable[[], RenderedIds]) -> _Position | None:
        span = self._render.sampled_span(index)
        sampled = self._messages[index].sampled_ids
        if span is None or sampled is None:
            return None
        stop_start, stop_end = self._stop_span(span[1], index)
        if self._reader.ends_with_stop(sampled):
            return _Position(index + 1, stop_end)
        for alone in (False, True):
            splicer = Splicer(render_path(), self._messages, self._reader) if alone else self
            start = splicer._render.message_ends[index - 1] if index else 0
            match = splicer._match(_Position(index, start), sampled)
            if isinstance(match, SpliceMatch):
                return _Position(index + 1, stop_start, match.closing_ids)
        return _Position(index + 1, stop_start)

    def _splice(self, position: _Position) -> tuple[list[MessageTokens], Ids]:
        """Returns the ids of every message from a position on, and the generation prompt."""
        tokens: list[MessageTokens] = []
        cursor, prefix = position.cursor, position.prefix
        for index in range(position.index, len(self._messages)):
            sampled = self._messages[index].sampled_ids
            if sampled is not None:
                match = self._match(_Position(index, cursor, prefix), sampled)
                if isinstance(match, SpliceMatch):
                    spans = ((len(match.prefix), Origin.TEMPLATE), (len(sampled), Origin.CONTEXT))
                    tokens.append(MessageTokens(_concatenate(match.prefix, sampled), normalize_runs(spans)))
                    cursor, prefix = match.end, match.closing_ids
                    continue
                self.mismatches[index] = match
            end = max(cursor, self._render.message_ends[index])
            ids = _concatenate(prefix, self._render.ids[cursor:end])
            tokens.append(MessageTokens(ids, normalize_runs(((len(ids), Origin.CONTEXT),))))
            cursor, prefix = end, NO_IDS
        return tokens, _concatenate(prefix, self._render.ids[cursor:])

    def _extension(
        self, kept: int, tokens: list[MessageTokens], generation_prompt: Ids, reason: RewriteReason
    ) -> Extension:
        encoded = len(generation_prompt)
        for index, message_tokens in enumerate(tokens, start=kept):
            sampled = self._messages[index].sampled_ids
            reused = len(sampled) if sampled is not None and index not in self.mismatches else 0
            encoded += len(message_tokens.ids) - reused
        return Extension(kept, tuple(tokens), generation_prompt, encoded, reason)

    def _match(self, position: _Position, sampled: Ids) -> SpliceMatch | RewriteReason:
        """Returns how a sampled message fits into the render, or why it does not."""
        reader, encoder, render = self._reader, self._encoder, self._render
        span = render.sampled_span(position.index)
        if span is None:
            return RewriteReason.DROPPED
        stop_start, stop_end = self._stop_span(span[1], position.index)
        stopped = reader.ends_with_stop(sampled)
        if stopped and stop_end == stop_start:
            return RewriteReason.NO_TERMINATOR
        if stopped and int(render.ids[stop_start]) != int(sampled[-1]):
            return RewriteReason.FOREIGN_STOP
        body = sampled[:-1] if stopped else sampled
        end = stop_end if stopped else stop_start
        rendered = _concatenate(position.prefix, render.ids[position.cursor : stop_start])
        prefixes = self._prefix_candidates(position, span[0])
        for prefix in prefixes:
            if np.array_equal(rendered, _concatenate(prefix, body)):
                return SpliceMatch(prefix, end, NO_IDS)
        sampled_text, sampled_tokens = encoder.decode_bytes(body), encoder.control_tokens_in(body)
        text, tokens = encoder.decode_bytes(rendered), encoder.control_tokens_in(rendered)
        malformed = has_malformed_arguments(self._messages[position.index].message)
        for prefix in prefixes:
            prefix_text, prefix_tokens = encoder.decode_bytes(prefix), encoder.control_tokens_in(prefix)
            if not text.startswith(prefix_text) or tokens[: len(prefix_tokens)] != prefix_tokens:
                continue
            shown_text, shown_tokens = text[len(prefix_text) :], tokens[len(prefix_tokens) :]
            # What replaces malformed arguments has control tokens of its own; the reply starts the same.
            same_tokens = (
                shown_tokens[:1] == sampled_tokens[:1] if malformed else shown_tokens == sampled_tokens
            )
            if same_tokens and (
                shown_text == sampled_text
                or reader.have_same_meaning(
                    shown_text, sampled_text, cut=not stopped, ignore_arguments=malformed
                )
            ):
                return SpliceMatch(prefix, end, NO_IDS)
            if not stopped and shown_tokens[: len(sampled_tokens)] == sampled_tokens:
                closing_text = _text_after(shown_text, sampled_text)
                if closing_text is not None:
                    return SpliceMatch(prefix, stop_start, encoder.encode(closing_text))
        return RewriteReason.REWRITTEN

    def _prefix_candidates(self, position: _Position, start: int) -> list[Ids]:
        """Returns what may precede a sample: the recorded prefix, the render's, or the render's with the rest
        of a generation prompt that begins the answer."""
        entry = self._messages[position.index]
        prefixes: list[Ids] = []
        if not isinstance(entry, NewMessage) and entry.ends_sampled and entry.sampled_ids is not None:
            prefixes.append(entry.ids[: len(entry.ids) - len(entry.sampled_ids)])
        rendered = _concatenate(position.prefix, self._render.ids[position.cursor : start])
        prefixes.append(rendered)
        generation_prompt = self._render.generation_prompt_ids
        for cut in range(len(generation_prompt) - 1, 0, -1):
            if np.array_equal(rendered[len(rendered) - cut :], generation_prompt[:cut]):
                # Some generation prompts begin the answer (`<think>`), which history attributes to the model.
                prefixes.append(_concatenate(rendered, generation_prompt[cut:]))
                break
        return prefixes

    def _stop_span(self, end: int, index: int) -> tuple[int, int]:
        """Returns the start and end of a message's stop token; both are equal if there is none."""
        ids, stop_ids = self._render.ids, self._reader.stop_ids
        if int(ids[end - 1]) in stop_ids:
            return end - 1, end
        if end < len(ids) and int(ids[end]) in stop_ids and self._render.message_indices[end] == index:
            return end, end + 1
        return end, end

    def _path_message(self, index: int) -> PathMessage:
        entry = self._messages[index]
        assert not isinstance(entry, NewMessage)
        return entry


def _text_after(shown: bytes, sampled: bytes) -> str | None:
    """Returns the text that a render writes after a cut sample, or None if it does not show the sample."""
    whole, start = shown.decode("utf-8", "replace"), sampled.decode("utf-8", "replace").rstrip()
    return whole[len(start) :] if whole.startswith(start) else None


def _concatenate(*parts: Ids) -> Ids:
    return as_ids(np.concatenate(parts))
