"""Builds answers while they are sampled: chunks of ids in, deltas of messages out.

What a client gets and what is recorded are the same tokens. Stop texts are searched for in the content of an
answer, not in its reasoning or its tool calls. The token that completes a stop text is the last one kept, and
text that may still become a stop text is held back. Engines never see stop texts: the runtime closes the
generation, so a stop text works with every engine and across a pause.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """The next part of an answer and the tokens it was parsed from."""

    index: int
    deltas: Sequence[MessageDelta]
    ids: Ids = NO_IDS
    logprobs: Floats | None = None
    extra: Mapping[str, Any] | None = None
    """Further fields of an upstream's message."""
    logprob_entries: Sequence[Mapping[str, Any]] = ()
    """The logprobs of an upstream's tokens, as it wrote them."""


@dataclass(frozen=True)
class Answer:
    """One complete answer as its client gets it."""

    message: Message
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or an upstream's `content_filter`."""
    ids: Ids
    logprobs: Floats | None = None
    stop_sequence: str | None = None
    """The stop text that ended it, if one did."""
    versions: tuple[int, ...] = ()
    """The policy versions that sampled it, ascending; empty if not known."""
    num_preempted: int = 0
    """How often the engine interrupted and continued it."""
    logprob_entries: Sequence[Mapping[str, Any]] = ()
    """The logprobs of an upstream's tokens, as it wrote them."""


def new_tool_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class StopStringMatcher:
    """Searches for stop texts in a text that arrives in pieces.

    >>> matcher = StopStringMatcher(("\\nObservation:",))
    >>> matcher.feed("Action: look\\nObs"), matcher.feed("ervation: a door"), matcher.matched
    ('Action: look', '', '\\nObservation:')
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._stop_strings = [text for text in texts if text]
        self._pending = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that cannot be part of a stop text; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._pending + text
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            start, _, self.matched = min(found)
            self._pending = ""
            return text[:start]
        overlap = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._pending = text[len(text) - overlap :]
        return text[: len(text) - overlap]

    def flush(self) -> str:
        """Returns the text held back, when it can no longer become a stop text."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass
class AnswerBuilder:
    """One answer while it is sampled."""

    index: int
    parser: IncrementalParser
    stop_strings: Sequence[str] = ()
    single_tool_call: bool = False
    """The answer ends after its first tool call, or after the stop id that follows it."""
    stop_ids: frozenset[int] = frozenset()
    response_id: str = ""
    """The id of the response. A client that sends it back names one of several equal answers."""
    chunks: list[Chunk] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "length"
    is_stopped: bool = False
    """The answer is complete, and what else the engine samples is not wanted."""

    def __post_init__(self) -> None:
        self._stop_matcher = StopStringMatcher(self.stop_strings) if self.stop_strings else None
        self._content_parts: list[str] = []
        self._has_tool_call = False

    def add(self, chunk: Chunk) -> AnswerDelta:
        """Returns what a chunk adds to the answer, without the tokens after a requested end."""
        if self._stop_matcher is None and not self.single_tool_call:
            deltas = self.parser.feed(chunk.ids.tolist())
        else:
            deltas, used = self._feed_tokenwise(chunk.ids)
            if self.is_stopped:
                logprobs = None if chunk.logprobs is None else chunk.logprobs[:used]
                chunk = Chunk(chunk.ids[:used], logprobs, chunk.version, "stop", chunk.num_preempted)
        self.chunks.append(chunk)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            if not self.is_stopped:
                last = self.parser.finish(chunk.finish_reason)
                if self._stop_matcher is not None:
                    last = [*self._apply_stop_strings(last), *self._flush_pending()]
                deltas = [*deltas, *last]
        if any(delta.tool_call is not None for delta in deltas):
            deltas = [self._with_tool_call_id(delta) for delta in deltas]
        return AnswerDelta(self.index, deltas, chunk.ids, chunk.logprobs)

    def _feed_tokenwise(self, ids: Ids) -> tuple[list[MessageDelta], int]:
        """Returns the deltas and the number of tokens used: fewer than `ids` if the answer ends in them."""
        deltas: list[MessageDelta] = []
        for count, token in enumerate(ids.tolist(), start=1):
            if self._has_tool_call and token not in self.stop_ids:
                self.is_stopped = True
                return deltas, count - 1
            new = self._apply_stop_strings(self.parser.feed([token]))
            deltas += new
            found = self._stop_matcher is not None and self._stop_matcher.matched is not None
            if found or self._has_tool_call:
                self.is_stopped = True
                return deltas, count
            # One more token is read: a stop id after the tool call is recorded and trained.
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
                passed += self._content_deltas(self._stop_matcher.feed(delta.content))
            else:
                passed += [*self._flush_pending(), delta]
        return passed

    def _flush_pending(self) -> list[MessageDelta]:
        return [] if self._stop_matcher is None else self._content_deltas(self._stop_matcher.flush())

    def _content_deltas(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        self._content_parts.append(text)
        return [MessageDelta(content=text)]

    def _with_tool_call_id(self, delta: MessageDelta) -> MessageDelta:
        """Adds an id to a tool call, unless the model's format has ids of its own."""
        call = delta.tool_call
        if call is None:
            return delta
        if not call.id:
            call = ToolCall(call.name, call.arguments, new_tool_call_id(), call.kind)
        self.tool_calls.append(call)
        return MessageDelta(tool_call=call, index=delta.index)

    def generation(self, finish_reason: str = "") -> Generation:
        """The answer as the tree records it; `finish_reason` replaces the engine's."""
        parsed = self.parser.message
        message = Message(
            "assistant",
            parsed.content if self._stop_matcher is None else "".join(self._content_parts),
            reasoning_content=parsed.reasoning_content,
            tool_calls=tuple(self.tool_calls),
            id=self.response_id,
        )
        sizes = [len(chunk.ids) for chunk in self.chunks]
        logprobs: Floats | None = None
        if any(chunk.logprobs is not None for chunk in self.chunks):
            # NaN for chunks without logprobs.
            parts = [
                np.full(size, np.nan, np.float32) if chunk.logprobs is None else chunk.logprobs
                for chunk, size in zip(self.chunks, sizes, strict=True)
            ]
            logprobs = np.concatenate(parts)
        versions: int | NDArray[np.int64]
        if len({chunk.version for chunk in self.chunks}) == 1:
            versions = self.chunks[0].version
        else:
            versions = np.repeat(np.array([chunk.version for chunk in self.chunks], np.int64), sizes)
        ids = as_ids(np.concatenate([NO_IDS, *(chunk.ids for chunk in self.chunks)]))
        return Generation(ids, logprobs, versions, finish_reason or self.finish_reason, message)

    def answer(self, generation: Generation) -> Answer:
        """The answer as its client gets it; `generation` is the one that was committed."""
        assert generation.message is not None
        is_call = bool(self.tool_calls) and self.finish_reason == "stop"
        # The last chunk may have no ids; its version sampled nothing.
        versions = {chunk.version for chunk in self.chunks if len(chunk.ids)}
        return Answer(
            generation.message,
            "tool_calls" if is_call else self.finish_reason,
            generation.ids,
            generation.logprobs,
            None if self._stop_matcher is None else self._stop_matcher.matched,
            tuple(sorted(versions)),
            max([chunk.num_preempted for chunk in self.chunks], default=0),
        )
