"""Finds the recorded path that a request continues.

An inbound assistant message that means what was sampled is an echo of it. `match_echo(sampled, shown)`
returns None for an edit, else the equivalences that were needed (an empty tuple for an identical message).
Every tolerated difference has a name, so it can be recorded and counted.

All matching paths are followed in parallel, because equal answers may have been sampled more than once and a
greedy walk would fork. The longest path wins; then the one whose ids the client echoes; then one that is
known to have reached the client; then the one that needs the fewest equivalences; then the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from branchline.core.call import RAW_PROMPT_DIGEST, AppliedEquivalence, Delivery, Equivalence, Request
from branchline.core.message import Message, Notation, ToolCall, WireShape, is_same_message
from branchline.core.token_arrays import Ids
from branchline.tree.tree import NO_NODE, Node, Tree, first_message_key

UNDELIVERED = (Delivery.LOST, Delivery.CANCELLED)

# -- messages --------------------------------------------------------------------------------------------


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


def reorder_tool_results(
    sampled: Message, shown: Message, messages: Sequence[Message], index: int
) -> dict[int, Message]:
    """Returns the tool results after messages[index] by their new positions; empty if none moves."""
    ordered, moved = order_tool_results(sampled, shown, _results_after(messages, index))
    return dict(enumerate(ordered, start=index + 1)) if moved else {}


def _results_after(messages: Sequence[Message], index: int) -> Sequence[Message]:
    end = index + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return messages[index + 1 : end]


# -- paths -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PathMatch:
    """The path that a request continues, and the equivalences that were applied to match it."""

    path: list[Node]
    messages: tuple[Message, ...]
    """The request's messages, with tool results in the order in which their calls were sampled."""
    applied_equivalences: tuple[AppliedEquivalence, ...]
    ambiguous: bool


@dataclass(slots=True)
class _Candidate:
    node: Node
    applied_equivalences: list[AppliedEquivalence]
    echoed_id_count: int = 0
    undelivered_count: int = 0
    pending_count: int = 0
    reordered: dict[int, Message] | None = None
    """Tool results that take another position on this path, by that position."""

    def copy(self) -> _Candidate:
        return replace(self, applied_equivalences=self.applied_equivalences[:])

    def sort_key(self) -> tuple[int, ...]:
        return (
            -self.echoed_id_count,
            self.undelivered_count,
            self.pending_count,
            len(self.applied_equivalences),
            self.node.id,
        )


