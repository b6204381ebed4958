"""Signals for classifying forks: sibling branches, spawning tool calls, quotations, side calls.

Nothing here decides a cause; `causes` combines the signals. What all branches ask for is indexed once: tool
calls by the tasks they contain, outputs by their text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

import msgspec

from branchline.core.call import Call
from branchline.core.context_edits import is_deletion_stub
from branchline.core.message import Message
from branchline.timelines.branches import MIN_TASK_CHARS, Branches, text_bytes
from branchline.timelines.text_index import TextIndex
from branchline.tree.tree import NO_NODE, Node

_MIN_QUOTE_CHARS = 16
"""Minimum length of a quotation; shorter texts occur by chance."""
_MAX_MESSAGES_SEARCHED = 4
"""New messages searched for quotations and tasks."""
MAX_SIBLINGS_COMPARED = 8
"""A branch is compared with its latest siblings only; comparing all would take quadratic time."""


_NodesByText = dict[tuple[str, str | None], list[Node]]


class ForkSignals(Branches):
    """The signals of one tree."""

    def closest_sibling(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """Returns the sibling whose path shares most messages with a branch; the latest among equals."""
        if branch.source_id != NO_NODE and self._tree.nodes[branch.source_id].parent is branch.parent:
            return self._tree.nodes[branch.source_id]
        if len(siblings) == 1:
            return siblings[0]
        agent = self.agent_call(branch).agent
        system = self._system_prompt(branch)

        def similarity(sibling: Node) -> tuple[bool, bool, int, int]:
            same_agent = self.agent_call(sibling).agent == agent
            same_system = self._system_prompt(sibling) == system
            return (same_agent, same_system, len(self.shared_keys(sibling, branch)), sibling.id)

        return max(siblings, key=similarity)

    def spawning_node(self, branch: Node, *, strict: bool = False) -> Node | None:
        """Returns the latest earlier output with a tool call that contains the branch's task; otherwise the
        latest tool call of the agent that spawned it, if a header names one.

        The first user text is a task if a call contains it. Any other user text (a part after a reminder, a
        message after a greeting) must also be new to the caller; with `strict`, the first text too. A branch
        that shows a call that contains the text is the caller's own conversation.
        """
        call = self.first_call(branch)
        parent = self._parent_agent(self.agent_call(branch))
        messages = self._prompt_messages(branch)
        first, tasks = _task_texts(messages)
        if parent is None and not tasks:
            return None
        with_task, with_new_task, callers = self._tasks
        shown = {message.key for message in messages if message.tool_calls}
        tasks = {task for task in tasks if shown.isdisjoint(callers.get(task, ()))}
        found: list[Node] = []
        if not strict and first in tasks:
            found += islice(self._latest_first(with_task.get((first, parent), ()), call, branch), 1)
        for task in tasks:
            found += islice(self._latest_first(with_new_task.get((task, parent), ()), call, branch), 1)
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
        return call.spawned_by if known else self.main_call.agent

    def _prompt_messages(self, branch: Node) -> list[Message]:
        """Returns the new messages of a branch's first call, or its whole prompt if the branch is an
        output."""
        if not branch.is_sampled:
            return self.prompt_messages_below(branch)
        return [node.message for node in self._tree.nodes[self.first_call(branch).prompt_node].path()]

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
        tasks = {
            task for branch in self._branches() for task in _task_texts(self._prompt_messages(branch))[1]
        }
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

    def quoted_output(self, branch: Node, shared: Collection[bytes] = ()) -> Node | None:
        """Returns an earlier output of the same agent that the first new messages of a branch contain, apart
        from those that it shares with its sibling. Tool results do not count: they are what sub-agents
        answered."""
        call = self.first_call(branch)
        texts = [
            message.content
            for message in self.prompt_messages_below(branch)
            if message.role not in ("assistant", "tool") and message.key not in shared
        ]
        texts = [text for text in texts[:_MAX_MESSAGES_SEARCHED] if len(text) >= _MIN_QUOTE_CHARS]
        found: list[Node] = []
        for text in texts:
            for output in self._long_outputs.find(text_bytes(text)):
                nodes = self._outputs_by_text.get((output, call.agent), ())
                found += islice(self._latest_first(nodes, call, branch), 1)
        return max(found, key=lambda node: node.id, default=None)

    def summary_output(self, branch: Node, summary: str) -> Node | None:
        """Returns the latest earlier output of the same agent whose text is this summary."""
        call = self.first_call(branch)
        nodes = self._outputs_by_text.get((text_bytes(summary), call.agent), ())
        return next(self._latest_first(nodes, call), None)

    @cached_property
    def _outputs_by_text(self) -> dict[tuple[bytes, str | None], list[Node]]:
        found: dict[tuple[bytes, str | None], list[Node]] = {}
        for node in self._tree.nodes:
            if node.is_sampled:
                found.setdefault((text_bytes(node.message.content.strip()), node.agent), []).append(node)
        return found

    @cached_property
    def _long_outputs(self) -> TextIndex:
        texts = {node.message.content.strip() for node in self._tree.nodes if node.is_sampled}
        return TextIndex(text_bytes(text) for text in texts if len(text) >= _MIN_QUOTE_CHARS)

    def siblings_to_compare(self) -> SiblingsToCompare:
        return SiblingsToCompare(self)

    def repeated_conversation(self, branch: Node) -> int:
        """Returns the first node of the conversation whose outputs a new conversation repeats, or NO_NODE."""
        repeated = self.first_call(branch).reused_nodes
        is_new = branch.parent is self._tree.root
        return self._top(self._tree.nodes[repeated[-1]]).id if repeated and is_new else NO_NODE

    def is_side_call(self, branch: Node) -> bool:
        """Whether a branch is not continued and either lacks the main call's tools or quotes its task."""
        call = self.agent_call(branch)
        main = self.main_call
        if not main.requested_config_digest:
            main = self._first_calls_with_tools.get(call.agent, main)
        if call is self.main_call or branch.id in self._continued:
            return False
        if main.requested_config_digest:
            if (
                call.requested_config_digest
                or self._continues_without_tools(branch)
                or self._repeats_answers(branch)
            ):
                return False
            return not self._is_compacted(branch, without_tools=True)
        task = self._first_user_text(main)
        if len(task) < MIN_TASK_CHARS or not any(
            task in message.content and task != message.content.strip()
            for message in self.prompt_messages_below(branch)
        ):
            return False
        return not self._goes_on_as_text(branch, task) and not self._is_compacted(branch)

    def _continues_without_tools(self, branch: Node) -> bool:
        """Whether all branches after an answer lack tools, as when an agent asks for its final answer: then
        the lack distinguishes none of them."""
        parent = branch.parent
        assert parent is not None
        if parent.id not in self._lacks_tools_below:
            has_answer = any(map(_is_answer, parent.path()))
            self._lacks_tools_below[parent.id] = has_answer and not any(
                self.first_call(child).requested_config_digest for child in parent.all_children()
            )
        return self._lacks_tools_below[parent.id]

    def shows_answers(self, branch: Node) -> bool:
        """Whether the first prompt of a branch shows answers that were sampled before it."""
        above = branch.parent.path() if branch.parent is not None else []
        return any(_is_answer(node) for node in above) or self._repeats_answers(branch)

    def _repeats_answers(self, branch: Node) -> bool:
        """Whether the first prompt of a branch shows answers of before it, after a message that differs: the
        history was edited."""
        node: Node | None = self._tree.nodes[self.first_call(branch).prompt_node]
        while node is not None and node is not branch:
            if node.source_id != NO_NODE:
                return True
            node = node.parent
        return False

    def _goes_on_as_text(self, branch: Node, task: str) -> bool:
        """Whether a branch is the main conversation as one text that grows with every call (ReAct): its
        system prompt is the main one, and its first user text begins with the task."""
        main_prompt = self._tree.nodes[self.main_call.prompt_node]
        if not self.have_one_system_prompt(main_prompt, branch):
            return False
        return self._first_user_text(self.first_call(branch)).startswith(task)

    def _is_compacted(self, branch: Node, *, without_tools: bool = False) -> bool:
        """Whether a branch quotes a summary under the same system prompt: an output without the request for
        it. A transcript has both. With `without_tools`, the summary has to lack tools too; else a remark on
        an answer lacks what the answer had."""
        quoted = self.quoted_output(branch)
        if quoted is None or quoted.parent is None or not self.have_one_system_prompt(quoted, branch):
            return False
        if without_tools and self._tree.call_of(quoted).requested_config_digest:
            return False
        request = quoted.parent.message.content.strip()
        return not any(request in message.content for message in self.prompt_messages_below(branch))

    def may_summarise(self, output: Node, branch: Node) -> bool:
        """Whether an output that a branch quotes may be its summary: it was written under the same system
        prompt, or in a conversation that began later. Otherwise a critic quotes what it judges."""
        if self.have_one_system_prompt(output, branch):
            return True
        began = [self._first_call[self._top(node).id] for node in (output, branch)]
        return began[1].index < began[0].index


