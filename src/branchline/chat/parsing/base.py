"""Parses generated ids into an assistant message, as a whole or while they arrive.

The deltas add up to the same message however the ids are split into chunks: text that could still become
a marker is held back, and nothing emitted is ever withdrawn. A tool call is emitted when it is closed and
its name is readable. Its arguments stay as they were generated, so that the client sees the model's
mistakes. A call that is cut or has no name stays text, character for character. No ids raise.
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
    """A defect of an output. The problems found do not depend on how the output was split."""

    MALFORMED_CALL = "malformed_call"
    """Delimited like a tool call, but not readable as one; it stays in the text."""
    MALFORMED_ARGUMENTS = "malformed_arguments"
    """A tool call whose arguments are not a JSON object; they are kept as generated."""
    CUT_CALL = "cut_call"
    """The output ended inside a tool call; the call stays in the text."""
    BROKEN_HEADER = "broken_header"
    """An unknown harmony message header; it stays in the text."""
    UNCLOSED_REASONING = "unclosed_reasoning"
    INVALID_UTF8 = "invalid_utf8"
    """Invalid bytes, decoded as U+FFFD exactly as when the whole output is decoded at once."""
    UNKNOWN_ID = "unknown_id"
    """An id outside the vocabulary (engines pad theirs), decoded as U+FFFD."""


class MessageDelta(Struct, frozen=True):
    """The next part of a message: reasoning, text, or one complete tool call."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCall | None = None
    index: int = 0
    """The index of the tool call in the message."""


class TextParser(Protocol):
    """Parses the text of one output in one format. A parser is used once."""

    @property
    def problems(self) -> list[ParseProblem]: ...

    def feed(self, text: str) -> list[MessageDelta]:
        """Returns what is certain after this text."""
        ...

    def finish(self, cut: bool) -> list[MessageDelta]:
        """Returns what was held back. `cut`: the output ended before the model stopped."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The message of a complete output, and its defects."""

    message: Message
    problems: tuple[ParseProblem, ...]


class OutputParser:
    """Parses the ids of one output.

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
        """A stop id at the end of the ids so far; it becomes text only if more ids follow."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._problems: list[ParseProblem] = []
        self._content: list[str] = []
        self._reasoning_content: list[str] = []
        self._tool_calls: list[ToolCall] = []

    def feed(self, ids: Iterable[int]) -> list[MessageDelta]:
        """Returns what is certain after these ids."""
        ids = ids if isinstance(ids, list) else list(ids)
        if self._pending_stop is None and self._stop_ids.isdisjoint(ids[:-1]):
            # The common case: at most the last id is a stop id.
            if ids and ids[-1] in self._stop_ids:
                self._pending_stop, ids = int(ids[-1]), ids[:-1]
            data = self._decode_tokens(ids)
        else:
            data = self._decode_tokens_with_stops(ids)
        text = self._decode_utf8(data, final=False)
        return self._record(self._parser.feed(text)) if text else []

    def finish(self, finish_reason: str | None) -> list[MessageDelta]:
        """Returns what was held back. An output counts as cut unless it ends in a stop id or its finish
        reason is a stop."""
        text = self._decode_utf8(b"", final=True)
        deltas = self._parser.feed(text) if text else []
        cut = self._pending_stop is None and finish_reason not in ("stop", "tool_calls")
        return self._record([*deltas, *self._parser.finish(cut)])

    def parse(self, ids: Iterable[int], finish_reason: str | None) -> ParsedOutput:
        """Parses a complete output: feed and finish."""
        self.feed(ids)
        self.finish(finish_reason)
        return ParsedOutput(self.message, self.problems)

    @property
    def message(self) -> Message:
        """The message emitted so far."""
        text, reasoning = "".join(self._content), "".join(self._reasoning_content)
        return Message("assistant", text, reasoning_content=reasoning, tool_calls=tuple(self._tool_calls))

    @property
    def problems(self) -> tuple[ParseProblem, ...]:
        """Each problem once: those of the bytes first, then those of the format."""
        return tuple(dict.fromkeys([*sorted(self._problems), *self._parser.problems]))

    def _decode_tokens(self, ids: list[int]) -> bytes:
        try:
            return b"".join(map(self._token_bytes, ids))
        except (CodecError, LookupError, ValueError):
            return b"".join([self._decode_token(token) for token in ids])

    def _decode_tokens_with_stops(self, ids: list[int]) -> bytes:
        decoded = []
        for token in ids:
            if self._pending_stop is not None:
                decoded.append(self._decode_token(self._pending_stop))
                self._pending_stop = None
            if token in self._stop_ids:
                self._pending_stop = int(token)
            else:
                decoded.append(self._decode_token(int(token)))
        return b"".join(decoded)

    def _decode_token(self, token: int) -> bytes:
        try:
            return self._token_bytes(token)
        except (CodecError, LookupError, ValueError):
            self._problems.append(ParseProblem.UNKNOWN_ID)
            return REPLACEMENT

    def _decode_utf8(self, data: bytes, *, final: bool) -> str:
        try:
            return self._decoder.decode(data, final)
        except UnicodeDecodeError:
            # A failed decode keeps the pending bytes, so the same data can be decoded again.
            self._problems.append(ParseProblem.INVALID_UTF8)
            self._decoder.errors = "replace"
            return self._decoder.decode(data, final)

    def _record(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        for delta in deltas:
            if delta.tool_call is not None:
                self._tool_calls.append(delta.tool_call)
            elif delta.reasoning_content:
                self._reasoning_content.append(delta.reasoning_content)
            else:
                self._content.append(delta.content)
        return deltas


def parse_reply_bytes(
    parser: TextParser, reply: bytes, *, cut: bool, ignore_arguments: bool = False
) -> tuple[str, str, list[tuple[str, bytes]]]:
    """Returns the text, the reasoning and the calls of a reply for comparison with another spelling of it.

    Whitespace is removed. With `ignore_arguments` calls are compared by name only.
    """
    # The reply is fed as if it were one token.
    message = OutputParser(parser, lambda _: reply).parse([0], "length" if cut else "stop").message
    calls = [
        (call.name, b"" if ignore_arguments else call.canonical_arguments) for call in message.tool_calls
    ]
    return "".join(message.content.split()), "".join(message.reasoning_content.split()), calls
