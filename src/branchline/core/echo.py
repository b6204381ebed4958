"""The echo matcher: does this inbound message mean what we sampled, and what did the client do to it?

`echo(sampled, shown)` is None for an edit, else the named equivalences that were needed (none: a perfect
echo). Nothing is accepted without a name, so what was tolerated can always be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

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
    REORDERED_CALLS = "reordered_calls"
    """Parallel calls in another order; results go back to the sampled order."""
    REORDERED_RESULTS = "reordered_results"
    """Tool results in another order than their calls."""
    WHITESPACE = "trimmed_whitespace"
    """Whitespace around the text or the reasoning lost."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning not sent back."""
    EMPTY_TOOLS = "empty_tools"
    """`tools: []` for no tools."""


_NO_CONTENT = Form.NULL_CONTENT | Form.NO_CONTENT
_NO_CALLS = Form.NULL_CALLS | Form.EMPTY_CALLS


def echo(sampled: Message, shown: Message) -> tuple[Equivalence, ...] | None:
    """The equivalences under which `shown` is `sampled` sent back; None where it is something else.

    >>> echo(Message("assistant", "hi ", reasoning="hm"), Message("assistant", "hi"))
    (<Equivalence.WHITESPACE: 'trimmed_whitespace'>, <Equivalence.DROPPED_REASONING: 'dropped_reasoning'>)
    """
    if sampled.key != shown.key:
        return None
    if (
        sampled.text == shown.text
        and sampled.reasoning == shown.reasoning
        and sampled.form == shown.form
        and not sampled.calls
    ):
        return ()
    used: list[Equivalence] = []
    if sampled.text != shown.text:
        used.append(Equivalence.WHITESPACE)
    used += _forms(sampled, shown)
    if sampled.reasoning != shown.reasoning:
        if not shown.reasoning:
            used.append(Equivalence.DROPPED_REASONING)
        elif sampled.reasoning.strip() == shown.reasoning.strip():
            if Equivalence.WHITESPACE not in used:
                used.append(Equivalence.WHITESPACE)
        else:
            return None
    if sampled.calls:
        used += _call_equivalences(sampled.calls, shown.calls)
    return tuple(used)


def _forms(sampled: Message, shown: Message) -> list[Equivalence]:
    used = []
    changed = sampled.form ^ shown.form
    if changed & _NO_CONTENT and not sampled.text:
        used.append(Equivalence.EMPTY_CONTENT)
    if changed & Form.PART_LIST:
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


def _call_equivalences(sampled: Sequence[ToolCall], shown: Sequence[ToolCall]) -> list[Equivalence]:
    used: list[Equivalence] = []

    def note(equivalence: Equivalence) -> None:
        if equivalence not in used:
            used.append(equivalence)

    order = call_order(sampled, shown)
    if order != sorted(order):
        note(Equivalence.REORDERED_CALLS)
    for call, place in zip(sampled, order, strict=True):
        other = shown[place]
        if call.id and call.id != other.id:
            note(Equivalence.RENAMED_IDS)
        if call.arguments != other.arguments:
            notations = {call.notation, other.notation}
            if Notation.PYTHON in notations:
                note(Equivalence.PYTHON_LITERALS)
            elif Notation.EMPTY in notations:
                note(Equivalence.EMPTY_ARGUMENTS)
            else:
                note(Equivalence.ARGUMENTS)
    return used


def order_results(
    sampled: Message, shown: Message, results: Sequence[Message]
) -> tuple[Sequence[Message], bool]:
    """Tool results in the order of the sampled calls (templates pair by position), and whether they moved.

    Results are known by the id of the call they answer. Where ids are missing, unknown or repeated the
    order they came in is all there is, unless the calls themselves were reordered along with them.
    """
    if len(sampled.calls) < 2 or len(results) < 2:
        return results, False
    order = call_order(sampled.calls, shown.calls)
    rank_of_id: dict[str, int] = {}
    for rank, place in enumerate(order):
        rank_of_id.setdefault(shown.calls[place].id, rank)
    if "" not in rank_of_id and len(rank_of_id) == len(order):
        ranks = [rank_of_id.get(result.answers, -1) for result in results]
    else:
        rank_of_place = {place: rank for rank, place in enumerate(order)}
        ranks = [rank_of_place.get(place, -1) for place in range(len(results))]
    if -1 in ranks or len(set(ranks)) != len(ranks):
        return results, False
    ordered = [result for _, result in sorted(zip(ranks, results, strict=True), key=lambda pair: pair[0])]
    return ordered, ranks != sorted(ranks)