class PathMatcher:
    """Matches requests against one tree.

    With `restore_reasoning`, an echo without its reasoning still matches the sampled message.
    """

    def __init__(self, tree: Tree, *, restore_reasoning: bool) -> None:
        self._tree = tree
        self._restore_reasoning = restore_reasoning

    def find(self, request: Request, *, ignore_tools: bool = False) -> PathMatch:
        """Returns the best path for a request; with `ignore_tools`, also one with other tools or template
        arguments."""
        messages = request.messages
        first_key = first_message_key(request.prompt_config_digest, messages[0].key)
        frontier = [_Candidate(self._tree.root, [])]
        index = 0
        while True:
            if len(frontier) == 1 and frontier[0].reordered is None and not (ignore_tools and index == 0):
                index = self._match_exact(frontier[0], index, request, first_key)
            if index == len(messages):
                break
            message = messages[index]
            following: list[_Candidate] = []
            for candidate in frontier:
                children = candidate.node.children
                if children is None:
                    continue
                shown = message
                if candidate.reordered is not None:
                    shown = candidate.reordered.get(index, message)
                group: Sequence[Node] = children.get(shown.key if index else first_key, ())
                if ignore_tools and index == 0:
                    group = [child for child in candidate.node.all_children() if _has_key(child, shown.key)]
                for count, child in enumerate(group, start=1):
                    # The last child, usually the only one, reuses the candidate.
                    advanced = candidate if count == len(group) else candidate.copy()
                    if self._match_child(advanced, child, index, shown, request):
                        following.append(advanced)
            if not following:
                break
            frontier = following
            index += 1
        best, ambiguous = frontier[0], False
        if len(frontier) > 1:
            frontier.sort(key=_Candidate.sort_key)
            best = frontier[0]
            ambiguous = best.echoed_id_count == frontier[1].echoed_id_count
        if best.reordered:
            messages = tuple(best.reordered.get(index, message) for index, message in enumerate(messages))
        return PathMatch(best.node.path(), messages, tuple(best.applied_equivalences), ambiguous)

    def _match_exact(self, candidate: _Candidate, index: int, request: Request, first_key: bytes) -> int:
        """Advances a single candidate while the request repeats its path exactly; returns the next index.

        A fast path that usually covers the whole request. Nothing is counted, because nodes before a fork do
        not distinguish candidates. Parallel calls are left to `_match_child`, because their results may
        move.
        """
        messages, node = request.messages, candidate.node
        while index < len(messages):
            shown = messages[index]
            group = node.children.get(shown.key if index else first_key) if node.children else None
            if group is None or len(group) != 1:
                break
            child = group[0]
            if child.sampled_ids is not None or shown.role == "assistant":
                # Only an assistant's key omits fields; for other roles equal keys are equal messages.
                recorded = child.message
                if (
                    recorded.content != shown.content
                    or recorded.tool_calls != shown.tool_calls
                    or recorded.reasoning_content != shown.reasoning_content
                    or recorded.wire_shape != shown.wire_shape
                    or recorded.name != shown.name
                    or len(recorded.tool_calls) > 1
                    or (child.output is not None and child.agent != request.agent)
                ):
                    break
            node = child
            index += 1
        candidate.node = node
        return index

    def _match_child(
        self, candidate: _Candidate, child: Node, index: int, shown: Message, request: Request
    ) -> bool:
        """Moves a candidate to a child if the shown message matches it; otherwise leaves it unchanged."""
        recorded = child.message
        if child.source_id != NO_NODE and _is_copy_of_own_reply(child, request.agent):
            return False
        if child.sampled_ids is None:
            if not is_same_message(recorded, shown):
                return False
            candidate.node = child
            return True
        used = match_echo(recorded, shown)
        if used is None or (Equivalence.DROPPED_REASONING in used and not self._restore_reasoning):
            return False
        if child.output is not None:
            if child.agent != request.agent:
                return False
            delivery = self._tree.deliveries.get(child.output.call_index, Delivery.PENDING)
            candidate.undelivered_count += delivery in UNDELIVERED
            candidate.pending_count += delivery == Delivery.PENDING
        candidate.node = child
        if used:
            candidate.applied_equivalences += [AppliedEquivalence(index, equivalence) for equivalence in used]
        if recorded.id and recorded.id == shown.id:
            candidate.echoed_id_count += 1
        if recorded.tool_calls:
            shown_ids = {call.id for call in shown.tool_calls}
            shown_ids.update(result.tool_call_id for result in _results_after(request.messages, index))
            candidate.echoed_id_count += len({call.id for call in recorded.tool_calls if call.id} & shown_ids)
        if len(recorded.tool_calls) > 1:
            moved = reorder_tool_results(recorded, shown, request.messages, index)
            if moved:
                candidate.reordered = {**(candidate.reordered or {}), **moved}
                if Equivalence.REORDERED_CALLS not in used:
                    candidate.applied_equivalences.append(
                        AppliedEquivalence(index, Equivalence.REORDERED_RESULTS)
                    )
        return True

    def find_sampled_elsewhere(self, message: Message, agent: str) -> Node | None:
        """Returns the node anywhere in the tree that a message repeats, or None."""
        best: tuple[int, ...] | None = None
        found: Node | None = None
        for node in self._tree.sampled_by_key.get(message.key, ()):
            used = match_echo(node.message, message)
            if used is None or (
                Equivalence.DROPPED_REASONING in used and (node.agent != agent or not self._restore_reasoning)
            ):
                continue
            echoed_ids = {call.id for call in node.message.tool_calls if call.id} & {
                call.id for call in message.tool_calls
            }
            rank = (
                -len(echoed_ids),
                node.agent != agent,
                self._tree.delivery(self._tree.call_of(node)) in UNDELIVERED,
                len(used),
                node.id,
            )
            if best is None or rank < best:
                best, found = rank, node
        return found


def _has_key(first: Node, key: bytes) -> bool:
    """Whether the first node of a conversation has this message, whatever its tools are."""
    return first.message.key == key and first.prompt_config_digest != RAW_PROMPT_DIGEST


def _is_copy_of_own_reply(child: Node, agent: str) -> bool:
    """Whether a child is a context copy, with equal ids, of a sibling that this agent sampled.

    Such a copy was added for another agent; the agent that sampled the reply continues the original.
    """
    siblings = (child.parent.children if child.parent is not None else None) or {}
    return any(
        sibling.id == child.source_id and sibling.agent == agent and np.array_equal(sibling.ids, child.ids)
        for sibling in siblings.get(child.key, ())
    )


def longest_raw_path(root: Node, ids: Ids) -> list[Node]:
    """Returns the longest path of raw-prompt nodes that `ids` starts with; of equal paths, the oldest.

    Conversations are not considered, even if a raw prompt repeats their ids.
    """
    best: list[Node] = []
    length = 0
    # Depth first, older siblings first: a later path wins only by being longer.
    stack = [node for node in root.all_children() if node.prompt_config_digest == RAW_PROMPT_DIGEST][::-1]
    while stack:
        node = stack.pop()
        if node.end > len(ids) or not np.array_equal(ids[node.start : node.end], node.ids):
            continue
        if node.end > length:
            best, length = node.path(), node.end
        stack += node.all_children()[::-1]
    return best
