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


class Problem(StrEnum):
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


class Delta(Struct, frozen=True):
    """The next bit of a message: reasoning, text, or a whole tool call. One is made for every token."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    index: int = 0
    """Which of the message's calls this is."""


class TextParser(Protocol):
    """One output of one format, read as text. Made for one output, finished once."""

    @property
    def problems(self) -> list[Problem]: ...

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        ...

    def finish(self, cut: bool) -> list[Delta]:
        """All that was held back. `cut`: the output ended before the model ended it."""
        ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole output."""

    message: Message
    problems: tuple[Problem, ...]


class OutputParser:
    """One output, read as ids.

    >>> from branchline.chat.parsing.registry import parser_for
    >>> parser = OutputParser(parser_for("plain", reasoning="think"), lambda token: bytes([token]), {0})
    >>> parser.feed(b"<think>\\nhm")
    [Delta(text='', reasoning='hm', call=None, index=0)]
    >>> parser.feed(b"\\n</think>\\n\\nyes\\0")
    [Delta(text='yes', reasoning='', call=None, index=0)]
    >>> parser.finish("stop")
    []
    >>> parser.message.text
    'yes'
    """

    def __init__(
        self, parser: TextParser, token_bytes: Callable[[int], bytes], stop_ids: Collection[int] = ()
    ) -> None:
        self._parser = parser
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._stop: int | None = None
        """A stop id that is the last one so far; it becomes text only when more follows."""
        self._is_inside = False
        """Whether a character has begun that has not ended."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._problems: list[Problem] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """What is certain after these ids."""
        ids = ids if isinstance(ids, list) else list(ids)
        if len(ids) == 1 and self._stop is None and not self._is_inside:
            # Mostly, while an answer is streamed: one token, of whole and plain letters.
            spelled = b"" if ids[0] in self._stop_ids else self._spell(ids[0])
            if spelled and spelled.isascii():
                deltas = self._parser.feed(spelled.decode("ascii"))
                return self._record(deltas) if deltas else deltas
        if self._stop is None and self._stop_ids.isdisjoint(ids[:-1]):
            # Mostly: at most the last one is a stop id.
            if ids and ids[-1] in self._stop_ids:
                self._stop, ids = int(ids[-1]), ids[:-1]
            text = self._decode(self._spell_all(ids), final=False)
        else:
            text = self._decode(self._spell_around_stops(ids), final=False)
        return self._record(self._parser.feed(text)) if text else []

    def _spell_all(self, ids: list[int]) -> bytes:
        try:
            return b"".join(map(self._token_bytes, ids))
        except (CodecError, LookupError, ValueError):
            return b"".join([self._spell(token) for token in ids])

    def _spell_around_stops(self, ids: list[int]) -> bytes:
        spelled = []
        for token in ids:
            if self._stop is not None:
                spelled.append(self._spell(self._stop))
                self._stop = None
            if token in self._stop_ids:
                self._stop = int(token)
            else:
                spelled.append(self._spell(int(token)))
        return b"".join(spelled)

    def finish(self, finish_reason: str | None) -> list[Delta]:
        """What was held back. An output is cut unless it ends in a stop id or its reason is a stop."""
        text = self._decode(b"", final=True)
        deltas = self._parser.feed(text) if text else []
        cut = self._stop is None and finish_reason not in ("stop", "tool_calls")
        return self._record([*deltas, *self._parser.finish(cut)])

    def parse(self, ids: Iterable[int], finish_reason: str | None) -> Parsed:
        """A whole output at once: feed and finish."""
        self.feed(ids)
        self.finish(finish_reason)
        return Parsed(self.message, self.problems)

    @property
    def message(self) -> Message:
        """All that has been said so far."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        return Message("assistant", text, reasoning=reasoning, calls=tuple(self._calls))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each problem once, in no more order than: the bytes' before the format's."""
        return tuple(dict.fromkeys([*sorted(self._problems), *self._parser.problems]))

    def _spell(self, token: int) -> bytes:
        try:
            return self._token_bytes(token)
        except (CodecError, LookupError, ValueError):
            self._problems.append(Problem.UNKNOWN_ID)
            return REPLACEMENT

    def _decode(self, data: bytes, *, final: bool) -> str:
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError:
            # A failed decode leaves what was pending in place, so the same bytes can be read again.
            self._problems.append(Problem.INVALID_UTF8)
            self._decoder.errors = "replace"
            text = self._decoder.decode(data, final)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def _record(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if delta.call is not None:
                self._calls.append(delta.call)
            elif delta.reasoning:
                self._reasoning.append(delta.reasoning)
            else:
                self._text.append(delta.text)
        return deltas
