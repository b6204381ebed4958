"""Signals for classifying forks: sibling branches, spawning tool calls, quotations, side calls.

Nothing here decides a cause; `causes` combines the signals. What all branches ask for is indexed once:
outputs by their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import islice

from branchline.core.context_edits import is_deletion_stub
from branchline.core.message import Message
from branchline.timelines.branches import MIN_TASK_CHARS, text_bytes
from branchline.timelines.delegation import MAX_MESSAGES_SEARCHED, Delegation, is_answer
from branchline.timelines.text_index import TextIndex
from branchline.tree.tree import NO_NODE, Node

_MIN_QUOTE_CHARS = 16
"""Minimum length of a quotation; shorter texts occur by chance."""
MAX_SIBLINGS_COMPARED = 8
"""A branch is compared with its latest siblings only; comparing all would take quadratic time."""


class ForkSignals(Delegation):
    """The signals of one tree."""

    def closest_sibling(self, branch: Node, siblings: Sequence[Node]) -> Node:
        """Returns the sibling whose path shares most messages with a branch; the latest among equals. A
        branch that was not delegated is compared with siblings that were not either, if there are any."""
        if branch.source_id != NO_NODE and self._tree.nodes[branch.source_id].parent is branch.parent:
            return self._tree.nodes[branch.source_id]
        if len(siblings) == 1:
            return siblings[0]
        agent = self.agent_call(branch).agent
        system = self._system_prompt(branch)
        is_delegated = self.is_delegated(branch)

        def similarity(sibling: Node) -> tuple[bool, bool, bool, int, int]:
            same_agent = self.agent_call(sibling).agent == agent
            same_origin = is_delegated or not self.is_delegated(sibling)
            same_system = self._system_prompt(sibling) == system
            return (same_agent, same_origin, same_system, len(self.shared_keys(sibling, branch)), sibling.id)

        return max(siblings, key=similarity)

    def quoted_output(self, branch: Node, shared: Collection[bytes] = ()) -> Node | None:
        """Returns an earlier output of the same agent that the first new messages of a branch contain, apart
        from those that it shares with its sibling. Tool results do not count: they are what sub-agents
        answered."""
        call = self.agent_call(branch)
        texts = [
            message.content
            for message in self.prompt_messages_below(branch)
            if message.role not in ("assistant", "tool") and message.key not in shared
        ]
        texts = [text for text in texts[:MAX_MESSAGES_SEARCHED] if len(text) >= _MIN_QUOTE_CHARS]
        found: list[Node] = []
        for text in texts:
            for output in self._long_outputs.find(text_bytes(text)):
                nodes = self._outputs_by_text.get((output, call.agent), ())
                found += islice(self._latest_first(nodes, call, branch), 1)
        return max(found, key=lambda node: node.id, default=None)

    def summary_output(self, branch: Node, summary: str) -> Node | None:
        """Returns the latest earlier output of the same agent whose text is this summary."""
        call = self.agent_call(branch)
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
        repeated = self.agent_call(branch).reused_nodes
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
            has_answer = any(map(is_answer, parent.path()))
            self._lacks_tools_below[parent.id] = has_answer and not any(
                self.first_call(child).requested_config_digest for child in parent.all_children()
            )
        return self._lacks_tools_below[parent.id]

    def shows_answers(self, branch: Node) -> bool:
        """Whether the first prompt of a branch shows answers that were sampled before it."""
        above = branch.parent.path() if branch.parent is not None else []
        return any(is_answer(node) for node in above) or self._repeats_answers(branch)

    def _repeats_answers(self, branch: Node) -> bool:
        """Whether the first prompt of a branch shows answers of before it, after a message that differs: the
        history was edited."""
        node: Node | None = self._tree.nodes[self.agent_call(branch).prompt_node]
        while node is not None and node is not branch.parent:
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
        return self._first_user_text(self.agent_call(branch)).startswith(task)

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
    """The earlier siblings that a branch is compared with: the latest ones, the latest one that was not
    delegated, the latest ones with the same first message, and the one whose outputs it repeats."""

    def __init__(self, signals: ForkSignals) -> None:
        self._signals = signals
        self._added: dict[int, Node] = {}
        self._latest: deque[Node] = deque(maxlen=MAX_SIBLINGS_COMPARED)
        self._latest_own: list[Node] = []
        self._latest_by_key: dict[bytes, deque[Node]] = {}

    def add(self, node: Node) -> None:
        self._added[node.id] = node
        self._latest.append(node)
        if not (node.is_sampled or self._signals.is_delegated(node)):
            self._latest_own = [node]
        same = self._latest_by_key.setdefault(node.message.key, deque(maxlen=MAX_SIBLINGS_COMPARED))
        same.append(node)

    def of(self, branch: Node) -> list[Node]:
        same = self._latest_by_key.get(branch.message.key, ())
        repeated = self._added.get(self._signals.repeated_conversation(branch))
        found = {
            node.id: node
            for node in (*self._latest, *self._latest_own, *same, *([repeated] if repeated else ()))
        }
        return [found[node_id] for node_id in sorted(found)]


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
