"""The branches of a tree: the first call through each, its new messages, and the conversation that it begins.

What all branches ask for is indexed once, so that a tree is classified in about linear time, also if every
call opens a branch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile

from branchline.core.call import DEFAULT_AGENT, Call
from branchline.core.message import Message
from branchline.timelines.text_index import TextIndex
from branchline.tree.tree import NO_NODE, Node, Tree

MIN_TASK_CHARS = 8
"""Minimum length of a user text that is searched for in tool arguments and other conversations."""
_MIN_EQUAL_CHARS = 200
_MIN_EQUAL_SHARE = 0.75
"""How much of two system prompts is equal if one is an update of the other."""


class Branches:
    """The branches of one tree."""

    def __init__(self, tree: Tree, main_call: Call | None = None) -> None:
        """Without a main call it is the first call that is no side call."""
        self._tree = tree
        self._given_main_call = main_call
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
        self._system_prompts: dict[int, list[Message] | None] = {}
        self._lacks_tools_below: dict[int, bool] = {}

    def first_call(self, branch: Node) -> Call:
        """Returns the first call whose prompt or output contains a node."""
        return self._first_call[branch.id]

    def agent_call(self, branch: Node) -> Call:
        """Returns the first call of the main agent that contains a node, or the first call of any agent if
        the main one has none: another agent may show the main conversation before that goes on itself."""
        return self._first_main_call.get(branch.id) or self._first_call[branch.id]

    @cached_property
    def _first_main_call(self) -> dict[int, Call]:
        """The first call of the main agent that contains a node, by node id."""
        found: dict[int, Call] = {}
        for call in self._tree.calls:
            if call.agent == self.main_call.agent and not call.spawned_by:
                for output in call.outputs:
                    node: Node | None = self._tree.nodes[output]
                    while node is not None and node.id not in found:
                        found[node.id] = call
                        node = node.parent
        return found

    def prompt_messages_below(self, branch: Node) -> list[Message]:
        """Returns the context messages from a branch to the end of its first prompt."""
        if branch.is_sampled:
            return []
        messages: list[Message] = []
        node: Node | None = self._tree.nodes[self.agent_call(branch).prompt_node]
        while node is not None and node is not branch.parent:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def shared_keys(self, sibling: Node, branch: Node) -> list[bytes]:
        """Returns the keys of the messages that the first prompt of a branch shares with a path through a
        sibling: with the path that is older than the branch and shares most, then the deepest one."""
        call = self.agent_call(branch)
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

    def _is_before(self, one: Call, other: Call) -> bool:
        """Whether one call may precede another; in a tree without chronological order, any call may."""
        return one is not other and (one.index < other.index or not self._tree.is_chronological)

    # -- where conversations begin ------------------------------------------------------------------------

    @cached_property
    def main_call(self) -> Call:
        """The call that was given as the main one, or the first call that is no side call; the first call if
        all are."""
        calls = self._tree.calls
        first = (call for call in calls if call.outputs and not self.begins_aside(call))
        return self._given_main_call or next(first, calls[0])

    def begins_aside(self, call: Call) -> bool:
        """Whether a call names the agent that spawned it, or is a side call of a conversation that begins
        later: of its agent, of an agent with tools or, if it has a name, of the agent without one."""
        if call.spawned_by:
            return True
        if call.requested_config_digest or self._is_continued(call):
            return False
        if call.agent in self._first_calls_with_tools or (call.agent and self._has_unnamed_agent):
            return True
        if self._is_aside_of_tools(call):
            return True
        tasks, index = self._first_tasks
        own = self._first_user_text(call)
        return any(
            (not own.startswith(text) and (text, call.agent) in tasks)
            or (call.agent and (text, DEFAULT_AGENT) in tasks)
            for message in self._call_messages(call)
            for text in map(_to_text, index.find(text_bytes(message.content)))
        )

    def _is_aside_of_tools(self, call: Call) -> bool:
        """Whether a call without tools is a side call of the first agent with tools, whatever its name: that
        one does not show the answer and, if the call has a name, gets the task that the call shows."""
        first = next(iter(self._first_calls_with_tools.values()), None)
        if first is None:
            return False
        messages = self._call_messages(call)
        shown = {message.key for message in messages}
        new = [message.content for message in self._call_messages(first) if message.key not in shown]
        answers = [self._tree.nodes[output].message.content.strip() for output in call.outputs]
        if any(answer and answer in text for answer in answers for text in new):
            return False
        task = self._first_user_text(first)
        return not call.agent or (bool(task) and any(task in message.content for message in messages))

    def _is_continued(self, call: Call) -> bool:
        nodes = self._tree.nodes
        return any(nodes[output].children or output in self._repeated for output in call.outputs)

    @cached_property
    def _has_unnamed_agent(self) -> bool:
        """Whether an agent without a name that nobody spawned uses tools or continues its answers."""
        return any(
            call.agent == DEFAULT_AGENT
            and not call.spawned_by
            and (call.requested_config_digest or self._is_continued(call))
            for call in self._tree.calls
        )

    @cached_property
    def _first_tasks(self) -> tuple[set[tuple[str, str]], TextIndex]:
        """The first user text of each conversation, with its agent."""
        calls = {self._first_call[child.id].index: None for child in self._tree.root.all_children()}
        found = [(self._first_user_text(self._tree.calls[index]), index) for index in calls]
        tasks = {
            (text, self._tree.calls[index].agent) for text, index in found if len(text) >= MIN_TASK_CHARS
        }
        return tasks, TextIndex((text_bytes(text) for text, _ in tasks), short=True)

    @cached_property
    def _repeated(self) -> set[int]:
        return {node.source_id for node in self._tree.nodes}

    @cached_property
    def _first_calls_with_tools(self) -> dict[str, Call]:
        found: dict[str, Call] = {}
        for call in self._tree.calls:
            if call.requested_config_digest and call.outputs and not call.spawned_by:
                found.setdefault(call.agent, call)
        return found

    def _call_messages(self, call: Call) -> list[Message]:
        return [node.message for node in self._tree.nodes[call.prompt_node].path()]

    def _first_user_text(self, call: Call) -> str:
        texts = (message.content for message in self._call_messages(call) if message.role == "user")
        return next(texts, "").strip()

    def has_other_system_prompt(self, branch: Node, sibling: Node) -> bool:
        """Whether a branch is a conversation under another system prompt than its sibling.

        One that continues the sibling's outputs is the same conversation if it goes on within a turn (an
        agent hands over to another), if most of the system prompt is unchanged (it shows the time), or if it
        omits instructions, which are for one call only.
        """
        new, old = self._system_prompt(branch), self._system_prompt(sibling)
        if new is None or old is None or [entry.key for entry in new] == [entry.key for entry in old]:
            return False
        shared = set(self.shared_keys(sibling, branch)) & self._sampled_keys
        messages = self.prompt_messages_below(branch)
        repeated = [index for index, message in enumerate(messages) if message.key in shared]
        if not repeated:
            return True
        following = messages[repeated[-1] + 1 :]
        is_in_turn = bool(messages[repeated[-1]].tool_calls) and all(one.role != "user" for one in following)
        omits_instructions = not new and self.agent_call(sibling).has_instructions
        return not (is_in_turn or omits_instructions or _is_mostly_equal(new, old))

    def have_one_system_prompt(self, one: Node, other: Node) -> bool:
        """Whether the conversations of two nodes have equal system prompts."""
        prompts = [self._system_prompt(self._top(node)) for node in (one, other)]
        keys = [[message.key for message in prompt or ()] for prompt in prompts]
        return keys[0] == keys[1]

    def _top(self, node: Node) -> Node:
        """Returns the first node of a path."""
        return self._tour.nodes[self._tour.tops[node.id]]

    def _system_prompt(self, branch: Node) -> list[Message] | None:
        """Returns the system messages that a conversation begins with; None if a branch is below them."""
        if branch.id not in self._system_prompts:
            above: list[Message] = []
            node = branch.parent
            while node is not None and node.parent is not None:
                above.append(node.message)
                node = node.parent if _is_system(node.message) else None
            below = list(takewhile(_is_system, self.prompt_messages_below(branch)))
            is_first = all(map(_is_system, above))
            self._system_prompts[branch.id] = [*above[::-1], *below] if is_first else None
        return self._system_prompts[branch.id]

    @cached_property
    def _sampled_keys(self) -> set[bytes]:
        return {node.message.key for node in self._tree.nodes if node.is_sampled}


class _Tour:
    """The nodes of a tree in the order of a depth-first walk, latest children first. The descendants of a
    node follow it, up to the position `leave`."""

    def __init__(self, tree: Tree) -> None:
        self.nodes: list[Node] = []
        self._enter = [0] * len(tree.nodes)
        self.tops = [0] * len(tree.nodes)
        """The position of the first node on the path to each node."""
        self._positions_by_key: dict[bytes, list[int]] = {}
        stack = [tree.root]
        while stack:
            node = stack.pop()
            position = self._enter[node.id] = len(self.nodes)
            self.nodes.append(node)
            is_below = node.parent is not None and node.parent.parent is not None
            self.tops[node.id] = self.tops[node.parent.id] if is_below and node.parent else position
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


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _is_mostly_equal(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Whether most of a long system prompt is the same at its beginning and its end."""
    one, other = ("\n".join([message.content for message in messages]) for messages in (new, old))
    start = _common_prefix(one, other)
    end = _common_prefix(one[start:][::-1], other[start:][::-1])
    return start + end >= max(_MIN_EQUAL_CHARS, _MIN_EQUAL_SHARE * max(len(one), len(other)))


def _common_prefix(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def text_bytes(text: str) -> bytes:
    """Returns the bytes in which texts are searched for; lone surrogates are kept."""
    return text.encode("utf-8", "surrogatepass")
