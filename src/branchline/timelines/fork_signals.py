"""Signals for classifying forks: the first call of a branch, spawning tool calls, quotations, common
messages.

Nothing here decides a cause; `causes` combines the signals. What all branches ask for is indexed once: the
nodes of a subtree by message, tool calls by the tasks they contain, outputs by their text. So a tree is
classified in about linear time, also if every call opens a branch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

import msgspec

from branchline.core.call import Call
from branchline.core.context_edits import is_deletion_stub
from branchline.core.message import Message
from branchline.timelines.text_index import TextIndex
from branchline.tree.tree import NO_NODE, Node, Tree

_MIN_QUOTE_CHARS = 16
"""Minimum length of a quotation; shorter texts occur by chance."""
_MIN_TASK_CHARS = 8
"""Minimum length of a user text that is searched for in tool arguments."""
_MAX_MESSAGES_SEARCHED = 4
"""New messages searched for quotations and tasks."""
MAX_SIBLINGS_COMPARED = 8
"""A branch is compared with its latest siblings only; comparing all would take quadratic time."""


_NodesByText = dict[tuple[str, str | None], list[Node]]


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
        self._tour = _Tour(tree)

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

    def shared_keys(self, sibling: Node, branch: Node) -> list[bytes]:
        """Returns the keys of the messages that the first prompt of a branch shares with a path through a
        sibling: with the path that is older than the branch and shares most, then the deepest one."""
        call = self.first_call(branch)
        keys = {message.key for message in self.prompt_messages_below(branch)}
        tour = self._tour
        best = 0.0
        ends: list[int] = []
        shared_at: dict[int, float] = {}
        above: dict[int, int] = {}
        open_positions: list[int] = []
        for position in tour.positions_below(sibling, keys):
            node = tour.nodes[position]
            if node is not sibling and not self._is_before(self._first_call[node.id], call):
                continue
            while open_positions and tour.leave[tour.nodes[open_positions[-1]].id] < position:
                open_positions.pop()
            above[position] = open_positions[-1] if open_positions else -1
            # Among equal paths, one that contains the first message of the branch wins.
            shared = shared_at.get(above[position], 0.0) + 1 + 0.5 * (node.message.key == branch.message.key)
            shared_at[position] = shared
            open_positions.append(position)
            if shared > best:
                best, ends = shared, [position]
            elif shared == best:
                ends.append(position)
        paths = [self._keys_above(end, above) for end in ends]
        if len(paths) > 1 and any(Counter(path) != Counter(paths[0]) for path in paths):
            depths = [self._deepest_before(tour.nodes[end], call) for end in ends]
            return paths[depths.index(max(depths))]
        return paths[0] if paths else []

    def _keys_above(self, position: int, above: dict[int, int]) -> list[bytes]:
        keys: list[bytes] = []
        while position >= 0:
            keys.append(self._tour.nodes[position].message.key)
            position = above[position]
        return keys[::-1]

    def _deepest_before(self, top: Node, call: Call) -> int:
        """Returns the depth of the deepest node below a node that is older than a call."""
        deepest, stack = top.depth, [top]
        while stack:
            node = stack.pop()
            deepest = max(deepest, node.depth)
            stack += [
                child for child in node.all_children() if self._is_before(self._first_call[child.id], call)
            ]
        return deepest

    def is_below(self, node: Node, ancestor: Node) -> bool:
        """Whether a node is another one or a descendant of it."""
        return self._tour.is_below(node, ancestor)

    def closest_sibling(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """Returns the sibling whose path shares most messages with a branch; the latest among equals."""
        if branch.source_id != NO_NODE and self._tree.nodes[branch.source_id].parent is branch.parent:
            return self._tree.nodes[branch.source_id]
        if len(siblings) == 1:
            return siblings[0]
        call = self.first_call(branch)

        def similarity(sibling: Node) -> tuple[bool, int, int]:
            same_agent = self.first_call(sibling).agent == call.agent
            return (same_agent, len(self.shared_keys(sibling, branch)), sibling.id)

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
        with_task, with_new_task = self._tasks
        found: list[Node] = []
        if not strict and first in tasks:
            found += islice(self._latest_first(with_task.get((first, parent), ()), call, branch), 1)
        shown: set[bytes] = set()
        for task in tasks:
            for node in self._latest_first(with_new_task.get((task, parent), ()), call, branch):
                shown = shown or {message.key for message in messages}
                if node.message.key not in shown:
                    found.append(node)
                    break
        if not found and parent is not None:
            found += islice(self._latest_first(self._tool_call_nodes.get(parent, ()), call), 1)
        return max(found, key=lambda node: node.id, default=None)

    def _latest_first(self, nodes: Sequence[Node], call: Call, branch: Node | None = None) -> Iterator[Node]:
        """Yields those of some outputs, which are in order, that are older than a call and not below a
        branch; the latest first."""
        end = len(nodes)
        if self._tree.is_chronological:
            end = bisect_left(nodes, call.index, key=lambda node: self._tree.call_of(node).index)
        for index in range(end - 1, -1, -1):
            node = nodes[index]
            if not self._is_later(node, call) and (branch is None or not self.is_below(node, branch)):
                yield node

    def _parent_agent(self, call: Call) -> str | None:
        """Returns the agent that a header names. An unknown name stands for the first agent."""
        if not call.spawned_by:
            return None
        known = call.spawned_by in self._tool_call_nodes
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
    def _tool_call_nodes(self) -> dict[str | None, list[Node]]:
        """The outputs with tool calls, by agent; those of all agents under None."""
        found: dict[str | None, list[Node]] = {}
        for node in self._tree.nodes:
            if node.is_sampled and node.message.tool_calls:
                for agent in (node.agent, None):
                    found.setdefault(agent, []).append(node)
        return found

    @cached_property
    def _tasks(self) -> tuple[_NodesByText, _NodesByText]:
        """The outputs whose tool calls contain the task of a branch, by task and agent: all of them, and
        those to whose conversation the task is new."""
        made = self._tool_call_nodes.get(None, [])
        tasks = {
            task for branch in self._branches() for task in _task_texts(self._prompt_messages(branch))[1]
        }
        if not tasks:
            return {}, {}
        task_of = {_to_bytes(task): task for task in tasks}
        # Canonical arguments use the escapes of this encoder.
        task_of_json = {msgspec.json.encode(task)[1:-1]: task for task in tasks}
        as_text, as_json = TextIndex(task_of, short=True), TextIndex(task_of_json, short=True)
        user_positions = self._user_positions(tasks)
        with_task: _NodesByText = {}
        with_new_task: _NodesByText = {}
        for node in made:
            passed: set[str] = set()
            for call in node.message.tool_calls:
                passed.update(task_of[text] for text in as_text.find(_to_bytes(call.arguments)))
                passed.update(task_of_json[text] for text in as_json.find(call.canonical_arguments))
            for task in passed:
                is_new = not self._tour.is_below_any(node, user_positions.get(task, []))
                for agent in (node.agent, None):
                    with_task.setdefault((task, agent), []).append(node)
                    if is_new:
                        with_new_task.setdefault((task, agent), []).append(node)
        return with_task, with_new_task

    def _branches(self) -> Iterator[Node]:
        """Yields the nodes with siblings that may begin another agent's conversation."""
        main_agent = self._tree.calls[0].agent
        for node in self._tree.nodes:
            children = node.all_children()
            for child in children if len(children) > 1 else ():
                if not child.is_sampled or child.agent != main_agent:
                    yield child

    def _user_positions(self, texts: set[str]) -> dict[str, list[int]]:
        """Returns where users say these texts, as positions on the tour. Positions below another one of the
        same text are left out."""
        positions: dict[str, list[int]] = {}
        for position, node in enumerate(self._tour.nodes):
            if node.message.role == "user":
                for text in texts.intersection(_message_texts([node.message])):
                    found = positions.setdefault(text, [])
                    if not found or not self._tour.is_below(node, self._tour.nodes[found[-1]]):
                        found.append(position)
        return positions

    def quoted_output(self, branch: Node) -> Node | None:
        """Returns an earlier output of the same agent that the first new messages of a branch contain."""
        call = self.first_call(branch)
        texts = [
            message.content for message in self.prompt_messages_below(branch) if message.role != "assistant"
        ]
        texts = [text for text in texts[:_MAX_MESSAGES_SEARCHED] if len(text) >= _MIN_QUOTE_CHARS]
        found: list[Node] = []
        for text in texts:
            for output in self._long_outputs.find(_to_bytes(text)):
                nodes = self._outputs_by_text.get((output, call.agent), ())
                found += islice(self._latest_first(nodes, call, branch), 1)
        return max(found, key=lambda node: node.id, default=None)

    def summary_output(self, branch: Node, summary: str) -> Node | None:
        """Returns the latest earlier output of the same agent whose text is this summary."""
        call = self.first_call(branch)
        nodes = self._outputs_by_text.get((_to_bytes(summary), call.agent), ())
        return next(self._latest_first(nodes, call), None)

    @cached_property
    def _outputs_by_text(self) -> dict[tuple[bytes, str | None], list[Node]]:
        found: dict[tuple[bytes, str | None], list[Node]] = {}
        for node in self._tree.nodes:
            if node.is_sampled:
                found.setdefault((_to_bytes(node.message.content.strip()), node.agent), []).append(node)
        return found

    @cached_property
    def _long_outputs(self) -> TextIndex:
        texts = {node.message.content.strip() for node in self._tree.nodes if node.is_sampled}
        return TextIndex(_to_bytes(text) for text in texts if len(text) >= _MIN_QUOTE_CHARS)

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


