"""What can be seen around a fork: which call came first, who is quoted, what was left out.

Nothing here decides a cause; it answers the questions `causes` asks of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from branchline.core.call import Call
from branchline.core.message import Message, ToolCall
from branchline.tree.node import NOWHERE, Node
from branchline.tree.tree import Tree

_QUOTE = 16
"""Characters a quotation must have; shorter texts turn up by chance."""
_TASK = 8
"""Characters of a first user text to be looked for in tool arguments."""
_LOOKED_AT = 4
"""New messages searched for quotations."""
NEIGHBOURS = 8
"""Siblings a branch is compared with, the latest ones: a thousand branches must not take a million looks."""


class Evidence:
    """Answers about one tree, computed once."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._first_call: dict[int, Call] = {}
        self._goes_on: set[int] = set()
        for call in tree.calls:
            for output in call.outputs:
                node: Node | None = tree.nodes[output]
                while node is not None and node.id not in self._first_call:
                    self._first_call[node.id] = call
                    node = node.parent
        # Children come after their parents, so one pass from the end sees every subtree.
        for entry in reversed(tree.nodes):
            if entry.parent is not None and (
                entry.id in self._goes_on
                or (entry.is_sampled and entry.children)
                # A template may show a reply otherwise than it was sampled; it goes on all the same.
                or (entry.source != NOWHERE and tree.nodes[entry.source].parent is entry.parent)
            ):
                self._goes_on.update((entry.id, entry.parent.id))

    def first_call(self, branch: Node) -> Call:
        """The first call whose prompt or output goes through a node."""
        return self._first_call[branch.id]

    def prompt_below(self, branch: Node) -> list[Message]:
        """The context messages from a branch down to the end of its first prompt."""
        if branch.is_sampled:
            return []
        messages: list[Message] = []
        node: Node | None = self._tree.nodes[self.first_call(branch).prompt_node]
        while node is not None and node is not branch.parent:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def path_below(self, beside: Node, branch: Node) -> list[Message]:
        """The messages from a sibling down the path, older than a branch, that has most in common with it."""
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_below(branch)}
        best: tuple[float, int] = (-1, -1)
        last = beside
        stack = [(beside, 0.0)]
        while stack:
            node, shared = stack.pop()
            # Holding the very message the branch begins with decides between paths of equal likeness.
            shared += (node.message.key in keys) + 0.5 * (node.message.key == branch.message.key)
            if (shared, node.depth) > best:
                best, last = (shared, node.depth), node
            stack += [
                (child, shared)
                for child in node.all_children()
                if child is not branch and self._is_before(self._first_call[child.id], call)
            ]
        return [node.message for node in last.path()[beside.depth - 1 :]]

    def closest(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """The sibling whose path has most in common with a branch; the latest among equals."""
        if branch.source != NOWHERE and self._tree.nodes[branch.source].parent is branch.parent:
            return self._tree.nodes[branch.source]
        if len(siblings) == 1:
            return siblings[0]
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_below(branch)}

        def likeness(sibling: Node) -> tuple[bool, int, int]:
            shared = sum(message.key in keys for message in self.path_below(sibling, branch))
            same_agent = self.first_call(sibling).agent == call.agent
            return (same_agent, shared, sibling.id)

        return max(siblings, key=likeness)

    def spawn(self, branch: Node) -> Node | None:
        """The latest earlier tool call of the agent a header names, or the one that hands over the task."""
        call = self.first_call(branch)
        if call.spawned_by:
            named = [
                node
                for node in self._callers
                if node.agent == call.spawned_by and not self._is_later(node, call)
            ]
            return named[-1] if named else None
        task = next((message.text for message in self.prompt_below(branch) if message.role == "user"), "")
        if len(task.strip()) < _TASK:
            return None
        for node in reversed(self._callers):
            if self._is_later(node, call):
                continue
            if any(_holds(made, task) for made in node.message.calls) and branch not in node.path():
                return node
        return None

    def _is_later(self, node: Node, call: Call) -> bool:
        return node.output is not None and not self._is_before(self._tree.calls[node.output.call], call)

    def _is_before(self, one: Call, other: Call) -> bool:
        """Where the order of a tree says nothing, everything may have been before everything else."""
        return one is not other and (one.index < other.index or not self._tree.is_chronological)

    @cached_property
    def _callers(self) -> list[Node]:
        return [node for node in self._tree.nodes if node.is_sampled and node.message.calls]

    def quoted(self, branch: Node) -> Node | None:
        """An earlier output of the same agent that the branch's first new messages repeat word for word."""
        call = self.first_call(branch)
        texts = [message.text for message in self.prompt_below(branch) if message.role != "assistant"]
        texts = [text for text in texts[:_LOOKED_AT] if len(text) >= _QUOTE]
        if not texts:
            return None
        for node in reversed(self._tree.nodes):
            if node.agent != call.agent or self._is_later(node, call):
                continue
            said = node.message.text.strip()
            if len(said) >= _QUOTE and any(said in text for text in texts) and branch not in node.path():
                return node
        return None

    def is_side_call(self, branch: Node) -> bool:
        """Calls that nothing follows: without the tools of the first, or about what the user asked there."""
        call, first = self.first_call(branch), self._tree.calls[0]
        if call is first or branch.id in self._goes_on:
            return False
        if first.tools:
            return not call.tools
        task = next((message.text for message in self._first_prompt if message.role == "user"), "").strip()
        return len(task) >= _TASK and any(
            task in message.text and task != message.text.strip() for message in self.prompt_below(branch)
        )

    @cached_property
    def _first_prompt(self) -> list[Message]:
        return [node.message for node in self._tree.nodes[self._tree.calls[0].prompt_node].path()]


def _holds(made: ToolCall, task: str) -> bool:
    """Whether a tool call's arguments carry a task, however their JSON spells it."""
    task = task.strip()
    # Both sides in one spelling: canonical arguments escape what this encoder escapes.
    return task in made.arguments or msgspec.json.encode(task)[1:-1] in made.meaning


def shares_later(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Whether two runs of messages that differ at once have something in common further on."""
    later = {message.key for message in old}
    return any(message.key in later for message in new)


def replaced(new: Message, old: Message) -> Literal["stub", "other"]:
    """Whether a message was emptied (the same role, much shorter) or rewritten."""
    if new.role != old.role or [call.name for call in new.calls] != [call.name for call in old.calls]:
        return "other"
    before = len(old.text) + sum(len(call.arguments) for call in old.calls)
    after = len(new.text) + sum(len(call.arguments) for call in new.calls)
    if new.role == "user":
        return "other"
    return "stub" if after < before else "other"
