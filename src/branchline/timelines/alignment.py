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
from branchline.core.token_arrays import Ids
from branchline.timelines.prefix_index import starts_with

TokenBytes = Callable[[int], bytes]
_ANCHOR_TOKENS = 8


class AlignmentMethod(StrEnum):
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
class Alignment:
    """`prompt[end:]` is what follows the output."""

    end: int
    method: AlignmentMethod


def align_output(
    prompt: Ids,
    before: Ids,
    said: Ids,
    *,
    finish_reason: str,
    following_messages: Sequence[Message],
    message: Message,
    token_bytes: TokenBytes | None,
) -> Alignment:
    """The end of `said`, sampled behind `before`, in a later prompt that means the same."""
    if not starts_with(prompt, before):
        end = _end_by_anchor(prompt, before, said)
        if end is not None:
            return Alignment(end, AlignmentMethod.ANCHOR)
        return Alignment(
            _end_by_estimate(prompt, min(len(before), len(prompt)), message, following_messages),
            AlignmentMethod.ESTIMATE,
        )
    start = len(before)
    if starts_with(prompt[start:], said):
        return Alignment(start + len(said), AlignmentMethod.IDENTICAL)
    if token_bytes is not None:
        end = _end_by_bytes(prompt, start, said, token_bytes)
        if end is not None:
            return Alignment(end, AlignmentMethod.BYTES)
    if finish_reason != "length" and len(said):
        stops = np.flatnonzero(prompt[start:] == said[-1])
        if len(stops):
            return Alignment(start + int(stops[0]) + 1, AlignmentMethod.STOP_TOKEN)
    return Alignment(_end_by_estimate(prompt, start, message, following_messages), AlignmentMethod.ESTIMATE)


def _end_by_bytes(prompt: Ids, start: int, said: Ids, token_bytes: TokenBytes) -> int | None:
    wanted = b"".join(map(token_bytes, said.tolist()))
    read = b""
    for place, token in enumerate(prompt[start:].tolist(), start=start):
        if len(read) >= len(wanted):
            return place if read == wanted else None
        read += token_bytes(token)
        if not wanted.startswith(read[: len(wanted)]):
            return None
    return len(prompt) if read == wanted else None


def _end_by_anchor(prompt: Ids, before: Ids, said: Ids) -> int | None:
    """The end of the sampled ids in a prompt, known by the last ids they were sampled behind."""
    anchor = np.concatenate((before[-_ANCHOR_TOKENS:], said))
    if not len(said) or len(anchor) > len(prompt):
        return None
    # The same words may have been said before: of equal places, the one with as many before it.
    earlier = len(_occurrences(np.concatenate((before, said)), anchor)) - 1
    places = _occurrences(prompt, anchor)
    return places[earlier] + len(anchor) if earlier < len(places) else None


def _occurrences(ids: Ids, anchor: Ids) -> list[int]:
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(anchor) + 1)] == anchor[0]).tolist()
    return [place for place in starts if np.array_equal(ids[place : place + len(anchor)], anchor)]


def _end_by_estimate(prompt: Ids, start: int, answer: Message, following: Sequence[Message]) -> int:
    tail = len(prompt) - start
    said = _text_length(answer)
    share = said / max(1, said + sum(_text_length(message) for message in following))
    # Both sides have at least a token where there are enough of them.
    most = tail - 1 if following and tail > 1 else tail
    return start + min(most, max(1 if tail else 0, round(tail * share)))


def _text_length(message: Message) -> int:
    return (
        len(message.content)
        + len(message.reasoning_content)
        + sum(len(call.arguments) for call in message.tool_calls)
    )
