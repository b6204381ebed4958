"""What can be seen around a fork: which call came first, who is quoted, what was left out.

Nothing here decides a cause; it answers the questions `causes` asks of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from branchline.core.call import Call
from branchline.core.message import Message, ToolCall
from branchline.tree.node import NO_NODE, Node
from branchline.tree.tree import Tree

_MIN_QUOTE_CHARS = 16
"""Characters a quotation must have; shorter texts turn up by chance."""
_MIN_TASK_CHARS = 8
"""Characters of a first user text to be looked for in tool arguments."""
_MAX_MESSAGES_SEARCHED = 4
"""New messages searched for quotations and tasks."""
MAX_SIBLINGS_COMPARED = 8
"""Siblings a branch is compared with, the latest ones: a thousand branches must not take a million looks."""


class ForkSignals:
    """Answers about one tree, computed once."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._first_call: dict[int, Call] = {}
        self._continued: set[int] = set()
        for call in tree.calls:
            for output in call.outputs:
                node: Node | None = tree.nodes[output]
                while node is not None and node.id not in self._first_call:
                    self._first_call[node.id] = call
                    node = node.parent
        # Children come after their parents, so one pass from the end sees every subtree.
        for entry in reversed(tree.nodes):
            if entry.parent is not None and (
                entry.id in self._continued
                or (entry.is_sampled and entry.children)
                # A template may show a reply otherwise than it was sampled; it goes on all the same.
                or (entry.source_id != NO_NODE and tree.nodes[entry.source_id].parent is entry.parent)
            ):
                self._continued.update((entry.id, entry.parent.id))

    def first_call(self, branch: Node) -> Call:
        """The first call whose prompt or output goes through a node."""
        return self._first_call[branch.id]

    def prompt_messages_below(self, branch: Node) -> list[Message]:
        """The context messages from a branch down to the end of its first prompt."""
        if branch.is_sampled:
            return []
        messages: list[Message] = []
        node: Node | None = self._tree.nodes[self.first_call(branch).prompt_node]
        while node is not None and node is not branch.parent:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def path_messages_below(self, beside: Node, branch: Node) -> list[Message]:
        """The messages from a sibling down the path, older than a branch, that has most in common with it."""
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_messages_below(branch)}
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

    def closest_sibling(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """The sibling whose path has most in common with a branch; the latest among equals."""
        if branch.source_id != NO_NODE and self._tree.nodes[branch.source_id].parent is branch.parent:
            return self._tree.nodes[branch.source_id]
        if len(siblings) == 1:
            return siblings[0]
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_messages_below(branch)}

        def likeness(sibling: Node) -> tuple[bool, int, int]:
            shared = sum(message.key in keys for message in self.path_messages_below(sibling, branch))
            same_agent = self.first_call(sibling).agent == call.agent
            return (same_agent, shared, sibling.id)

        return max(siblings, key=likeness)

    def spawning_node(self, branch: Node, *, strict: bool = False) -> Node | None:
        """The latest earlier tool call that hands over the branch's task; else the latest of its parent.

        A first user text that a call holds is a task. Any other text of the user (a part behind a reminder,
        a message behind a greeting) must be new to the caller, and the branch must not show that call: it
        would be the caller's own conversation. Strict: the first text must pass that too.
        """
        call = self.first_call(branch)
        parent = self._parent_agent(call)
        messages = self._prompt_messages(branch)
        first, tasks = _task_texts(messages)
        if parent is None and not tasks:
            return None
        shown = {message.key for message in messages}
        latest: Node | None = None
        for node in reversed(self._tool_call_nodes):
            if self._is_later(node, call) or (parent is not None and node.agent != parent):
                continue
            latest = latest or (node if parent is not None else None)
            held = [
                task for task in tasks if any(_contains_task(made, task) for made in node.message.tool_calls)
            ]
            if not held or branch in node.path():
                continue
            if not strict and first in held:
                return node
            if node.message.key not in shown and not _user_texts(node.path()).issuperset(held):
                return node
        return latest

    def _parent_agent(self, call: Call) -> str | None:
        """The agent that a header names; a name nobody has is how a client calls its first agent."""
        if not call.spawned_by:
            return None
        known = any(node.agent == call.spawned_by for node in self._tool_call_nodes)
        return call.spawned_by if known else self._tree.calls[0].agent

    def _prompt_messages(self, branch: Node) -> list[Message]:
        """What a branch's first call asks: all of its prompt where the branch is its answer."""
        if not branch.is_sampled:
            return self.prompt_messages_below(branch)
        return [node.message for node in self._tree.nodes[self.first_call(branch).prompt_node].path()]

    def _is_later(self, node: Node, call: Call) -> bool:
        return node.output is not None and not self._is_before(self._tree.calls[node.output.call_index], call)

    def _is_before(self, one: Call, other: Call) -> bool:
        """Where the order of a tree says nothing, everything may have been before everything else."""
        return one is not other and (one.index < other.index or not self._tree.is_chronological)

    @cached_property
    def _tool_call_nodes(self) -> list[Node]:
        return [node for node in self._tree.nodes if node.is_sampled and node.message.tool_calls]

    def quoted_output(self, branch: Node) -> Node | None:
        """An earlier output of the same agent that the branch's first new messages repeat word for word."""
        call = self.first_call(branch)
        texts = [
            message.content for message in self.prompt_messages_below(branch) if message.role != "assistant"
        ]
        texts = [text for text in texts[:_MAX_MESSAGES_SEARCHED] if len(text) >= _MIN_QUOTE_CHARS]
        if not texts:
            return None
        for node in reversed(self._tree.nodes):
            if node.agent != call.agent or self._is_later(node, call):
                continue
            said = node.message.content.strip()
            if (
                len(said) >= _MIN_QUOTE_CHARS
                and any(said in text for text in texts)
                and branch not in node.path()
            ):
                return node
        return None

    def is_side_call(self, branch: Node) -> bool:
        """Calls that nothing follows: without the tools of the main one, or about what was asked there."""
        call = self.first_call(branch)
        main = self._main_call(call.agent)
        if call is main or branch.id in self._continued:
            return False
        if main.requested_config_digest:
            return not call.requested_config_digest
        task = next((message.content for message in self._first_prompt if message.role == "user"), "").strip()
        return len(task) >= _MIN_TASK_CHARS and any(
            task in message.content and task != message.content.strip()
            for message in self.prompt_messages_below(branch)
        )

    def _main_call(self, agent: str) -> Call:
        """The first call; but a title may be asked for before the work begins, and then it is the next."""
        first = self._tree.calls[0]
        if first.requested_config_digest or any(
            self._tree.nodes[output].children for output in first.outputs
        ):
            return first
        return self._first_calls_with_tools.get(agent, first)

    @cached_property
    def _first_calls_with_tools(self) -> dict[str, Call]:
        """The first call with tools of each agent."""
        found: dict[str, Call] = {}
        for call in self._tree.calls:
            if call.requested_config_digest:
                found.setdefault(call.agent, call)
        return found

    @cached_property
    def _first_prompt(self) -> list[Message]:
        return [node.message for node in self._tree.nodes[self._tree.calls[0].prompt_node].path()]


