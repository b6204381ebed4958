"""Answers while they are sampled: chunks in, deltas out, cut where the client asked for an end.

What a client sees and what is recorded are the same tokens. Stop texts are looked for in what the answer
says, not in its reasoning or its tool calls; the token that completes one is the last that is kept, and
text that may still become one is held back. An engine never hears of them: it is told to stop by being
closed, so a stop text works on every engine and survives a pause.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from branchline.chat.base import IncrementalParser
from branchline.chat.parsing.base import MessageDelta
from branchline.core.call import Generation
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import NO_IDS, Floats, Ids, as_ids
from branchline.engines.base import Chunk


class AnswerDelta(Struct, frozen=True):
    """The next bit of an answer, and the tokens it came with."""

    index: int
    deltas: Sequence[MessageDelta]
    ids: Ids = NO_IDS
    logprobs: Floats | None = None


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    message: Message
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or an upstream's `content_filter`."""
    ids: Ids
    logprobs: Floats | None
    stop_sequence: str | None = None
    """The stop text that ended it, if one did."""
    versions: tuple[int, ...] = ()
    """The policy versions that sampled it, ascending; none where that is not known."""


def new_tool_call_id() -> str:
    """An id for a tool call that has none of its own."""
    return "call_" + secrets.token_hex(12)