class _Tour:
    """The nodes of a tree in the order of a depth-first walk, latest children first. The descendants of a
    node follow it, up to the position `leave`."""

    def __init__(self, tree: Tree) -> None:
        self.nodes: list[Node] = []
        self._enter = [0] * len(tree.nodes)
        self._positions_by_key: dict[bytes, list[int]] = {}
        stack = [tree.root]
        while stack:
            node = stack.pop()
            position = self._enter[node.id] = len(self.nodes)
            self.nodes.append(node)
            if node.parent is not None:
                self._positions_by_key.setdefault(node.message.key, []).append(position)
            stack += node.all_children()
        self.leave = self._enter[:]
        for node in reversed(tree.nodes):  # children follow their parents
            if node.parent is not None:
                self.leave[node.parent.id] = max(self.leave[node.parent.id], self.leave[node.id])

    def is_below(self, node: Node, ancestor: Node) -> bool:
        """Whether a node is another one or a descendant of it."""
        return self._enter[ancestor.id] <= self._enter[node.id] <= self.leave[ancestor.id]

    def is_below_any(self, node: Node, positions: Sequence[int]) -> bool:
        """Whether a node is below one of the nodes at some positions, of which none is below another."""
        index = bisect_right(positions, self._enter[node.id])
        return index > 0 and self.is_below(node, self.nodes[positions[index - 1]])

    def positions_below(self, top: Node, keys: Iterable[bytes]) -> list[int]:
        """Returns the positions of the nodes from a node down whose messages have these keys, in order."""
        found: list[int] = []
        for key in keys:
            positions = self._positions_by_key.get(key, [])
            start = bisect_left(positions, self._enter[top.id])
            found += positions[start : bisect_right(positions, self.leave[top.id], start)]
        return sorted(found)


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


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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
