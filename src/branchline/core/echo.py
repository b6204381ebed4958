"""The echo matcher: does this inbound message mean what we sampled, and what did the client do to it?

`echo(sampled, shown)` is None for an edit, else the named equivalences that were needed (none: a perfect
echo). Nothing is accepted without a name, so what was tolerated can always be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from operator import itemgetter

from branchline.core.arguments import Notation
from branchline.core.message import Message, ToolCall, WireShape


class Equivalence(StrEnum):
    """One thing clients do to a message without meaning to change it."""

    EMPTY_CONTENT = "empty_content"
    """`null`, `""` and an absent content stand for each other."""
    PART_LIST = "part_list"
    """A text as a list of text parts, or the other way round."""
    EMPTY_CALLS = "empty_calls"
    """`tool_calls: null` or `[]` where there are none."""
    RENAMED_IDS = "renamed_ids"
    """Ids of tool calls replaced or left out."""
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    """The same JSON with other spacing, key order, escapes or number spelling."""
    PYTHON_LITERALS = "python_literals"
    """Arguments that are no JSON but read as a Python literal (`False` for `false`)."""
    EMPTY_ARGUMENTS = "empty_arguments"
    """No arguments at all for `{}`."""
    DEFAULTS_FILLED = "defaults_filled"
    """Arguments that a tool's schema has defaults for, written out or left out."""
    REORDERED_CALLS = "reordered_calls"
    """Parallel calls in another order; results go back to the sampled order."""
    REORDERED_RESULTS = "reordered_results"
    """Tool results in another order than their calls."""
    TRIMMED_WHITESPACE = "trimmed_whitespace"
    """Whitespace around the text or the reasoning lost."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning not sent back."""
    NAMED = "named"
    """A `name` that was not sent, or one that was left out."""
    EMPTY_TOOLS = "empty_tools"
    """`tools: []` for no tools."""


# Plain numbers, because this runs for every message of every request and flags of an enum are slow.
_NO_CONTENT = int(WireShape.NULL_CONTENT | WireShape.ABSENT_CONTENT)
_PART_LIST = int(WireShape.PART_LIST)
_NO_CALLS = int(WireShape.NULL_CALLS | WireShape.EMPTY_CALLS)


def match_echo(sampled: Message, shown: Message) -> tuple[Equivalence, ...] | None:
    """The equivalences under which `shown` is `sampled` sent back; None where it is something else.

    >>> match_echo(Message("assistant", "hi ", reasoning_content="hm"), Message("assistant", "hi"))
    (<Equivalence.TRIMMED_WHITESPACE: 'trimmed_whitespace'>, <Equivalence.DROPPED_REASONING: 'dropped_reasoning'>)
    """
    if sampled.key != shown.key:
        return None
    used: list[Equivalence] = []
    if sampled.content != shown.content:
        used.append(Equivalence.TRIMMED_WHITESPACE)
    if sampled.wire_shape != shown.wire_shape:
        used += _wire_shape_equivalences(sampled.wire_shape ^ shown.wire_shape)
    if sampled.reasoning_content != shown.reasoning_content:
        kept = shown.reasoning_content.strip()
        if sampled.reasoning_content.strip() == kept:
            if Equivalence.TRIMMED_WHITESPACE not in used:
                used.append(Equivalence.TRIMMED_WHITESPACE)
        elif not kept:
            used.append(Equivalence.DROPPED_REASONING)
        else:
            return None
    if sampled.name != shown.name:
        used.append(Equivalence.NAMED)
    if sampled.tool_calls != shown.tool_calls:
        used += _call_equivalences(sampled.tool_calls, shown.tool_calls)
    return tuple(used)


def _wire_shape_equivalences(changed: int) -> list[Equivalence]:
    used = []
    if changed & _NO_CONTENT:
        used.append(Equivalence.EMPTY_CONTENT)
    if changed & _PART_LIST:
        used.append(Equivalence.PART_LIST)
    if changed & _NO_CALLS:
        used.append(Equivalence.EMPTY_CALLS)
    return used


def pair_tool_calls(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[int]:
    """For each sampled call, the place of its echo. Equal calls pair by id, else in turn.

    >>> pair_tool_calls((ToolCall("a"), ToolCall("b")), (ToolCall("b"), ToolCall("a")))
    [1, 0]
    """
    free = list(range(len(shown)))
    order = [-1] * len(sampled)
    # An echoed id is proof, so it goes first; what is left pairs by meaning, first come first served.
    for by_id in (True, False):
        for index, call in enumerate(sampled):
            if order[index] >= 0:
                continue
            for place in free:
                other = shown[place]
                if (
                    call.name == other.name
                    and call.canonical_arguments == other.canonical_arguments
                    and (not by_id or (call.id and call.id == other.id))
                ):
                    order[index] = place
                    free.remove(place)
                    break
    return order


# By the notation that is further from JSON, of two texts that mean the same.
_ARGUMENT_EQUIVALENCES = {
    Notation.JSON: Equivalence.ARGUMENTS_RESERIALISED,
    Notation.EMPTY: Equivalence.EMPTY_ARGUMENTS,
    Notation.PYTHON: Equivalence.PYTHON_LITERALS,
}


def _call_equivalences(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[Equivalence]:
    order = pair_tool_calls(sampled, shown)
    pairs = [(call, shown[place]) for call, place in zip(sampled, order, strict=True)]
    used: list[Equivalence] = []
    if order != sorted(order):
        used.append(Equivalence.REORDERED_CALLS)
    if any(call.id and call.id != other.id for call, other in pairs):
        used.append(Equivalence.RENAMED_IDS)
    for call, other in pairs:
        if call.arguments != other.arguments:
            rewritten = _ARGUMENT_EQUIVALENCES[Notation(max(call.notation, other.notation))]
            if rewritten not in used:
                used.append(rewritten)
    return used


def order_tool_results(
    sampled: Message, shown: Message, results: Sequence[Message]
) -> tuple[Sequence[Message], bool]:
    """Tool results in the order of the sampled calls (templates pair by position), and whether they moved.

    Results are known by the id of the call they answer. One whose id is missing, unknown or not unique is
    taken to stand where its call stands among the shown calls; where that cannot be, nothing moves.
    """
    if len(sampled.tool_calls) < 2 or len(results) < 2:
        return results, False
    order = pair_tool_calls(sampled.tool_calls, shown.tool_calls)
    if -1 in order:
        return results, False
    # Ids as the client writes them count first; on results it may also have left the ids that were ours.
    rank_of_id = _rank_by_id([call.id for call in sampled.tool_calls])
    rank_of_id |= _rank_by_id([shown.tool_calls[place].id for place in order])
    ranks = [rank_of_id.get(result.tool_call_id, -1) for result in results]
    if -1 in ranks:
        rank_of_place = {place: rank for rank, place in enumerate(order)}
        ranks = [rank_of_place.get(place, -1) if rank < 0 else rank for place, rank in enumerate(ranks)]
        if -1 in ranks or len(set(ranks)) != len(ranks):
            return results, False
    if ranks == sorted(ranks):
        return results, False
    return [result for _, result in sorted(zip(ranks, results, strict=True), key=itemgetter(0))], True


def _rank_by_id(ids: Sequence[str]) -> dict[str, int]:
    """The place of each id, or -1 where it has several."""
    return {id: -1 if ids.count(id) > 1 else rank for rank, id in enumerate(ids) if id}
