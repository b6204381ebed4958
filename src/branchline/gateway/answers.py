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
from branchline.chat.parsing.base import Delta
from branchline.core.call import Generation
from branchline.core.message import Message, ToolCall
from branchline.core.runs import NO_IDS, Floats, Ids, as_ids
from branchline.engines.base import Chunk


class Said(Struct, frozen=True):
    """The next bit of an answer, and the tokens it came with."""

    choice: int
    deltas: Sequence[Delta]
    ids: Ids = NO_IDS
    logprobs: Floats | None = None


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    message: Message
    finish: str
    """`stop`, `length`, `tool_calls`, or an upstream's `content_filter`."""
    ids: Ids
    logprobs: Floats | None
    stop: str | None = None
    """The stop text that ended it, if one did."""
    versions: tuple[int, ...] = ()
    """The policy versions that sampled it, ascending; none where that is not known."""


def new_call_id() -> str:
    """An id for a tool call that has none of its own."""
    return "call_" + secrets.token_hex(12)


class StopTexts:
    """Looks for stop texts in a text that arrives in pieces.

    >>> stops = StopTexts(("\\nObservation:",))
    >>> stops.feed("Action: look\\nObs"), stops.feed("ervation: a door"), stops.found
    ('Action: look', '', '\\nObservation:')
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text for text in texts if text]
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What is certain not to be part of a stop text; nothing any more once one is found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(place, -len(stop), stop) for stop in self._texts if (place := text.find(stop)) >= 0]
        if places:
            place, _, self.found = min(places)
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when it can become a stop text no more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that a stop text begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass
class Choice:
    """One answer while it is being sampled."""

    index: int
    parser: IncrementalParser
    stops: Sequence[str] = ()
    single_call: bool = False
    """End behind the first tool call (`parallel_tool_calls: false`), or behind its stop id if one follows."""
    stop_ids: frozenset[int] = frozenset()
    response_id: str = ""
    """The response's id on the wire; a client that sends it back says which of equal answers it means."""
    chunks: list[Chunk] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: str = "length"
    ended: bool = False
    """Nothing more is wanted, though the engine may have more to say."""

    def __post_init__(self) -> None:
        self._made: Generation | None = None
        self._watch = StopTexts(self.stops) if self.stops else None
        self._texts: list[str] = []
        self._has_called = False

    def take(self, chunk: Chunk) -> Said:
        """The deltas a chunk makes; none of what lies behind an end the client asked for."""
        if self._watch is None and not self.single_call:
            deltas = self.parser.feed(chunk.ids.tolist())
        else:
            deltas, used = self._feed_one_by_one(chunk.ids)
            if used < len(chunk.ids) or self.ended:
                logprobs = None if chunk.logprobs is None else chunk.logprobs[:used]
                chunk = Chunk(chunk.ids[:used], logprobs, chunk.version, "stop")
        self.chunks.append(chunk)
        self._made = None
        if chunk.finish is not None:
            self.finish = chunk.finish
            if not self.ended:
                deltas = [*deltas, *self._watched(self.parser.finish(chunk.finish)), *self._flushed()]
        for delta in deltas:
            if delta.call is not None:
                deltas = [self._named(one) for one in deltas]
                break
        return Said(self.index, deltas, chunk.ids, chunk.logprobs)

    def _feed_one_by_one(self, ids: Ids) -> tuple[list[Delta], int]:
        """Token by token, so that the one behind which it ends is known."""
        deltas: list[Delta] = []
        for place, token in enumerate(ids.tolist(), start=1):
            if self._has_called and token not in self.stop_ids:
                self.ended = True
                return deltas, place - 1
            new = self._watched(self.parser.feed([token]))
            deltas += new
            found = self._watch is not None and self._watch.found is not None
            if found or self._has_called:
                self.ended = True
                return deltas, place
            # One token more is looked at: a model that stops here should learn that it did.
            self._has_called = self.single_call and any(delta.call is not None for delta in new)
        return deltas, len(ids)

    def _watched(self, deltas: Sequence[Delta]) -> list[Delta]:
        if self._watch is None:
            return list(deltas)
        passed: list[Delta] = []
        for delta in deltas:
            if self._watch.found is not None:
                break
            if delta.call is None and not delta.reasoning:
                text = self._watch.feed(delta.text)
                passed += self._text(text)
            else:
                passed += [*self._flushed(), delta]
        return passed

    def _flushed(self) -> list[Delta]:
        return [] if self._watch is None else self._text(self._watch.flush())

    def _text(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._texts.append(text)
        return [Delta(text=text)]

    def _named(self, delta: Delta) -> Delta:
        """Ids on the wire are ours, unless the model's format has its own."""
        if delta.call is None:
            return delta
        call = delta.call
        if not call.id:
            call = ToolCall(call.name, call.arguments, new_call_id(), call.kind)
        self.calls.append(call)
        return Delta(call=call, index=delta.index)

    @property
    def ids(self) -> Ids:
        return self._whole().ids

    def _whole(self) -> Generation:
        """All chunks as one, made when it is asked for and kept until another comes."""
        if self._made is None:
            said = self.parser.message
            text = said.text if self._watch is None else "".join(self._texts)
            message = Message(
                "assistant", text, reasoning=said.reasoning, calls=tuple(self.calls), id=self.response_id
            )
            self._made = Generation(*_joined(self.chunks), self.finish, message)
        return self._made

    @property
    def message(self) -> Message:
        message = self._whole().message
        assert message is not None
        return message

    def generation(self, finish: str) -> Generation:
        """The answer as the tree keeps it."""
        whole = self._whole()
        return whole if finish == whole.finish else replace(whole, finish=finish)

    @property
    def answer(self) -> Answer:
        """The answer as a client gets it."""
        finish = "tool_calls" if self.calls and self.finish == "stop" else self.finish
        stop = self._watch.found if self._watch is not None else None
        whole = self._whole()
        # A chunk that only says how it ended was sampled by nobody.
        versions = tuple(sorted({chunk.version for chunk in self.chunks if len(chunk.ids)}))
        return Answer(self.message, finish, whole.ids, whole.logprobs, stop, versions)


def _joined(chunks: Sequence[Chunk]) -> tuple[Ids, Floats | None, int | NDArray[np.int64]]:
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
