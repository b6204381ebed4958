"""Locates messages in a rendered conversation by markers around the fields of sampled messages.

A template is given every sampled message with a marker (a nonce) before and after each field. If all markers
come out again, a stop token follows, the control tokens between are those of the sample and the text means
what was sampled, then the template shows the message in full, in whatever style: the sampled ids replace its
text. Otherwise the template dropped or rewrote something, and the prompt forks.

A layout gives each message an end, and each sampled message that is shown in full a span. Where a context
message ends only decides which node holds which ids; the prompt is the same.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from branchline.chat.base import PromptMessage, RewriteReason, Tools
from branchline.chat.template_traits import has_malformed_arguments
from branchline.chat.token_escapes import Escape
from branchline.chat.tokenizer_codec import ReplyReader
from branchline.core.message import Message
from branchline.core.token_arrays import Ids

CONTENT, REASONING, FIRST_CALL = 0, 1, 2
"""The numbers of the fields of a message in its markers."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """The text from `start` to `end`, which sampled ids replace."""

    start: int
    end: int


@dataclass
class MessageLayout:
    """The messages of a text from index `first` on."""

    first: int
    message_ends: list[int] = field(default_factory=list)
    spans: dict[int, TextSpan] = field(default_factory=dict)
    mismatches: dict[int, RewriteReason] = field(default_factory=dict)
    """The sampled messages that are not shown in full, with the reason."""


class FieldMarkers:
    """Marks the fields of messages and finds them in a text."""

    def __init__(self) -> None:
        self.nonce = "Zq" + secrets.token_hex(4)
        # A marker ends in a character that combines with no other, so that normalisation keeps it.
        self._pattern = re.compile(self.nonce + r"\d+x\d+[ab]_")
        self._bare_nonce = re.compile(self.nonce + r"(?!\d+x\d+[ab]_)")

    def nonce_occurs_in(self, messages: Iterable[Message]) -> bool:
        """Whether a message contains the nonce; then other markers are needed."""
        return any(
            self.nonce in message.content
            or self.nonce in message.reasoning_content
            or any(self.nonce in call.arguments for call in message.tool_calls)
            for message in messages
        )

    def field_marker(self, index: int) -> Callable[[int, str], str]:
        """Returns a function that marks a field of the message at an index, given its number and its text."""
        start = f"{self.nonce}{index}x{{0}}"
        return f"{start}a_{{1}}{start}b_".format

    def strip(self, text: str) -> str:
        """Returns the text without markers."""
        return self._pattern.sub("", text) if self.nonce in text else text

    def find_first_marker(self, text: str, index: int, start: int) -> int:
        """Returns the offset of the first marker of a message, or -1."""
        return text.find(f"{self.nonce}{index}x", start)

    def find_bare_nonce(self, text: str, start: int) -> int:
        """Returns the offset of the first nonce that is not part of a marker, or -1."""
        bare = self._bare_nonce.search(text, start)
        return bare.start() if bare is not None else -1

    def find_last_marker_end(self, text: str, index: int, message: Message, start: int) -> int:
        """Returns the offset after the last marker of a message, or -1 if a marker is missing."""
        fields = [FIRST_CALL + number for number in range(len(message.tool_calls))]
        if message.reasoning_content:
            fields.append(REASONING)
        if message.content or not fields:
            fields.append(CONTENT)
        last = -1
        for number in fields:
            # Each marker is searched separately: a template that sorts keys may swap the two.
            for side in "ab":
                marker = f"{self.nonce}{index}x{number}{side}_"
                offset = text.find(marker, start)
                if offset < 0:
                    return -1
                last = max(last, offset + len(marker))
        return last


class SpanFinder:
    """Decides where a message is in a rendered text, and whether a sampled one is shown in full."""

    def __init__(
        self,
        reader: ReplyReader,
        markers: FieldMarkers,
        reply_prefixes: Sequence[str],
        terminator_ids: frozenset[int],
    ) -> None:
        self._reader = reader
        self._encoder = reader.segment_encoder
        self.markers = markers
        self._reply_prefixes = reply_prefixes
        """The generation prompt, and the text that history shows in its place."""
        self._end_ids = reader.stop_ids | terminator_ids
        """The tokens that end a reply in a prompt. A template may write others than the model samples."""

    def with_new_markers(self) -> SpanFinder:
        """Returns a finder with another nonce."""
        finder = copy(self)
        finder.markers = FieldMarkers()
        return finder

    def with_tools(self, tools: Tools) -> SpanFinder:
        """Returns a finder that reads arguments by the schemas of these tools."""
        finder = copy(self)
        finder._reader = replace(self._reader, tools=tools)
        return finder

    # -- one sampled message -------------------------------------------------------------------------

    def find_span(
        self, text: str, index: int, message: Message, sampled: Ids, start: int
    ) -> TextSpan | RewriteReason:
        """Returns the span of a sampled message whose prefix ends at `start`, or why there is none."""
        last = self.markers.find_last_marker_end(text, index, message, start)
        if last < 0:
            return RewriteReason.DROPPED
        end_ids, framing_ids = self._end_ids, self._reader.framing_ids
        shown: list[int] = []
        for added in self._encoder.find_added_tokens(text, start):
            stop_start, stop_end, token = added
            if stop_start >= last and token in end_ids:
                break
            if self._encoder.is_control[token] and token not in framing_ids:
                shown.append(token)
        else:
            return RewriteReason.NO_TERMINATOR
        # A sample may end with what the template writes there, even if it is no stop (gpt-oss: `<|end|>`).
        stopped = len(sampled) > 0 and int(sampled[-1]) == token
        if not stopped and self._reader.ends_with_stop(sampled):
            return RewriteReason.FOREIGN_STOP
        body = sampled[:-1] if stopped else sampled
        expected = [t for t in self._encoder.control_tokens_in(body) if t not in framing_ids]
        malformed = has_malformed_arguments(message)
        if malformed:
            # What replaces malformed arguments has control tokens of its own; the reply starts the same.
            same_tokens = expected[:1] == shown[:1]
        else:
            same_tokens = expected == (shown if stopped else shown[: len(expected)])
        if not same_tokens:
            return RewriteReason.DROPPED if len(shown) < len(expected) else RewriteReason.REWRITTEN
        shown_text = self.markers.strip(text[start:stop_start])
        rendered, reply = shown_text.encode("utf-8", "replace"), self._encoder.decode_bytes(body)
        if rendered != reply:
            rendered = self._encoder.escaper.unescape(shown_text).encode("utf-8", "replace")
            reply = self._encoder.normalize_bytes(reply)
        if (
            (stopped or message.content)
            and rendered != reply
            and not self._reader.have_same_meaning(
                rendered, reply, cut=not stopped, ignore_arguments=malformed
            )
        ):
            return RewriteReason.REWRITTEN
        if stopped:
            return TextSpan(start, stop_end)
        # Cut: the text that closes the message, or reasoning that was left open, was not sampled.
        is_closed = malformed or len(expected) == len(shown)
        if not message.content and not message.tool_calls:
            is_closed = rendered.split() == reply.split()
        return TextSpan(start, stop_start if is_closed else last)

    def find_reply_end(
        self,
        text: str,
        index: int,
        message: Message,
        sampled: Ids,
        closing: TextSpan,
        *,
        stop_opens_next_message: bool,
    ) -> int:
        """Returns where a sampled message ends, even if the text does not show it in full. `closing` is what
        the template writes between the message and the content of the next one."""
        start = max(0, self.markers.find_first_marker(text, index, 0))
        span = self.find_span(text, index, message, sampled, start)
        if isinstance(span, TextSpan) and span.end <= closing.end:
            return span.end
        stops = [
            token
            for token in self._encoder.find_added_tokens(text, closing.start, closing.end)
            if token[2] in self._end_ids
        ]
        is_ended = len(sampled) > 0 and int(sampled[-1]) in self._end_ids
        if not stops:
            body = sampled[:-1] if is_ended else sampled
            return closing.start + self._sampled_length(text[closing.start : closing.end], body)
        if not is_ended:
            return stops[0][0]
        for _, end, token in stops:
            if token == int(sampled[-1]):
                return end
        # If the stop opens the next message, an opener other than the sampled one must still be written.
        return stops[0][0] if stop_opens_next_message else stops[0][1]

    def _sampled_length(self, closing: str, body: Ids) -> int:
        """Returns how many characters of a closing without stop tokens the sample ends with, whitespace
        aside."""
        sampled = self._encoder.normalize_bytes(self._encoder.decode_bytes(body)).decode("utf-8", "replace")
        reply = "".join(sampled.split())
        for end in range(len(closing), 0, -1):
            start = "".join(self._encoder.escaper.unescape(closing[:end]).split())
            if start and reply.endswith(start):
                return len(closing[:end].rstrip())
        return 0

    def find_next_stop_token(self, text: str, start: int) -> tuple[int, int, int] | None:
        """Returns the first token that ends a message at or after an offset, as (start, end, id)."""
        for token in self._encoder.find_added_tokens(text, start):
            if token[2] in self._end_ids:
                return token
        return None

    # -- all messages --------------------------------------------------------------------------------

    def locate_messages(
        self,
        text: str,
        messages: Sequence[PromptMessage],
        marked: Collection[int],
        first: int,
        cursor: int,
        escapes: Mapping[int, Escape],
    ) -> MessageLayout:
        """Lays out messages[first:] in a text whose earlier messages end at `cursor`. `escapes` are the
        escapes of the messages whose texts are escaped."""
        layout = MessageLayout(first)
        for index in range(first, len(messages)):
            entry = messages[index]
            if index in marked:
                sampled = entry.sampled_ids
                assert sampled is not None
                start = self._reply_start(text, index, cursor, sampled)
                span = self.find_span(text, index, entry.message, sampled, start)
                if isinstance(span, TextSpan):
                    layout.spans[index] = span
                    cursor = span.end
                else:
                    layout.mismatches[index] = span
            elif index == len(messages) - 1 and text.endswith(self._reply_prefixes[0]):
                cursor = len(text) - len(self._reply_prefixes[0])
            elif index == len(messages) - 1:
                # The text has its generation prompt elsewhere, or none.
                prompt = self._reply_prefixes[0]
                content_end = _content_end(text, _texts(entry.message, escapes.get(index)), cursor, len(text))
                prompt_start = text.rfind(prompt, content_end) if prompt else -1
                cursor = prompt_start if prompt_start >= 0 else len(text)
            else:
                cursor = self._context_message_end(text, messages, index, cursor, marked, escapes)
            layout.message_ends.append(cursor)
        return layout

    def _reply_start(self, text: str, index: int, cursor: int, sampled: Ids) -> int:
        """Returns the end of the reply prefix before the first marker of a sampled message.

        If the template writes no prefix, a sample that starts with a control token (`[TOOL_CALLS]`) starts
        there, and any other after the last control token before the marker.
        """
        marker = max(cursor, self.markers.find_first_marker(text, index, cursor))
        for prefix in self._reply_prefixes:
            start = text.rfind(prefix, cursor, marker) if prefix else -1
            if start >= 0:
                return start + len(prefix)
        first_token = self._encoder.control_tokens_in(sampled[:1])
        reply_start = cursor
        for start, end, token in self._encoder.find_added_tokens(text, cursor, marker):
            if first_token and token == first_token[0]:
                return start
            if self._encoder.is_control[token]:
                reply_start = end
        return reply_start

    def _context_message_end(
        self,
        text: str,
        messages: Sequence[PromptMessage],
        index: int,
        cursor: int,
        marked: Collection[int],
        escapes: Mapping[int, Escape],
    ) -> int:
        """Returns the offset after a context message's stop token, or after its content if it has none.

        The next marked message is the limit, because some templates show an early message late.
        """
        next_marked = next((later for later in range(index + 1, len(messages)) if later in marked), None)
        limit = -1 if next_marked is None else self.markers.find_first_marker(text, next_marked, cursor)
        limit = limit if limit >= 0 else len(text)
        end = _content_end(text, _texts(messages[index].message, escapes.get(index)), cursor, limit)
        following = next(iter(_texts(messages[index + 1].message, escapes.get(index + 1))), None)
        next_start = text.find(following, end, limit) if following else -1
        limit = next_start if next_start >= 0 else limit
        stop = self.find_next_stop_token(text, end)
        if stop is None or stop[0] >= limit:
            return end
        end = stop[1]
        while end < limit and text[end].isspace():
            end += 1
        return end


def _texts(message: Message, escape: Escape | None) -> list[str]:
    """Returns the texts that a template shows in one piece, as they occur in a rendered text: those between
    images, or the content, and the names of calls."""
    texts = [message.content]
    if message.parts and message.media:
        texts = [part for part in message.parts if isinstance(part, str)]
    texts = [*(text.strip() for text in texts), *(call.name for call in message.tool_calls)]
    return [text if escape is None else escape(text) for text in texts if text]


def _content_end(text: str, needles: Iterable[str], cursor: int, limit: int) -> int:
    """Returns the offset after the texts of a message, as far as they occur."""
    for needle in needles:
        start = text.find(needle, cursor, limit)
        if start >= 0:
            cursor = start + len(needle)
    return cursor
