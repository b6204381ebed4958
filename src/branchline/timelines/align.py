"""Where in a re-encoded prompt does an earlier output end?

A foreign prompt may spell an output with other ids than it was sampled with. To put the sampled ids back
("repair"), the place where the re-encoded text ends must be known: from the bytes of the tokens where a
tokenizer is at hand, else from the stop token, else from equal ids behind a changed prefix. What none of
them decides is estimated from the lengths of the texts, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from branchline.core.message import Message
from branchline.core.runs import Ids
from branchline.timelines.chains import starts_with

TokenBytes = Callable[[int], bytes]
_ANCHOR = 8


class Method(StrEnum):
    """How the end of an output was found in a prompt."""

    IDENTICAL = "identical"
    """The prompt holds the very ids that were sampled, behind the very ids they were sampled behind."""
    BYTES = "bytes"
    """Other ids, the same bytes."""
    STOP_TOKEN = "stop_token"
    """Other ids, up to the stop token the output ended in."""
    ANCHOR = "anchor"
    """The sampled ids, behind a prefix that changed (other tools, another date)."""
    ESTIMATE = "estimate"
    """From the lengths of the texts; pass a tokenizer to know."""


@dataclass(frozen=True)
class Cut:
    """`prompt[end:]` is what follows the output."""

    end: int
    method: Method


def find_end(
    prompt: Ids,
    before: Ids,
    said: Ids,
    *,
    finish: str,
    following: Sequence[Message],
    answer: Message,
    token_bytes: TokenBytes | None,
) -> Cut:
    """The end of `said`, sampled behind `before`, in a later prompt that means the same."""
    if not starts_with(prompt, before):
        end = _find_anchor(prompt, before, said)
        if end is not None:
            return Cut(end, Method.ANCHOR)
        return Cut(_estimate(prompt, min(len(before), len(prompt)), answer, following), Method.ESTIMATE)
    start = len(before)
    if starts_with(prompt[start:], said):
        return Cut(start + len(said), Method.IDENTICAL)
    if token_bytes is not None:
        end = _same_bytes(prompt, start, said, token_bytes)
        if end is not None:
            return Cut(end, Method.BYTES)
    if finish != "length" and len(said):
        stops = np.flatnonzero(prompt[start:] == said[-1])
        if len(stops):
            return Cut(start + int(stops[0]) + 1, Method.STOP_TOKEN)
    return Cut(_estimate(prompt, start, answer, following), Method.ESTIMATE)


def _same_bytes(prompt: Ids, start: int, said: Ids, token_bytes: TokenBytes) -> int | None:
    wanted = b"".join(map(token_bytes, said.tolist()))
    read = b""
    for place, token in enumerate(prompt[start:].tolist(), start=start):
        if len(read) >= len(wanted):
            return place if read == wanted else None
        read += token_bytes(token)
        if not wanted.startswith(read[: len(wanted)]):
            return None
    return len(prompt) if read == wanted else None


def _find_anchor(prompt: Ids, before: Ids, said: Ids) -> int | None:
    """The end of the sampled ids in a prompt, known by the last ids they were sampled behind."""
    anchor = np.concatenate((before[-_ANCHOR:], said))
    if not len(said) or len(anchor) > len(prompt):
        return None
    # The same words may have been said before: of equal places, the one with as many before it.
    earlier = len(_places(np.concatenate((before, said)), anchor)) - 1
    places = _places(prompt, anchor)
    return places[earlier] + len(anchor) if earlier < len(places) else None


def _places(ids: Ids, anchor: Ids) -> list[int]:
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(anchor) + 1)] == anchor[0]).tolist()
    return [place for place in starts if np.array_equal(ids[place : place + len(anchor)], anchor)]


def _estimate(prompt: Ids, start: int, answer: Message, following: Sequence[Message]) -> int:
    tail = len(prompt) - start
    said = _length(answer)
    share = said / max(1, said + sum(_length(message) for message in following))
    # Both sides have at least a token where there are enough of them.
    most = tail - 1 if following and tail > 1 else tail
    return start + min(most, max(1 if tail else 0, round(tail * share)))


def _length(message: Message) -> int:
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
