"""Signals for classifying forks: the first call of a branch, spawning tool calls, quotations, common
messages.

Nothing here decides a cause; `causes` combines the signals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from branchline.core.call import Call
from branchline.core.context_edits import is_deletion_stub
from branchline.core.message import Message, ToolCall
from branchline.tree.tree import NO_NODE, Node, Tree

_MIN_QUOTE_CHARS = 16
"""Minimum length of a quotation; shorter texts occur by chance."""
_MIN_TASK_CHARS = 8
"""Minimum length of a user text that is searched for in tool arguments."""
_MAX_MESSAGES_SEARCHED = 4
"""New messages searched for quotations and tasks."""
MAX_SIBLINGS_COMPARED = 8
"""A branch is compared with its latest siblings only; comparing all would take quadratic time."""


class ForkSignals:
    """The signals of one tree."""

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
        # Children follow their parents, so one reverse pass covers every subtree.
        for entry in reversed(tree.nodes):
            if entry.parent is not None and (
                entry.id in self._continued
                or (entry.is_sampled and entry.children)
                # A reply that the template renders differently than sampled is continued too.
                or (entry.source_id != NO_NODE and tree.nodes[entry.source_id].parent is entry.parent)
            ):
                self._continued.update((entry.id, entry.parent.id))

    def first_call(self, branch: Node) -> Call:
        """Returns the first call whose prompt or output contains a node."""
        return self._first_call[branch.id]

    def prompt_messages_below(self, branch: Node) -> list[Message]:
        """Returns the context messages from a branch to the end of its first prompt."""
        if branch.is_sampled:
            return []
        messages: list[Message] = []
        node: Node | None = self._tree.nodes[self.first_call(branch).prompt_node]
        while node is not None and node is not branch.parent:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def path_messages_below(self, sibling: Node, branch: Node) -> list[Message]:
        """Returns the messages of the path through a sibling that is older than the branch and shares most
        messages with it."""
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_messages_below(branch)}
        best: tuple[float, int] = (-1, -1)
        last = sibling
        stack = [(sibling, 0.0)]
        while stack:
            node, shared = stack.pop()
            # Among equal paths, one that contains the first message of the branch wins.
            shared += (node.message.key in keys) + 0.5 * (node.message.key == branch.message.key)
            if (shared, node.depth) > best:
                best, last = (shared, node.depth), node
            stack += [
                (child, shared)
                for child in node.all_children()
                if child is not branch and self._is_before(self._first_call[child.id], call)
            ]
        return [node.message for node in last.path()[sibling.depth - 1 :]]

    def closest_sibling(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """Returns the sibling whose path shares most messages with a branch; the latest among equals."""
        if branch.source_id != NO_NODE and self._tree.nodes[branch.source_id].parent is branch.parent:
            return self._tree.nodes[branch.source_id]
        if len(siblings) == 1:
            return siblings[0]
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_messages_below(branch)}

        def similarity(sibling: Node) -> tuple[bool, int, int]:
            shared = sum(message.key in keys for message in self.path_messages_below(sibling, branch))
            same_agent = self.first_call(sibling).agent == call.agent
            return (same_agent, shared, sibling.id)

        return max(siblings, key=similarity)

    def spawning_node(self, branch: Node, *, strict: bool = False) -> Node | None:
        """Returns the latest earlier output with a tool call that contains the branch's task; otherwise the
        latest tool call of the agent that spawned it, if a header names one.

        The first user text is a task if a call contains it. Any other user text (a part after a reminder, a
        message after a greeting) must also be new to the caller, and the branch must not show that call,
        because then it would be the caller's own conversation. With `strict`, this applies to the first text
        too.
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
            passed = [
                task for task in tasks if any(_contains_task(made, task) for made in node.message.tool_calls)
            ]
            if not passed or branch in node.path():
                continue
            if not strict and first in passed:
                return node
            if node.message.key not in shown and not _user_texts(node.path()).issuperset(passed):
                return node
        return latest

    def _parent_agent(self, call: Call) -> str | None:
        """Returns the agent that a header names. An unknown name stands for the first agent."""
        if not call.spawned_by:
            return None
        known = any(node.agent == call.spawned_by for node in self._tool_call_nodes)
        return call.spawned_by if known else self._tree.calls[0].agent

    def _prompt_messages(self, branch: Node) -> list[Message]:
        """Returns the new messages of a branch's first call, or its whole prompt if the branch is an
        output."""
        if not branch.is_sampled:
            return self.prompt_messages_below(branch)
        return [node.message for node in self._tree.nodes[self.first_call(branch).prompt_node].path()]

    def _is_later(self, node: Node, call: Call) -> bool:
        return node.output is not None and not self._is_before(self._tree.calls[node.output.call_index], call)

    def _is_before(self, one: Call, other: Call) -> bool:
        """Whether one call may precede another; in a tree without chronological order, any call may."""
        return one is not other and (one.index < other.index or not self._tree.is_chronological)

    @cached_property
    def _tool_call_nodes(self) -> list[Node]:
        return [node for node in self._tree.nodes if node.is_sampled and node.message.tool_calls]

    def quoted_output(self, branch: Node) -> Node | None:
        """Returns an earlier output of the same agent that the first new messages of a branch contain."""
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
            output = node.message.content.strip()
            if (
                len(output) >= _MIN_QUOTE_CHARS
                and any(output in text for text in texts)
                and branch not in node.path()
            ):
                return node
        return None

    def summary_output(self, branch: Node, summary: str) -> Node | None:
        """Returns the latest earlier output of the same agent whose text is this summary."""
        call = self.first_call(branch)
        for node in reversed(self._tree.nodes):
            is_earlier = node.is_sampled and node.agent == call.agent and not self._is_later(node, call)
            if is_earlier and node.message.content.strip() == summary:
                return node
        return None

    def is_side_call(self, branch: Node) -> bool:
        """Whether a branch is not continued and either lacks the main call's tools or quotes its task."""
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
        """Returns the first call, or the agent's first call with tools if the first is a side call (a
        title)."""
        first = self._tree.calls[0]
        if first.requested_config_digest or any(
            self._tree.nodes[output].children for output in first.outputs
        ):
            return first
        return self._first_calls_with_tools.get(agent, first)

    @cached_property
    def _first_calls_with_tools(self) -> dict[str, Call]:
        found: dict[str, Call] = {}
        for call in self._tree.calls:
            if call.requested_config_digest:
                found.setdefault(call.agent, call)
        return found

    @cached_property
    def _first_prompt(self) -> list[Message]:
        return [node.message for node in self._tree.nodes[self._tree.calls[0].prompt_node].path()]


