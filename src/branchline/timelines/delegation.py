"""Which tool call a conversation was delegated by: its arguments contain the task, or a header says who.

Conversations may begin with the same nodes: sub-agents with the system prompt of their caller, or with its
question. Such a node belongs to the first conversation through it that was not delegated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

import msgspec

from branchline.core.call import Call
from branchline.core.message import Message
from branchline.timelines.branches import MIN_TASK_CHARS, Branches, text_bytes
from branchline.timelines.text_index import TextIndex
from branchline.tree.tree import NO_NODE, Node, Tree

MAX_MESSAGES_SEARCHED = 4
"""New messages searched for quotations and tasks."""

_NodesByText = dict[tuple[str, str | None], list[Node]]


class Delegation(Branches):
    """The tool calls of one tree, by the tasks that they contain."""

    def __init__(self, tree: Tree, main_call: Call | None = None) -> None:
        super().__init__(tree, main_call)
        self._agent_calls: dict[int, Call] = {}
        self._has_answer_above: list[bool] = []
        for node in tree.nodes:  # children follow their parents
            parent = node.parent
            self._has_answer_above.append(
                parent is not None and (is_answer(parent) or self._has_answer_above[parent.id])
            )

    def agent_call(self, branch: Node) -> Call:
        """Returns the first call of the conversation that a node belongs to: of the main agent, if any of its
        calls contains the node; where several conversations begin, of the first that was not delegated."""
        if branch.id not in self._agent_calls:
            call = super().agent_call(branch)
            if not branch.is_sampled and self._is_delegated(branch, call):
                call = self._own_call(branch, call)
            self._agent_calls[branch.id] = call
        return self._agent_calls[branch.id]

    def _own_call(self, branch: Node, delegated: Call) -> Call:
        """Returns the first call of the conversations that leave the prompt of a delegated call below a
        branch and that were not delegated themselves; the delegated call if there is none."""
        above = self._prompt_nodes(branch, delegated)
        taken = {*delegated.outputs, *(node.id for node in above)}
        leaving = [child for node in above for child in node.all_children() if child.id not in taken]
        calls = ((child, self.agent_call(child)) for child in leaving)
        own = [
            call
            for child, call in calls
            if call.agent == delegated.agent and not self._is_delegated(child, call)
        ]
        return min(own, key=lambda call: call.index, default=delegated)

    def is_delegated(self, branch: Node) -> bool:
        """Whether a branch begins a conversation whose task an earlier tool call contains."""
        return self._is_delegated(branch, self.agent_call(branch))

    def _is_delegated(self, branch: Node, call: Call) -> bool:
        if self._has_answer_above[branch.id]:
            return False
        nodes = self._tree.nodes[call.prompt_node].path()
        return bool(self._nodes_with_task(nodes, call, branch))

    def spawning_node(self, branch: Node, *, strict: bool = False) -> Node | None:
        """Returns the latest earlier output with a tool call that contains the branch's task; otherwise the
        latest tool call of the agent that spawned it, if a header names one.

        The first user text is a task if a call contains it. Any other user text (a part after a reminder, a
        message after a greeting) must also be new to the caller; with `strict`, the first text too. A branch
        that shows a call that contains the text is the caller's own conversation, and so is what was asked
        before an answer of the caller that the branch repeats.
        """
        call = self.agent_call(branch)
        found = self._nodes_with_task(self._prompt_nodes(branch, call), call, branch, strict=strict)
        parent = self._parent_agent(call)
        if not found and parent is not None:
            found += islice(self._latest_first(self._tool_call_nodes.get(parent, ()), call), 1)
        return max(found, key=lambda node: node.id, default=None)

    def _nodes_with_task(
        self, nodes: Sequence[Node], call: Call, branch: Node, *, strict: bool = False
    ) -> list[Node]:
        """Returns the latest outputs with a tool call that contains a task that these nodes of a prompt
        show."""
        parent = self._parent_agent(call)
        with_task, with_new_task, callers = self._tasks
        if not with_task:
            return []
        first, tasks = self._tasks_of(nodes, callers)
        repeated = [index for index, node in enumerate(nodes) if node.source_id != NO_NODE]
        if tasks and repeated and not self._repeats_sub_agent(nodes[repeated[0]]):
            first, tasks = "", self._tasks_of(nodes[repeated[-1] + 1 :], callers)[1]
        found: list[Node] = []
        if not strict and first in tasks:
            found += islice(self._latest_first(with_task.get((first, parent), ()), call, branch), 1)
        for task in tasks:
            found += islice(self._latest_first(with_new_task.get((task, parent), ()), call, branch), 1)
        return found

    def _tasks_of(self, nodes: Sequence[Node], callers: dict[str, set[bytes]]) -> tuple[str, set[str]]:
        """Returns the first user text of some nodes, and those of their user texts that are tasks of calls
        which they do not show."""
        first, texts = _task_texts([node.message for node in nodes])
        shown = {node.message.key for node in nodes if node.message.tool_calls}
        return first, {text for text in texts if text in callers and shown.isdisjoint(callers[text])}

    def _repeats_sub_agent(self, repeated: Node) -> bool:
        """Whether an answer that a prompt repeats is a sub-agent's: it was sampled for a task."""
        call = self._tree.call_of(self._tree.nodes[repeated.source_id])
        return bool(self._tasks_of(self._tree.nodes[call.prompt_node].path(), self._tasks[2])[1])

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
        return call.spawned_by if known else self.main_call.agent

    def _prompt_nodes(self, branch: Node, call: Call) -> list[Node]:
        """Returns the nodes of a call's prompt from a branch on; all of them if the branch is an output."""
        nodes = self._tree.nodes[call.prompt_node].path()
        return nodes if branch.is_sampled else nodes[branch.depth - 1 :]

    def _is_later(self, node: Node, call: Call) -> bool:
        return node.output is not None and not self._is_before(self._tree.calls[node.output.call_index], call)

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
    def _tasks(self) -> tuple[_NodesByText, _NodesByText, dict[str, set[bytes]]]:
        """The outputs whose tool calls contain the task of a branch, by task and agent: all of them, and
        those to whose conversation the task is new. The keys of their messages, by task."""
        made = self._tool_call_nodes.get(None, [])
        tasks: set[str] = set()
        for branch in self._branches():
            nodes = self._prompt_nodes(branch, self.first_call(branch))
            tasks |= _task_texts([node.message for node in nodes])[1]
        if not tasks:
            return {}, {}, {}
        task_of = {text_bytes(task): task for task in tasks}
        # Canonical arguments use the escapes of this encoder.
        task_of_json = {msgspec.json.encode(task)[1:-1]: task for task in tasks}
        as_text, as_json = TextIndex(task_of, short=True), TextIndex(task_of_json, short=True)
        user_positions = self._user_positions(tasks)
        with_task: _NodesByText = {}
        with_new_task: _NodesByText = {}
        callers: dict[str, set[bytes]] = {}
        for node in made:
            passed: set[str] = set()
            for call in node.message.tool_calls:
                passed.update(task_of[text] for text in as_text.find(text_bytes(call.arguments)))
                passed.update(task_of_json[text] for text in as_json.find(call.canonical_arguments))
            for task in passed:
                callers.setdefault(task, set()).add(node.message.key)
                is_new = not self._tour.is_below_any(node, user_positions.get(task, []))
                for agent in (node.agent, None):
                    with_task.setdefault((task, agent), []).append(node)
                    if is_new:
                        with_new_task.setdefault((task, agent), []).append(node)
        return with_task, with_new_task, callers

    def _branches(self) -> Iterator[Node]:
        """Yields the nodes with siblings that may begin another agent's conversation."""
        main_agent = self.main_call.agent
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


def _task_texts(messages: Sequence[Message]) -> tuple[str, set[str]]:
    """Returns the first user text, and the texts and parts of the first user messages that are long
    enough."""
    from_user = [message for message in messages if message.role == "user"][:MAX_MESSAGES_SEARCHED]
    texts = {text for text in _message_texts(from_user) if len(text) >= MIN_TASK_CHARS}
    return (from_user[0].content.strip() if from_user else ""), texts


def _message_texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content.strip()
        yield from (part.strip() for part in message.parts if isinstance(part, str))


def is_answer(node: Node) -> bool:
    """Whether a node is an answer, or repeats one."""
    return node.is_sampled or node.source_id != NO_NODE