def _task_texts(messages: Sequence[Message]) -> tuple[str, set[str]]:
    """The first user text; and the first texts of the user, whole and in parts, that can be looked for."""
    said = [message for message in messages if message.role == "user"][:_MAX_MESSAGES_SEARCHED]
    texts = {text for text in _message_texts(said) if len(text) >= _MIN_TASK_CHARS}
    return (said[0].content.strip() if said else ""), texts


def _message_texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content.strip()
        yield from (part.strip() for part in message.parts if isinstance(part, str))


def _user_texts(path: Sequence[Node]) -> set[str]:
    return set(_message_texts(node.message for node in path if node.message.role == "user"))


def _contains_task(made: ToolCall, task: str) -> bool:
    """Whether a tool call's arguments carry a task, however their JSON spells it."""
    # Both sides in one spelling: canonical arguments escape what this encoder escapes.
    return task in made.arguments or msgspec.json.encode(task)[1:-1] in made.canonical_arguments


def have_common_message(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Whether two runs of messages that differ at once have something in common further on."""
    later = {message.key for message in old}
    return any(message.key in later for message in new)


def classify_replacement(new: Message, old: Message) -> Literal["stub", "other"]:
    """Whether a message was emptied (the same role, much shorter) or rewritten."""
    if new.role != old.role or [call.name for call in new.tool_calls] != [
        call.name for call in old.tool_calls
    ]:
        return "other"
    before = len(old.content) + sum(len(call.arguments) for call in old.tool_calls)
    after = len(new.content) + sum(len(call.arguments) for call in new.tool_calls)
    if new.role == "user":
        return "other"
    return "stub" if after < before else "other"
