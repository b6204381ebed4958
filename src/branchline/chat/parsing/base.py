"""What a model sampled, as a message, whole or while it is still being sampled.

However the ids are cut into pieces, the deltas add up to the same message: what could still become
framing is held back, and nothing said is ever taken back. A tool call is said when it is closed and its name
can be read, with its arguments as they were written: nothing is repaired, so that the model can be told. One
that is cut or nameless stays text, every character of it. No sequence of ids raises.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from branchline.core.errors import CodecError
from branchline.core.message import Message, ToolCall

REPLACEMENT = "\ufffd".encode()


class ParseProblem(StrEnum):
    """What was wrong with an output; the message is the same in every chunking, and so are its problems."""

    MALFORMED_CALL = "malformed_call"
    """Framed as a tool call, but nobody's; it stands in the text."""
    MALFORMED_ARGUMENTS = "malformed_arguments"
    """A tool call whose arguments are no JSON object; they stand in it as they were written."""
    CUT_CALL = "cut_call"
    """A tool call that the output ended in; it stands in the text."""
    BROKEN_HEADER = "broken_header"
    """A message header that no reader knows (harmony); it stands in the text."""
    UNCLOSED_REASONING = "unclosed_reasoning"
    INVALID_UTF8 = "invalid_utf8"
    """Bytes that are no text; each stands as U+FFFD, as in a decode of the whole."""
    UNKNOWN_ID = "unknown_id"
    """An id outside the vocabulary (engines pad theirs); it stands as U+FFFD."""


class MessageDelta(Struct, frozen=True):
    """The next bit of a message: reasoning, text, or a whole tool call. One is made for every token."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCall | None = None
    index: int = 0
    """Which of the message's calls this is."""


class TextParser(Protocol):
    """One output of one format, read as text. Made for one output, finished once."""

    @property
    def problems(self) -> list[ParseProblem]: ...

    def feed(self, text: str) -> list[MessageDelta]:
        """What is certain now."""
        ...

    def finish(self, cut: bool) -> list[MessageDelta]:
        """All that was held back. `cut`: the output ended before the model ended it."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole output."""

    message: Message
    problems: tuple[ParseProblem, ...]


class OutputParser:
    """One output, read as ids.

    >>> from branchline.chat.parsing.registry import create_text_parser
    >>> text_parser = create_text_parser("plain", reasoning_format="think")
    >>> parser = OutputParser(text_parser, lambda token: bytes([token]), {0})
    >>> parser.feed(b"<think>\\nhm")
    [MessageDelta(content='', reasoning_content='hm', tool_call=None, index=0)]
    >>> parser.feed(b"\\n</think>\\n\\nyes\\0")
    [MessageDelta(content='yes', reasoning_content='', tool_call=None, index=0)]
    >>> parser.finish("stop")
    []
    >>> parser.message.content
    'yes'
    """

    def __init__(
        self, parser: TextParser, token_bytes: Callable[[int], bytes], stop_ids: Collection[int] = ()
    ) -> None:
        self._parser = parser
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._pending_stop: int | None = None
        """A stop id that is the last one so far; it becomes text only when more follows."""
        self._in_character = False
        """Whether a character has begun that has not ended."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._problems: list[ParseProblem] = []
        self._content: list[str] = []
        self._reasoning_content: list[str] = []
        self._tool_calls: list[ToolCall] = []

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]:
        """What is certain after these ids."""
        ids = ids if isinstance(ids, list) else list(ids)
        if len(ids) == 1 and self._pending_stop is None and not self._in_character:
            # Mostly, while an answer is streamed: one token, of whole and plain letters.
            spelled = b"" if ids[0] in self._stop_ids else self._decode_token(ids[0])
            if spelled and spelled.isascii():
                deltas = self._parser.feed(spelled.decode("ascii"))
                return self._record(deltas) if deltas else deltas
        if self._pending_stop is None and self._stop_ids.isdisjoint(ids[:-1]):
            # Mostly: at most the last one is a stop id.
            if ids and ids[-1] in self._stop_ids:
                self._pending_stop, ids = int(ids[-1]), ids[:-1]
            text = self._decode_utf8(self._decode_tokens(ids), final=False)
        else:
            text = self._decode_utf8(self._decode_tokens_with_stops(ids), final=False)
        return self._record(self._parser.feed(text)) if text else []

    def _decode_tokens(self, ids: list[int]) -> bytes:
        try:
            return b"".join(map(self._token_bytes, ids))
        except (CodecError, LookupError, ValueError):
            return b"".join([self._decode_token(token) for token in ids])

    def _decode_tokens_with_stops(self, ids: list[int]) -> bytes:
        spelled = []
        for token in ids:
            if self._pending_stop is not None:
                spelled.append(self._decode_token(self._pending_stop))
                self._pending_stop = None
            if token in self._stop_ids:
                self._pending_stop = int(token)
            else:
                spelled.append(self._decode_token(int(token)))
        return b"".join(spelled)

    def finish(self, finish_reason: str | None) -> list[MessageDelta]:
        """What was held back. An output is cut unless it ends in a stop id or its reason is a stop."""
        text = self._decode_utf8(b"", final=True)
        deltas = self._parser.feed(text) if text else []
        cut = self._pending_stop is None and finish_reason not in ("stop", "tool_calls")
        return self._record([*deltas, *self._parser.finish(cut)])

    def parse(self, ids: Iterable[int], finish_reason: str | None) -> ParsedOutput:
        """A whole output at once: feed and finish."""
        self.feed(ids)
        self.finish(finish_reason)
        return ParsedOutput(self.message, self.problems)

    @property
    def message(self) -> Message:
        """All that has been said so far."""
        text, reasoning = "".join(self._content), "".join(self._reasoning_content)
        return Message("assistant", text, reasoning_content=reasoning, tool_calls=tuple(self._tool_calls))

    @property
    def problems(self) -> tuple[ParseProblem, ...]:
        """Each problem once, in no more order than: the bytes' before the format's."""
        return tuple(dict.fromkeys([*sorted(self._problems), *self._parser.problems]))

    def _decode_token(self, token: int) -> bytes:
        try:
            return self._token_bytes(token)
        except (CodecError, LookupError, ValueError):
            self._problems.append(ParseProblem.UNKNOWN_ID)
            return REPLACEMENT

    def _decode_utf8(self, data: bytes, *, final: bool) -> str:
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError:
            # A failed decode leaves what was pending in place, so the same bytes can be read again.
            self._problems.append(ParseProblem.INVALID_UTF8)
            self._decoder.errors = "replace"
            text = self._decoder.decode(data, final)
        self._in_character = bool(self._decoder.getstate()[0])
        return text

    def _record(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        for delta in deltas:
            if delta.tool_call is not None:
                self._tool_calls.append(delta.tool_call)
            elif delta.reasoning_content:
                self._reasoning_content.append(delta.reasoning_content)
            else:
                self._content.append(delta.content)
        return deltas