class StopStringMatcher:
    """Looks for stop texts in a text that arrives in pieces.

    >>> stop_strings = StopStringMatcher(("\\nObservation:",))
    >>> stop_strings.feed("Action: look\\nObs"), stop_strings.feed("ervation: a door"), stop_strings.matched
    ('Action: look', '', '\\nObservation:')
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._stop_strings = [text for text in texts if text]
        self._pending = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What is certain not to be part of a stop text; nothing any more once one is found."""
        if self.matched is not None:
            return ""
        text = self._pending + text
        places = [(place, -len(stop), stop) for stop in self._stop_strings if (place := text.find(stop)) >= 0]
        if places:
            place, _, self.matched = min(places)
            self._pending = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when it can become a stop text no more."""
        held, self._pending = self._pending, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that a stop text begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass
class AnswerBuilder:
    """One answer while it is being sampled."""

    index: int
    parser: IncrementalParser
    stop_strings: Sequence[str] = ()
    single_tool_call: bool = False
    """End behind the first tool call (`parallel_tool_calls: false`), or behind its stop id if one follows."""
    stop_ids: frozenset[int] = frozenset()
    response_id: str = ""
    """The response's id on the wire; a client that sends it back says which of equal answers it means."""
    chunks: list[Chunk] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "length"
    is_stopped: bool = False
    """Nothing more is wanted, though the engine may have more to say."""

    def __post_init__(self) -> None:
        self._generation: Generation | None = None
        self._stop_matcher = StopStringMatcher(self.stop_strings) if self.stop_strings else None
        self._content_parts: list[str] = []
        self._has_tool_call = False

    def add_chunk(self, chunk: Chunk) -> AnswerDelta:
        """The deltas a chunk makes; none of what lies behind an end the client asked for."""
        if self._stop_matcher is None and not self.single_tool_call:
            deltas = self.parser.feed(chunk.ids.tolist())
        else:
            deltas, used = self._feed_tokenwise(chunk.ids)
            if used < len(chunk.ids) or self.is_stopped:
                logprobs = None if chunk.logprobs is None else chunk.logprobs[:used]
                chunk = Chunk(chunk.ids[:used], logprobs, chunk.version, "stop")
        self.chunks.append(chunk)
        self._generation = None
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            if not self.is_stopped:
                deltas = [
                    *deltas,
                    *self._apply_stop_strings(self.parser.finish(chunk.finish_reason)),
                    *self._flush_pending(),
                ]
        for delta in deltas:
            if delta.tool_call is not None:
                deltas = [self._with_tool_call_id(one) for one in deltas]
                break
        return AnswerDelta(self.index, deltas, chunk.ids, chunk.logprobs)

    def _feed_tokenwise(self, ids: Ids) -> tuple[list[MessageDelta], int]:
        """Token by token, so that the one behind which it ends is known."""
        deltas: list[MessageDelta] = []
        for place, token in enumerate(ids.tolist(), start=1):
            if self._has_tool_call and token not in self.stop_ids:
                self.is_stopped = True
                return deltas, place - 1
            new = self._apply_stop_strings(self.parser.feed([token]))
            deltas += new
            found = self._stop_matcher is not None and self._stop_matcher.matched is not None
            if found or self._has_tool_call:
                self.is_stopped = True
                return deltas, place
            # One token more is looked at: a model that stops here should learn that it did.
            self._has_tool_call = self.single_tool_call and any(delta.tool_call is not None for delta in new)
        return deltas, len(ids)

    def _apply_stop_strings(self, deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
        if self._stop_matcher is None:
            return list(deltas)
        passed: list[MessageDelta] = []
        for delta in deltas:
            if self._stop_matcher.matched is not None:
                break
            if delta.tool_call is None and not delta.reasoning_content:
                text = self._stop_matcher.feed(delta.content)
                passed += self._text_deltas(text)
            else:
                passed += [*self._flush_pending(), delta]
        return passed

    def _flush_pending(self) -> list[MessageDelta]:
        return [] if self._stop_matcher is None else self._text_deltas(self._stop_matcher.flush())

    def _text_deltas(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        self._content_parts.append(text)
        return [MessageDelta(content=text)]

    def _with_tool_call_id(self, delta: MessageDelta) -> MessageDelta:
        """Ids on the wire are ours, unless the model's format has its own."""
        if delta.tool_call is None:
            return delta
        call = delta.tool_call
        if not call.id:
            call = ToolCall(call.name, call.arguments, new_tool_call_id(), call.kind)
        self.tool_calls.append(call)
        return MessageDelta(tool_call=call, index=delta.index)

    @property
    def ids(self) -> Ids:
        return self._build_generation().ids

    def _build_generation(self) -> Generation:
        """All chunks as one, made when it is asked for and kept until another comes."""
        if self._generation is None:
            said = self.parser.message
            text = said.content if self._stop_matcher is None else "".join(self._content_parts)
            message = Message(
                "assistant",
                text,
                reasoning_content=said.reasoning_content,
                tool_calls=tuple(self.tool_calls),
                id=self.response_id,
            )
            self._generation = Generation(*_concatenate_chunks(self.chunks), self.finish_reason, message)
        return self._generation

    @property
    def message(self) -> Message:
        message = self._build_generation().message
        assert message is not None
        return message

    def generation(self, finish: str) -> Generation:
        """The answer as the tree keeps it."""
        whole = self._build_generation()
        return whole if finish == whole.finish_reason else replace(whole, finish_reason=finish)

    @property
    def answer(self) -> Answer:
        """The answer as a client gets it."""
        finish = "tool_calls" if self.tool_calls and self.finish_reason == "stop" else self.finish_reason
        stop = self._stop_matcher.matched if self._stop_matcher is not None else None
        whole = self._build_generation()
        # A chunk that only says how it ended was sampled by nobody.
        versions = tuple(sorted({chunk.version for chunk in self.chunks if len(chunk.ids)}))
        return Answer(self.message, finish, whole.ids, whole.logprobs, stop, versions)


def _concatenate_chunks(chunks: Sequence[Chunk]) -> tuple[Ids, Floats | None, int | NDArray[np.int64]]:
    """The ids, logprobs and versions of chunks that follow one another; one version where all have it."""
    if len(chunks) == 1:
        (chunk,) = chunks
        return as_ids(chunk.ids), chunk.logprobs, chunk.version
    ids = as_ids(np.concatenate([NO_IDS, *(chunk.ids for chunk in chunks)]))
    logprobs: Floats | None = None
    if any(chunk.logprobs is not None for chunk in chunks):
        parts = [
            np.full(len(chunk.ids), np.nan, np.float32) if chunk.logprobs is None else chunk.logprobs
            for chunk in chunks
        ]
        logprobs = np.concatenate(parts)
    versions = {chunk.version for chunk in chunks}
    if len(versions) == 1:
        return ids, logprobs, versions.pop()
    told = np.array([chunk.version for chunk in chunks], np.int64)
    return ids, logprobs, np.repeat(told, [len(chunk.ids) for chunk in chunks])