class SiblingsToCompare:
    """The earlier siblings that a branch is compared with: the latest ones, the latest ones with the same
    first message, and the one whose outputs it repeats."""

    def __init__(self, signals: ForkSignals) -> None:
        self._signals = signals
        self._added: dict[int, Node] = {}
        self._latest: deque[Node] = deque(maxlen=MAX_SIBLINGS_COMPARED)
        self._latest_by_key: dict[bytes, deque[Node]] = {}

    def add(self, node: Node) -> None:
        self._added[node.id] = node
        self._latest.append(node)
        same = self._latest_by_key.setdefault(node.message.key, deque(maxlen=MAX_SIBLINGS_COMPARED))
        same.append(node)

    def of(self, branch: Node) -> list[Node]:
        same = self._latest_by_key.get(branch.message.key, ())
        repeated = self._added.get(self._signals.repeated_conversation(branch))
        found = {node.id: node for node in (*self._latest, *same, *([repeated] if repeated else ()))}
        return [found[node_id] for node_id in sorted(found)]


def _task_texts(messages: Sequence[Message]) -> tuple[str, set[str]]:
    """Returns the first user text, and the texts and parts of the first user messages that are long
    enough."""
    from_user = [message for message in messages if message.role == "user"][:_MAX_MESSAGES_SEARCHED]
    texts = {text for text in _message_texts(from_user) if len(text) >= MIN_TASK_CHARS}
    return (from_user[0].content.strip() if from_user else ""), texts


def _message_texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content.strip()
        yield from (part.strip() for part in message.parts if isinstance(part, str))


def _is_answer(node: Node) -> bool:
    return node.is_sampled or node.source_id != NO_NODE


def is_deletion(new: Message, old: Message) -> bool:
    """Whether a message is the stub of another, or another is its stub and it was restored."""
    return is_deletion_stub(new) != is_deletion_stub(old) and _has_same_tools(new, old)


def is_stub(new: Message, old: Message) -> bool:
    """Whether a reply or a tool result is a shortened version of another: same tools, less text."""
    is_shortened = _has_same_tools(new, old) and _payload_length(new) < _payload_length(old)
    return new.role in ("assistant", "tool") and is_shortened


def _has_same_tools(new: Message, old: Message) -> bool:
    return new.role == old.role and [call.name for call in new.tool_calls] == [
        call.name for call in old.tool_calls
    ]


def _payload_length(message: Message) -> int:
    return len(message.content) + sum(len(call.arguments) for call in message.tool_calls)
