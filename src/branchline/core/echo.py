"""The echo matcher: is an inbound assistant message the one that was sampled, and what did the client change?

`match_echo(sampled, shown)` returns None for an edit, else the equivalences that were needed (an empty tuple
for an identical message). Every tolerated difference has a name, so it can be recorded and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from operator import itemgetter

from branchline.core.arguments import Notation
from branchline.core.message import Message, ToolCall, WireShape


class Equivalence(StrEnum):
    """A change that clients make to a message without changing its meaning."""

    EMPTY_CONTENT = "empty_content"
    """`null`, `""` and absent content are interchanged."""
    PART_LIST = "part_list"
    """A text sent as a list of text parts, or the reverse."""
    EMPTY_CALLS = "empty_calls"
    """`tool_calls: null` or `[]` for a message without calls."""
    RENAMED_IDS = "renamed_ids"
    """Ids of tool calls replaced or omitted."""
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    """The same JSON with other spacing, key order, escapes or number spelling."""
    PYTHON_LITERALS = "python_literals"
    """Arguments that are not JSON but parse as a Python literal (`False` for `false`)."""
    EMPTY_ARGUMENTS = "empty_arguments"
    """Empty arguments for `{}`."""
    DEFAULTS_FILLED = "defaults_filled"
    """Arguments with a default in the tool's schema, added or omitted."""
    REORDERED_CALLS = "reordered_calls"
    """Parallel calls in another order; their results are put back into the sampled order."""
    REORDERED_RESULTS = "reordered_results"
    """Tool results in another order than their calls."""
    TRIMMED_WHITESPACE = "trimmed_whitespace"
    """Whitespace around the text or the reasoning removed."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning not sent back."""
    NAMED = "named"
    """A `name` added or omitted."""
    EMPTY_TOOLS = "empty_tools"
    """`tools: []` for no tools."""


# Plain ints: this runs for every message of every request, and enum flags are slow.
_NO_CONTENT = int(WireShape.NULL_CONTENT | WireShape.ABSENT_CONTENT)
_PART_LIST = int(WireShape.PART_LIST)
_NO_CALLS = int(WireShape.NULL_CALLS | WireShape.EMPTY_CALLS)


def match_echo(sampled: Message, shown: Message) -> tuple[Equivalence, ...] | None:
    """Returns the equivalences under which `shown` is an echo of `sampled`, or None if it is not an echo.

    >>> match_echo(Message("assistant", "hi "), Message("assistant", "hi"))
    (<Equivalence.TRIMMED_WHITESPACE: 'trimmed_whitespace'>,)
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
    """Returns for each sampled call the index of its echo, or -1. Equal calls pair by id, then in order.

    >>> pair_tool_calls((ToolCall("a"), ToolCall("b")), (ToolCall("b"), ToolCall("a")))
    [1, 0]
    """
    free = list(range(len(shown)))
    order = [-1] * len(sampled)
    # Equal ids are certain, so they pair first; the remaining calls pair by name and arguments, in order.
    for by_id in (True, False):
        for index, call in enumerate(sampled):
            if order[index] >= 0:
                continue
            for position in free:
                other = shown[position]
                if (
                    call.name == other.name
                    and call.canonical_arguments == other.canonical_arguments
                    and (not by_id or (call.id and call.id == other.id))
                ):
                    order[index] = position
                    free.remove(position)
                    break
    return order


# Keyed by whichever of the two notations is further from JSON.
_ARGUMENT_EQUIVALENCES = {
    Notation.JSON: Equivalence.ARGUMENTS_RESERIALISED,
    Notation.EMPTY: Equivalence.EMPTY_ARGUMENTS,
    Notation.PYTHON: Equivalence.PYTHON_LITERALS,
}


def _call_equivalences(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[Equivalence]:
    order = pair_tool_calls(sampled, shown)
    pairs = [(call, shown[position]) for call, position in zip(sampled, order, strict=True)]
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
    """Returns tool results in the order of the sampled calls, as templates expect, and whether any moved.

    A result belongs to the call with its `tool_call_id`. If that id is missing, unknown or not unique, the
    result is assumed to be at the position of its call among the shown calls; if that is contradictory,
    nothing moves.
    """
    if len(sampled.tool_calls) < 2 or len(results) < 2:
        return results, False
    order = pair_tool_calls(sampled.tool_calls, shown.tool_calls)
    if -1 in order:
        return results, False
    # The client's call ids take precedence; results may also still carry the sampled ids.
    rank_of_id = _rank_by_id([call.id for call in sampled.tool_calls])
    rank_of_id |= _rank_by_id([shown.tool_calls[position].id for position in order])
    ranks = [rank_of_id.get(result.tool_call_id, -1) for result in results]
    if -1 in ranks:
        rank_of_position = {position: rank for rank, position in enumerate(order)}
        ranks = [
            rank_of_position.get(position, -1) if rank < 0 else rank for position, rank in enumerate(ranks)
        ]
        if -1 in ranks or len(set(ranks)) != len(ranks):
            return results, False
    if ranks == sorted(ranks):
        return results, False
    return [result for _, result in sorted(zip(ranks, results, strict=True), key=itemgetter(0))], True


def _rank_by_id(ids: Sequence[str]) -> dict[str, int]:
    """Returns the index of each id, or -1 for an id that occurs more than once."""
    return {id: -1 if ids.count(id) > 1 else rank for rank, id in enumerate(ids) if id}
