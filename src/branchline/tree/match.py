"""Finds the recorded path that a request continues.

All paths that fit are followed side by side, because equal answers may have been sampled more than once
and a greedy walk would fork: the longest wins; then the one whose ids the client echoes; then one known
to have reached the client; then the one that needed the fewest equivalences; then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from branchline.core.call import RAW_FRAME, Delivery, Echo, Request
from branchline.core.echo import Equivalence, echo, order_results
from branchline.core.message import Message, same_meaning
from branchline.core.runs import Ids
from branchline.tree.node import NOWHERE, Node


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request continues, and what had to be tolerated to see it."""

    path: list[Node]
    messages: tuple[Message, ...]
    """The request's messages with tool results in the order their calls were sampled."""
    echoes: tuple[Echo, ...]
    ambiguous: bool


@dataclass(slots=True)
class _Candidate:
    node: Node
    echoes: list[Echo]
    echoed_ids: int = 0
    undelivered: int = 0
    pending: int = 0
    reordered: dict[int, Message] | None = None
    """Tool results of this request that take another place on this path."""

    def fork(self) -> _Candidate:
        return _Candidate(
            self.node, self.echoes[:], self.echoed_ids, self.undelivered, self.pending, self.reordered
        )

    def rank(self) -> tuple[int, ...]:
        return (-self.echoed_ids, self.undelivered, self.pending, len(self.echoes), self.node.id)


class Matcher:
    """Matches requests against one tree; the function says what became of a sampled node."""

    def __init__(self, root: Node, delivery_of: Callable[[Node], Delivery]) -> None:
        self._root = root
        self.restore_reasoning = True
        """A reply that comes back without its reasoning is that reply all the same."""
        self._delivery_of = delivery_of

    def find(self, request: Request, first_key: bytes) -> Match:
        """The best path for a request; `first_key` is its first message's key joined with its frame."""
        messages = request.messages
        frontier = [_Candidate(self._root, [])]
        index = 0
        while True:
            if len(frontier) == 1 and frontier[0].reordered is None:
                index = self._go_straight(frontier[0], index, request, first_key)
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
                    stepped = candidate if place == len(group) else candidate.fork()
                    if self._step(stepped, child, index, shown, request):
                        following.append(stepped)
            if not following:
                break
            frontier = following
            index += 1
        best, ambiguous = frontier[0], False
        if len(frontier) > 1:
            frontier.sort(key=_Candidate.rank)
            best = frontier[0]
            ambiguous = best.echoed_ids == frontier[1].echoed_ids
        effective = messages
        if best.reordered:
            effective = tuple(best.reordered.get(index, message) for index, message in enumerate(messages))
        return Match(best.node.path(), effective, tuple(best.echoes), ambiguous)

    def _go_straight(self, candidate: _Candidate, index: int, request: Request, first_key: bytes) -> int:
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
                    recorded.text != shown.text
                    or recorded.calls != shown.calls
                    or recorded.reasoning != shown.reasoning
                    or recorded.form != shown.form
                    or recorded.name != shown.name
                    or len(recorded.calls) > 1
                    or (child.output is not None and child.agent != request.agent)
                ):
                    break
            node = child
            index += 1
        candidate.node = node
        return index

    def _step(self, candidate: _Candidate, child: Node, index: int, shown: Message, request: Request) -> bool:
        """Moves a candidate to a child if the shown message is that child; leaves it alone if not."""
        recorded = child.message
        if self._is_copy_of_own(child, request):
            return False
        if child.sampled_ids is None:
            if not same_meaning(recorded, shown):
                return False
            candidate.node = child
            return True
        used = echo(recorded, shown)
        if used is None or (Equivalence.DROPPED_REASONING in used and not self.restore_reasoning):
            return False
        if child.output is not None:
            if child.agent != request.agent:
                return False
            delivery = self._delivery_of(child)
            candidate.undelivered += delivery in UNSEEN
            candidate.pending += delivery == Delivery.PENDING
        candidate.node = child
        if used:
            candidate.echoes += [Echo(index, equivalence) for equivalence in used]
        if recorded.id and recorded.id == shown.id:
            candidate.echoed_ids += 1
        if recorded.calls:
            known = {call.id for call in recorded.calls if call.id}
            candidate.echoed_ids += len(known & _wire_ids(shown, request.messages, index))
            moved = reorder(recorded, shown, request.messages, index)
            if moved:
                candidate.reordered = {**(candidate.reordered or {}), **moved}
                if Equivalence.REORDERED_CALLS not in used:
                    candidate.echoes.append(Echo(index, Equivalence.REORDERED_RESULTS))
        return True

    def _is_copy_of_own(self, child: Node, request: Request) -> bool:
        """A reply shown to another agent where it was sampled, id by id: its own goes on from the reply."""
        if child.source == NOWHERE or child.parent is None:
            return False
        return any(
            sibling.id == child.source
            and sibling.agent == request.agent
            and np.array_equal(sibling.ids, child.ids)
            for sibling in (child.parent.children or {}).get(child.key, ())
        )


UNSEEN = (Delivery.LOST, Delivery.CANCELLED)


def longest_path(root: Node, ids: Ids) -> list[Node]:
    """The nodes of bare prompts whose ids these ids begin with; of equal ones the oldest.

    Only bare prompts: a conversation's ids may be repeated by one, but its messages are not on offer.
    """
    best: list[Node] = []
    reached = 0
    under = [node for node in root.all_children() if node.frame == RAW_FRAME]
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


def reorder(
    recorded: Message, shown: Message, messages: Sequence[Message], index: int
) -> dict[int, Message] | None:
    """The tool results behind messages[index] that belong in another place, by the place they take."""
    results = _results_behind(messages, index)
    ordered, moved = order_results(recorded, shown, results)
    if not moved:
        return None
    return dict(enumerate(ordered, start=index + 1))


def _results_behind(messages: Sequence[Message], index: int) -> Sequence[Message]:
    end = index + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return messages[index + 1 : end]


def _wire_ids(shown: Message, messages: Sequence[Message], index: int) -> set[str]:
    ids = {call.id for call in shown.calls}
    ids.update(result.answers for result in _results_behind(messages, index))
    return ids
