"""Finds the recorded path that a request continues.

All matching paths are followed in parallel, because equal answers may have been sampled more than once and a
greedy walk would fork. The longest path wins; then the one whose ids the client echoes; then one that is
known to have reached the client; then the one that needs the fewest equivalences; then the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from branchline.core.call import RAW_PROMPT_DIGEST, AppliedEquivalence, Delivery, Request
from branchline.core.echo import Equivalence, match_echo, order_tool_results
from branchline.core.message import Message, is_same_message
from branchline.core.token_arrays import Ids
from branchline.tree.node import NO_NODE, Node


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
    """Matches requests against one tree; `delivery_of` returns the delivery of a sampled node.

    With `restore_reasoning`, an echo without its reasoning still matches the sampled message.
    """

    def __init__(
        self, root: Node, delivery_of: Callable[[Node], Delivery], *, restore_reasoning: bool
    ) -> None:
        self._root = root
        self._delivery_of = delivery_of
        self._restore_reasoning = restore_reasoning

    def find(self, request: Request, first_key: bytes) -> PathMatch:
        """Returns the best path for a request; `first_key` is the node key of its first message."""
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
        if self._is_copy_of_own_reply(child, request):
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
        """Whether a child is a context copy, with equal ids, of a sibling that this request's agent sampled.

        Such a copy was added for another agent; the agent that sampled the reply continues the original.
        """
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


def reorder_tool_results(
    recorded: Message, shown: Message, messages: Sequence[Message], index: int
) -> dict[int, Message] | None:
    """Returns the tool results after messages[index] by their new positions, or None if none moves."""
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