def _task_texts(messages: Sequence[Message]) -> tuple[str, set[str]]:
    """Returns the first user text, and the texts and parts of the first user messages that are long
    enough."""
    from_user = [message for message in messages if message.role == "user"][:_MAX_MESSAGES_SEARCHED]
    texts = {text for text in _message_texts(from_user) if len(text) >= _MIN_TASK_CHARS}
    return (from_user[0].content.strip() if from_user else ""), texts


def _message_texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content.strip()
        yield from (part.strip() for part in message.parts if isinstance(part, str))


def _user_texts(path: Sequence[Node]) -> set[str]:
    return set(_message_texts(node.message for node in path if node.message.role == "user"))


def _contains_task(made: ToolCall, task: str) -> bool:
    """Whether a tool call's arguments contain a task, regardless of JSON escapes."""
    # Canonical arguments use the escapes of this encoder.
    return task in made.arguments or msgspec.json.encode(task)[1:-1] in made.canonical_arguments


def have_common_message(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Whether two sequences contain an equal message."""
    old_keys = {message.key for message in old}
    return any(message.key in old_keys for message in new)


def is_deletion(new: Message, old: Message) -> bool:
    """Whether a message is the stub of another, or another is its stub and it was restored."""
    return is_deletion_stub(new) != is_deletion_stub(old) and _has_same_tools(new, old)


def is_stub(new: Message, old: Message) -> bool:
    """Whether a message is a shortened version of another: same role and tools, less text; never a user's."""
    return new.role != "user" and _has_same_tools(new, old) and _payload_length(new) < _payload_length(old)


def _has_same_tools(new: Message, old: Message) -> bool:
    return new.role == old.role and [call.name for call in new.tool_calls] == [
        call.name for call in old.tool_calls
    ]


def _payload_length(message: Message) -> int:
    return len(message.content) + sum(len(call.arguments) for call in message.tool_calls)
