"""Finds the recorded path that a request continues.

All paths that fit are followed side by side, because equal answers may have been sampled more than once
and a greedy walk would fork: the longest wins; then the one whose ids the client echoes; then one known
to have reached the client; then the one that needed the fewest equivalences; then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from branchline.core.call import RAW_PROMPT_DIGEST, AppliedEquivalence, Delivery, Request
from branchline.core.echo import Equivalence, match_echo, order_tool_results
from branchline.core.message import Message, is_same_message
from branchline.core.token_arrays import Ids
from branchline.tree.node import NO_NODE, Node


@dataclass(frozen=True, slots=True)
class PathMatch:
    """Where a request continues, and what had to be tolerated to see it."""

    path: list[Node]
    messages: tuple[Message, ...]
    """The request's messages with tool results in the order their calls were sampled."""
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
    """Tool results of this request that take another place on this path."""

    def copy(self) -> _Candidate:
        return _Candidate(
            self.node,
            self.applied_equivalences[:],
            self.echoed_id_count,
            self.undelivered_count,
            self.pending_count,
            self.reordered,
        )

    def sort_key(self) -> tuple[int, ...]:
        return (
            -self.echoed_id_count,
            self.undelivered_count,
            self.pending_count,
            len(self.applied_equivalences),
            self.node.id,
        )


class PathMatcher:
    """Matches requests against one tree; the function says what became of a sampled node."""

    def __init__(self, root: Node, delivery_of: Callable[[Node], Delivery]) -> None:
        self._root = root
        self.restore_reasoning = True
        """A reply that comes back without its reasoning is that reply all the same."""
        self._delivery_of = delivery_of

    def find(self, request: Request, first_key: bytes) -> PathMatch:
        """The best path for a request; `first_key` is its first message's key joined with its frame."""
        messages = request.messages
        frontier = [_Candidate(self._root, [])]
        index = 0
        while True:
            if len(frontier) == 1 and frontier[0].reordered is None:
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
                group = children.get(shown.key if index else first_key, ())
                for place, child in enumerate(group, start=1):
                    # The last child may take the candidate itself: mostly there is just one.
                    stepped = candidate if place == len(group) else candidate.copy()
                    if self._match_child(stepped, child, index, shown, request):
                        following.append(stepped)
            if not following:
                break
            frontier = following
            index += 1
        best, ambiguous = frontier[0], False
        if len(frontier) > 1:
            frontier.sort(key=_Candidate.sort_key)
            best = frontier[0]
            ambiguous = best.echoed_id_count == frontier[1].echoed_id_count
        effective = messages
        if best.reordered:
            effective = tuple(best.reordered.get(index, message) for index, message in enumerate(messages))
        return PathMatch(best.node.path(), effective, tuple(best.applied_equivalences), ambiguous)

    def _match_exact(self, candidate: _Candidate, index: int, request: Request, first_key: bytes) -> int:
        """Moves a lone candidate down one path for as long as the request repeats it letter by letter.

        Mostly that is all the way. Nothing is noted: what lies before a fork cannot tell candidates apart.
        Parallel calls are left to `_step`, because their results may move.
        """
        messages, node = request.messages, candidate.node
        while index < len(messages):
            shown = messages[index]
            group = node.children.get(shown.key if index else first_key) if node.children else None
            if group is None or len(group) != 1:
                break
            child = group[0]
            if child.sampled_ids is not None or shown.role == "assistant":
                # Only an assistant's key leaves things out; everybody else's says it all.
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
        """Moves a candidate to a child if the shown message is that child; leaves it alone if not."""
        recorded = child.message
        if self._is_copy_of_own_reply(child, request):
            return False
        if child.sampled_ids is None:
            if not is_same_message(recorded, shown):
                return False
            candidate.node = child
            return True
        used = match_echo(recorded, shown)
        if used is None or (Equivalence.DROPPED_REASONING in used and not self.restore_reasoning):
            return False
        if child.output is not None:
            if child.agent != request.agent:
                return False
            delivery = self._delivery_of(child)
            candidate.undelivered_count += delivery in UNDELIVERED
            candidate.pending_count += delivery == Delivery.PENDING
        candidate.node = child
        if used:
            candidate.applied_equivalences += [AppliedEquivalence(index, equivalence) for equivalence in used]
        if recorded.id and recorded.id == shown.id:
            candidate.echoed_id_count += 1
        if recorded.tool_calls:
            known = {call.id for call in recorded.tool_calls if call.id}
            candidate.echoed_id_count += len(known & _tool_call_ids(shown, request.messages, index))
            moved = reorder_tool_results(recorded, shown, request.messages, index)
            if moved:
                candidate.reordered = {**(candidate.reordered or {}), **moved}
                if Equivalence.REORDERED_CALLS not in used:
                    candidate.applied_equivalences.append(
                        AppliedEquivalence(index, Equivalence.REORDERED_RESULTS)
                    )
        return True

    def _is_copy_of_own_reply(self, child: Node, request: Request) -> bool:
        """A reply shown to another agent where it was sampled, id by id: its own goes on from the reply."""
        if child.source_id == NO_NODE or child.parent is None:
            return False
        return any(
            sibling.id == child.source_id
            and sibling.agent == request.agent
            and np.array_equal(sibling.ids, child.ids)
            for sibling in (child.parent.children or {}).get(child.key, ())
        )


UNDELIVERED = (Delivery.LOST, Delivery.CANCELLED)


def longest_raw_path(root: Node, ids: Ids) -> list[Node]:
    """The nodes of bare prompts whose ids these ids begin with; of equal ones the oldest.

    Only bare prompts: a conversation's ids may be repeated by one, but its messages are not on offer.
    """
    best: list[Node] = []
    reached = 0
    under = [node for node in root.all_children() if node.prompt_config_digest == RAW_PROMPT_DIGEST]
    # Depth first, older siblings first: a later path wins only by being longer.
    waiting = under[::-1]
    while waiting:
        node = waiting.pop()
        if node.end > len(ids) or not np.array_equal(ids[node.end - len(node.ids) : node.end], node.ids):
            continue
        if node.end > reached:
            best, reached = node.path(), node.end
        waiting += node.all_children()[::-1]
    return best


def reorder_tool_results(
    recorded: Message, shown: Message, messages: Sequence[Message], index: int
) -> dict[int, Message] | None:
    """The tool results behind messages[index] that belong in another place, by the place they take."""
    results = _results_after(messages, index)
    ordered, moved = order_tool_results(recorded, shown, results)
    if not moved:
        return None
    return dict(enumerate(ordered, start=index + 1))


def _results_after(messages: Sequence[Message], index: int) -> Sequence[Message]:
    end = index + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return messages[index + 1 : end]


def _tool_call_ids(shown: Message, messages: Sequence[Message], index: int) -> set[str]:
    ids = {call.id for call in shown.tool_calls}
    ids.update(result.tool_call_id for result in _results_after(messages, index))
    return ids
