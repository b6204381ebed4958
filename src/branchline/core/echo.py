"""The echo matcher: does this inbound message mean what we sampled, and what did the client do to it?

`echo(sampled, shown)` is None for an edit, else the named equivalences that were needed (none: a perfect
echo). Nothing is accepted without a name, so what was tolerated can always be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from operator import itemgetter

from branchline.core.arguments import Notation
from branchline.core.message import Form, Message, ToolCall


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
    ARGUMENTS = "arguments_reserialised"
    """The same JSON with other spacing, key order, escapes or number spelling."""
    PYTHON_LITERALS = "python_literals"
    """Arguments that are no JSON but read as a Python literal (`False` for `false`)."""
    EMPTY_ARGUMENTS = "empty_arguments"
    """No arguments at all for `{}`."""
    DEFAULTS = "defaults_filled"
    """Arguments that a tool's schema has defaults for, written out or left out."""
    REORDERED_CALLS = "reordered_calls"
    """Parallel calls in another order; results go back to the sampled order."""
    REORDERED_RESULTS = "reordered_results"
    """Tool results in another order than their calls."""
    WHITESPACE = "trimmed_whitespace"
    """Whitespace around the text or the reasoning lost."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning not sent back."""
    NAMED = "named"
    """A `name` that was not sent, or one that was left out."""
    EMPTY_TOOLS = "empty_tools"
    """`tools: []` for no tools."""


# Plain numbers, because this runs for every message of every request and flags of an enum are slow.
_NO_CONTENT = int(Form.NULL_CONTENT | Form.NO_CONTENT)
_PART_LIST = int(Form.PART_LIST)
_NO_CALLS = int(Form.NULL_CALLS | Form.EMPTY_CALLS)


def echo(sampled: Message, shown: Message) -> tuple[Equivalence, ...] | None:
    """The equivalences under which `shown` is `sampled` sent back; None where it is something else.

    >>> echo(Message("assistant", "hi ", reasoning="hm"), Message("assistant", "hi"))
    (<Equivalence.WHITESPACE: 'trimmed_whitespace'>, <Equivalence.DROPPED_REASONING: 'dropped_reasoning'>)
    """
    if sampled.key != shown.key:
        return None
    used: list[Equivalence] = []
    if sampled.text != shown.text:
        used.append(Equivalence.WHITESPACE)
    if sampled.form != shown.form:
        used += _form_equivalences(sampled.form ^ shown.form)
    if sampled.reasoning != shown.reasoning:
        kept = shown.reasoning.strip()
        if sampled.reasoning.strip() == kept:
            if Equivalence.WHITESPACE not in used:
                used.append(Equivalence.WHITESPACE)
        elif not kept:
            used.append(Equivalence.DROPPED_REASONING)
        else:
            return None
    if sampled.name != shown.name:
        used.append(Equivalence.NAMED)
    if sampled.calls != shown.calls:
        used += _call_equivalences(sampled.calls, shown.calls)
    return tuple(used)


def _form_equivalences(changed: int) -> list[Equivalence]:
    used = []
    if changed & _NO_CONTENT:
        used.append(Equivalence.EMPTY_CONTENT)
    if changed & _PART_LIST:
        used.append(Equivalence.PART_LIST)
    if changed & _NO_CALLS:
        used.append(Equivalence.EMPTY_CALLS)
    return used


def call_order(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[int]:
    """For each sampled call, the place of its echo. Equal calls pair by id, else in turn.

    >>> call_order((ToolCall("a"), ToolCall("b")), (ToolCall("b"), ToolCall("a")))
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
                    and call.meaning == other.meaning
                    and (not by_id or (call.id and call.id == other.id))
                ):
                    order[index] = place
                    free.remove(place)
                    break
    return order


# By the notation that is further from JSON, of two texts that mean the same.
_REWRITTEN = {
    Notation.JSON: Equivalence.ARGUMENTS,
    Notation.EMPTY: Equivalence.EMPTY_ARGUMENTS,
    Notation.PYTHON: Equivalence.PYTHON_LITERALS,
}


def _call_equivalences(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[Equivalence]:
    order = call_order(sampled, shown)
    pairs = [(call, shown[place]) for call, place in zip(sampled, order, strict=True)]
    used: list[Equivalence] = []
    if order != sorted(order):
        used.append(Equivalence.REORDERED_CALLS)
    if any(call.id and call.id != other.id for call, other in pairs):
        used.append(Equivalence.RENAMED_IDS)
    for call, other in pairs:
        if call.arguments != other.arguments:
            rewritten = _REWRITTEN[Notation(max(call.notation, other.notation))]
            if rewritten not in used:
                used.append(rewritten)
    return used


def order_results(
    sampled: Message, shown: Message, results: Sequence[Message]
) -> tuple[Sequence[Message], bool]:
    """Tool results in the order of the sampled calls (templates pair by position), and whether they moved.

    Results are known by the id of the call they answer. One whose id is missing, unknown or not unique is
    taken to stand where its call stands among the shown calls; where that cannot be, nothing moves.
    """
    if len(sampled.calls) < 2 or len(results) < 2:
        return results, False
    order = call_order(sampled.calls, shown.calls)
    if -1 in order:
        return results, False
    # Ids as the client writes them count first; on results it may also have left the ids that were ours.
    rank_of_id = _rank_of_id([call.id for call in sampled.calls])
    rank_of_id |= _rank_of_id([shown.calls[place].id for place in order])
    ranks = [rank_of_id.get(result.answers, -1) for result in results]
    if -1 in ranks:
        rank_of_place = {place: rank for rank, place in enumerate(order)}
        ranks = [rank_of_place.get(place, -1) if rank < 0 else rank for place, rank in enumerate(ranks)]
        if -1 in ranks or len(set(ranks)) != len(ranks):
            return results, False
    if ranks == sorted(ranks):
        return results, False
    return [result for _, result in sorted(zip(ranks, results, strict=True), key=itemgetter(0))], True


def _rank_of_id(ids: Sequence[str]) -> dict[str, int]:
    """The place of each id, or -1 where it has several."""
    return {id: -1 if ids.count(id) > 1 else rank for rank, id in enumerate(ids) if id}
