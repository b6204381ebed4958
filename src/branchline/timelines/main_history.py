"""Which timeline is the conversation of a session, or of one of its agents.

The main history is the timeline with the latest delivered answer among those that are reached from the main
call without crossing a fork or an edge to another agent's conversation. The main call is the first call that
is no side call and whose conversation has a delivered answer; if there is none, the first that is no side
call.
What follows that answer and was cancelled is a part of it. Answers, rewards of turns and exports ask here and
nowhere else.

A branch belongs to the conversation of the sibling that it is compared with, whichever of the two came first.
A compacted conversation belongs to the conversation whose summary it quotes, unless it shows answers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from branchline.core.call import Call
from branchline.tree.tree import NO_NODE, Node, Tree


class Conversations:
    """The conversations of a tree, by the forks and edges that do not leave them."""

    def __init__(
        self,
        tree: Tree,
        main_call: Call,
        *,
        branches: AbstractSet[int],
        links: Iterable[tuple[int, int]],
        undelivered: AbstractSet[int],
    ) -> None:
        """`branches` are the nodes that begin a branch beyond the first at a node; `links` connect those that
        stay in a conversation with the node that they belong to."""
        self._tree = tree
        self._main_call = main_call
        self._branches = branches
        self._undelivered = undelivered
        self._linked: dict[int, list[int]] = {}
        for one, other in links:
            self._linked.setdefault(one, []).append(other)
            self._linked.setdefault(other, []).append(one)

    def main_leaf(self) -> Node | None:
        """Returns the end of the main history: its last answer that reached its client, or a later one below
        it that did not."""
        reached = self._reached(self._main_call)
        return self._last([leaf for leaf in self._tree.leaves() if leaf.id in reached])

    def leaf_of(self, agent: str) -> Node | None:
        """Returns the end of an agent's conversation; of several conversations, that of the last one. None if
        no timeline ends with the agent."""
        if agent == self._main_call.agent:
            return self.main_leaf()
        return self._last([leaf for leaf in self._tree.leaves() if leaf.agent == agent], agent)

    def first_answered(self, calls: Iterable[Call]) -> Call | None:
        """Returns the first of some calls whose conversation has a delivered answer, or None."""
        seen: set[int] = set()
        for call in calls:
            if call.outputs[0] not in seen:
                found = self._reached(call)
                if any(self._tree.nodes[one].is_sampled and one not in self._undelivered for one in found):
                    return call
                seen |= found
        return None

    def _reached(self, start: Call) -> set[int]:
        """Returns the nodes of the conversation that a call belongs to."""
        path = self._tree.nodes[start.outputs[0] if start.outputs else start.prompt_node].path()
        found = {node.id for node in path}
        above = {node.id for node in path[:-1]} | {self._tree.root.id}
        open_nodes = [self._tree.root.id, *found]
        while open_nodes:
            node_id = open_nodes.pop()
            following = self._linked.get(node_id, [])
            if node_id not in above:
                children = self._tree.nodes[node_id].all_children()
                following = [*following, *(child.id for child in children if child.id not in self._branches)]
            for other in following:
                if other not in found:
                    found.add(other)
                    open_nodes.append(other)
        return found

    def _last(self, leaves: Sequence[Node], agent: str | None = None) -> Node | None:
        """Returns the leaf with the latest delivered answer at or above it, of an agent if one is given.

        Answers to one prompt are as late as the last of them, and of leaves with equally late answers the one
        that ends last wins: it goes on from the answer that the client took. The choices of one call end at
        the same time; clients use the first. Without any delivered answer it is the leaf that ends last.
        """
        answers = [self._last_delivered(leaf, agent) for leaf in leaves]
        times: dict[Node | None, int] = {}
        for answer in answers:
            if answer is not None:
                times[answer.parent] = max(times.get(answer.parent, 0), self._end(answer))

        def order(entry: tuple[Node, Node | None]) -> tuple[int, int, int]:
            leaf, answer = entry
            choice = 0 if leaf.output is None else leaf.output.choice_index
            return NO_NODE if answer is None else times[answer.parent], self._end(leaf), -choice

        return max(zip(leaves, answers, strict=True), key=order, default=(None, None))[0]

    def _last_delivered(self, leaf: Node, agent: str | None) -> Node | None:
        """Returns the last delivered answer at or above a leaf, wherever it was sampled; for a prompt without
        an answer, its end."""
        if leaf.id not in self._undelivered:
            return leaf
        for node in reversed(leaf.path()[:-1]):
            answer = self._tree.answer_at(node)
            if answer is not None and agent in (None, answer.agent):
                return answer
        return None

    def _end(self, node: Node) -> int:
        return node.id if node.output is None else self._tree.call_of(node).outputs[0]
