"""Builds prompts for `history="verbatim"`: the whole path as it was sampled, then the new messages.

The new messages are rendered after the last reply, in a form of it that the template shows. Only what follows
the reply is used, so the path is kept whatever the template shows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from branchline.chat.base import Extension, NewMessage, PromptMessage, RewriteReason
from branchline.chat.generic.prompt_builder import PromptBuilder
from branchline.chat.generic.span_finder import TextSpan
from branchline.core.errors import TemplateError
from branchline.core.message import Message


class VerbatimBuilder(PromptBuilder):
    """Builds the next prompt of a path without changing it."""

    def build_verbatim(self) -> Extension:
        """Returns the path as it was sampled and the new messages, rendered after as little as possible."""
        last_reply = next((i for i in reversed(range(len(self._path))) if self._is_marked(i)), None)
        if last_reply is None:
            # The path contains nothing sampled.
            return self.build_from_template()
        tail = [NewMessage(Message("user", ".")), *self._messages[last_reply:]]
        conversations = (tail, self._messages) if self._profile.has_local_tail else (self._messages,)
        accepts_calls = False
        for reply in _simplify_reply(self._messages[last_reply].message):
            if self._messages[last_reply].message.tool_calls and not reply.tool_calls and not accepts_calls:
                # A template that refuses calls refuses the conversation.
                break
            for messages in conversations:
                try:
                    extension = self._build_after_last_reply(messages, last_reply, reply)
                except TemplateError:
                    continue
                accepts_calls = True
                if extension is not None:
                    return extension
        return self.build_from_template()

    def _build_after_last_reply(
        self, messages: Sequence[PromptMessage], last_reply: int, reply: Message
    ) -> Extension | None:
        """Returns what follows the path, rendered in a conversation that ends like ours, with `reply` in
        place of the last reply; None if the end of the path is not found in its text. Raises TemplateError if
        the template refuses the conversation."""
        shift = len(messages) - len(self._messages)
        reply_index = last_reply + shift
        sampled = messages[reply_index].sampled_ids
        assert sampled is not None
        messages = [*messages[:reply_index], NewMessage(reply, sampled), *messages[reply_index + 1 :]]
        if self._finder.markers.nonce_occurs_in(entry.message for entry in messages):
            self._finder = self._finder.with_new_markers()
        first = len(self._path) + shift
        marked = {reply_index} | {i for i in range(first, len(messages)) if self._is_marked(i - shift)}
        escaped = {i for i, entry in enumerate(messages) if self._escapes.occurs_in(entry.message)}
        while True:
            text = self._render(messages, marked, escaped, include_tools=shift == 0)
            closing = self._find_closing(text, messages, reply_index, escaped, include_tools=shift == 0)
            if closing is None:
                return None
            cursor = self._finder.find_reply_end(
                text,
                reply_index,
                reply,
                sampled,
                closing,
                stop_opens_next_message=self._profile.endings.stop_opens_next_message,
            )
            for index in range(last_reply + 1, len(self._path)):
                end = self._match_ids_at(text, cursor, self._path[index].ids, self._last_id(index))
                if end is None:
                    return None
                cursor = end
            escapes = self._escapes.of_messages(messages, marked, escaped)
            layout = self._finder.locate_messages(text, messages, marked, first, cursor, escapes)
            if not layout.mismatches:
                return self._assemble(text, layout, cursor, RewriteReason.NONE, shift)
            marked -= layout.mismatches.keys()

    def _find_closing(
        self,
        text: str,
        messages: Sequence[PromptMessage],
        reply_index: int,
        escaped: set[int],
        *,
        include_tools: bool,
    ) -> TextSpan | None:
        """Returns the span between the fields of a reply and the content of the messages after it; None if
        the text does not show the reply in full, or shows a field of it after that content.

        Content may occur in the template's own text by chance, so the conversation is also rendered with a
        nonce in its place, once for each kind of reply and next messages that one stop token separates.
        """
        reply, markers = messages[reply_index].message, self._finder.markers
        start = markers.find_last_marker_end(text, reply_index, reply, 0)
        if start < 0 or reply_index + 1 == len(messages):
            return TextSpan(start, len(text)) if start >= 0 else None
        fields = (bool(reply.content), bool(reply.reasoning_content), min(len(reply.tool_calls), 2))
        kind = (
            include_tools,
            fields,
            *(entry.message.role for entry in messages[reply_index + 1 : reply_index + 3]),
        )
        stop = (
            self._finder.find_next_stop_token(text, start) if kind in self._profile.closed_by_stop else None
        )
        if stop is not None:
            return TextSpan(start, stop[1])
        following = [
            NewMessage(replace(entry.message, content=markers.nonce, parts=()))
            for entry in messages[reply_index + 1 :]
        ]
        others = [*messages[: reply_index + 1], *following]
        other = self._render(others, {reply_index}, escaped, include_tools=include_tools)
        other_start = markers.find_last_marker_end(other, reply_index, reply, 0)
        # The first nonce after the reply's first marker that is not part of a marker of the reply.
        content_start = markers.find_bare_nonce(
            other, max(0, markers.find_first_marker(other, reply_index, 0))
        )
        if content_start < 0:
            return TextSpan(start, len(text))
        if not 0 <= other_start <= content_start:
            return None
        closing = other[other_start:content_start]
        if not text.startswith(closing, start):
            return None
        stop = self._finder.find_next_stop_token(closing, 0)
        if stop is not None and self._finder.find_next_stop_token(closing, stop[1]) is None:
            self._profile.closed_by_stop.add(kind)
        return TextSpan(start, start + len(closing))


def _simplify_reply(reply: Message) -> Iterator[Message]:
    """Yields replies of which a template may show the end where it does not show that of `reply`.

    Templates leave out reasoning once a user message follows, text next to calls, or calls; they take text
    apart, or refuse a second call.
    """
    yield reply
    calls, text = reply.tool_calls, reply.content
    forms = [(text or "." * (not calls), calls)]
    if calls:
        forms += [("", calls), (".", calls), ("", calls[:1]), (".", calls[:1])]
    replies = [Message("assistant", content, tool_calls=some) for content, some in [*forms, (".", ())]]
    yield from (form for index, form in enumerate(replies) if form not in [reply, *replies[:index]])
