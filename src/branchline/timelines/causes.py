"""Classifies forks: every branch beyond the first at a node gets a cause, or `unknown`.

Causes are determined when a tree is read, not when a call arrives: concurrent identical calls are not
retries, and an output that a call continues has evidently reached its client. Thin evidence gives `unknown`,
because a wrong cause misleads more than none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from branchline.core.call import DEFAULT_AGENT, Call, Delivery
from branchline.core.context_edits import read_summary
from branchline.core.sample import DropReason
from branchline.timelines.alignment import has_reasoning
from branchline.timelines.fork_signals import (
    ForkSignals,
    is_deletion,
    is_stub,
)
from branchline.timelines.log import CANCELLED_REASONS
from branchline.timelines.main_history import Conversations
from branchline.tree.tree import NO_NODE, Node, Tree


class Cause(StrEnum):
    """Why a branch exists."""

    BEST_OF_N = "best_of_n"
    """The same prompt sampled again for another answer."""
    DUPLICATE = "duplicate"
    """The same prompt sampled again, with an equal answer."""
    RETRY = "retry"
    """The same prompt sent again because the answer never arrived."""
    CANCELLED = "cancelled"
    """A generation cancelled before its end, and the prompt sent again."""
    REPAIR_LOOP = "repair_loop"
    """A reply obtained with temporary context, later shown without that context."""
    EDIT = "edit"
    """A message replaced by another."""
    CONTEXT_DELETE = "context_delete"
    """Earlier messages removed, shortened to a stub, or restored after that."""
    COMPACTION = "compaction"
    """A new conversation that quotes an earlier output."""
    SUB_AGENT = "sub_agent"
    """Another agent's conversation."""
    SIDE_CALL = "side_call"
    """A call beside the main conversation: a title, a topic check."""
    OTHER_SYSTEM_PROMPT = "other_system_prompt"
    """A conversation under another system prompt (a critic, a guard) whose agent has no name of its own."""
    THINK_STRIP = "think_strip"
    """The template omits earlier reasoning."""
    TEMPLATE_REWRITE = "template_rewrite"
    """The template renders an earlier message differently than before (moved system text, a folded reply)."""
    TOOLS_CHANGED = "tools_changed"
    """The same conversation with other tools or template arguments."""
    OTHER_MODEL = "other_model"
    """Foreign logs only: the same conversation, sent to another model."""
    DRIFT = "drift"
    """Foreign logs only: the same text, encoded again into other ids."""
    UNKNOWN = "unknown"


ASIDE_CAUSES = frozenset({Cause.SUB_AGENT, Cause.SIDE_CALL, Cause.OTHER_SYSTEM_PROMPT})
"""Causes of branches that leave the conversation of their sibling."""


@dataclass(frozen=True)
class Fork:
    """One branch beyond the first at a node, and its cause."""

    parent: Node
    branch: Node
    sibling: Node
    """The sibling that the branch is compared with."""
    cause: Cause
    call: Call
    """The first call through the branch."""


@dataclass(frozen=True)
class Edge:
    """A relation between two paths: a sub-agent and the call that spawned it, a summary and its source."""

    cause: Cause
    source: Node
    target: Node


@dataclass
class ForkReport:
    """The forks of a tree and what follows from them."""

    forks: list[Fork] = field(default_factory=list)
    """In the order in which the branches were added."""
    undelivered: dict[int, DropReason] = field(default_factory=dict)
    """Sampled nodes that never reached a client, by node id."""
    edges: list[Edge] = field(default_factory=list)
    begun_anew: int = 0
    """Conversations without a name that begin with another question under the same system prompt and show no
    answer: an edited first question, or another agent."""
    conversations: Conversations | None = None
    """None without calls."""

    @cached_property
    def main_leaf(self) -> Node | None:
        """The end of the main history; None without answers."""
        return self.conversations.main_leaf() if self.conversations is not None else None

    def leaf_of(self, agent: str) -> Node | None:
        """Returns the end of an agent's conversation, or None."""
        return self.conversations.leaf_of(agent) if self.conversations is not None else None

    @property
    def unnamed_conversations(self) -> int:
        """The number of conversations that no name tells from the main one: under other system prompts, or
        begun anew."""
        return sum(fork.cause == Cause.OTHER_SYSTEM_PROMPT for fork in self.forks) + self.begun_anew


def classify_forks(tree: Tree) -> ForkReport:
    """Returns the causes of all forks, the undelivered outputs, and the edges between paths."""
    if not tree.calls:
        return ForkReport()
    signals = ForkSignals(tree)
    report = _Classifier(tree, signals).run()
    # An agent whose first call was cut off may have begun again under another system prompt.
    calls = (call for call in tree.calls if call.outputs and not signals.begins_aside(call))
    main_call = report.conversations.first_answered(calls) if report.conversations is not None else None
    if main_call is None or main_call is signals.main_call:
        return report
    return _Classifier(tree, ForkSignals(tree, main_call)).run()


class _Classifier:
    def __init__(self, tree: Tree, signals: ForkSignals) -> None:
        self._tree = tree
        self._signals = signals
        self._undelivered = _undelivered_outputs(tree)
        self._edges: list[Edge] = []
        self._main_agent = self._signals.main_call.agent

    def run(self) -> ForkReport:
        forks: list[Fork] = []
        for node in self._tree.nodes:
            children = self._main_child_first(node.all_children())
            earlier = self._signals.siblings_to_compare()
            outputs = _SiblingOutputs(self._tree, self._undelivered)
            for index, branch in enumerate(children):
                if index:
                    sibling, cause = self._classify(node, branch, earlier.of(branch), outputs)
                    forks.append(Fork(node, branch, sibling, cause, self._signals.first_call(branch)))
                earlier.add(branch)
                if branch.is_sampled:
                    outputs.add(branch)
        forks = self._mark_compactions(sorted(forks, key=lambda fork: fork.branch.id))
        begun_anew = sum(map(self._begins_anew, forks))
        return ForkReport(forks, self._undelivered, self._edges, begun_anew, self._conversations(forks))

    def _begins_anew(self, fork: Fork) -> bool:
        return (
            fork.cause in (Cause.EDIT, Cause.UNKNOWN)
            and not fork.branch.is_sampled
            and fork.branch.message.role == "user"
            and self._signals.agent_call(fork.branch).agent == DEFAULT_AGENT
            and not self._signals.shows_answers(fork.branch)
        )

    def _main_child_first(self, children: list[Node]) -> list[Node]:
        """Moves the main conversation before side calls (a title) and other agents that came before it."""
        if len(children) < 2:
            return children
        first = children[0]
        is_main_answer = first.is_sampled and first.agent == self._main_agent
        if (is_main_answer and not self._signals.is_delegated(first)) or self._may_be_main(first):
            return children
        for index, child in enumerate(children):
            if self._may_be_main(child):
                return [child, *children[:index], *children[index + 1 :]]
        return children

    def _may_be_main(self, child: Node) -> bool:
        call = self._signals.agent_call(child)
        return (
            call.agent == self._main_agent
            and not call.spawned_by
            and not self._signals.is_delegated(child)
            and not self._signals.is_side_call(child)
        )

    def _begins_other_agent(self, output: Node) -> bool:
        """Whether an output is another agent's, whose whole task the main conversation shows too."""
        return output.agent != self._main_agent or self._signals.is_delegated(output)

    def _classify(
        self, parent: Node, branch: Node, earlier: Sequence[Node], outputs: _SiblingOutputs
    ) -> tuple[Node, Cause]:
        if not branch.is_sampled:
            sibling = self._signals.closest_sibling(branch, earlier)
            return sibling, self._classify_context(parent, branch, sibling)
        if not outputs:
            # The first child is a context message; it is what diverged from this output.
            if not self._begins_other_agent(branch):
                return earlier[0], self._classify_context(parent, earlier[0], branch)
            self._add_spawn_edge(self._signals.spawning_node(branch), branch)
            return earlier[0], Cause.SUB_AGENT
        if branch.agent not in outputs.agents and branch.agent != self._main_agent:
            # Another agent with an identical prompt continues its own answer.
            self._add_spawn_edge(self._signals.spawning_node(branch), branch)
            return outputs.last, Cause.SUB_AGENT
        return outputs.classify(branch)

    def _classify_context(self, parent: Node, branch: Node, sibling: Node) -> Cause:
        signals = self._signals
        call, other = signals.agent_call(branch), signals.agent_call(sibling)
        is_same_message = branch.message.key == sibling.message.key
        if is_same_message and call.rewrite_reason:
            return Cause.THINK_STRIP if call.rewrite_reason == Cause.THINK_STRIP else Cause.TEMPLATE_REWRITE
        if is_deletion(branch.message, sibling.message):
            return Cause.CONTEXT_DELETE
        if summary := read_summary(branch.message):
            source = signals.summary_output(branch, summary)
            if source is not None:
                self._edges.append(Edge(Cause.COMPACTION, source, branch))
            return Cause.COMPACTION
        spawn = signals.spawning_node(branch, strict=is_same_message)
        self._add_spawn_edge(spawn, branch)
        is_other_agent = call.agent not in (other.agent, self._main_agent)
        if spawn is not None or is_other_agent or call.spawned_by:
            return Cause.SUB_AGENT
        if is_same_message:
            return self._classify_same_message(call, other, branch, sibling)
        new, shared = signals.prompt_messages_below(branch), signals.shared_keys(sibling, branch)
        if (
            branch.source_id != NO_NODE
            and parent.parent is not None
            and signals.is_below(self._tree.nodes[branch.source_id], parent)
        ):
            # The reply is shown without the messages that led to it. If later messages of the old path are
            # kept, those messages were deleted; otherwise they were temporary.
            is_continued = not {message.key for message in new[1:]}.isdisjoint(shared)
            return Cause.CONTEXT_DELETE if is_continued else Cause.REPAIR_LOOP
        if signals.is_side_call(branch):
            return Cause.SIDE_CALL
        if signals.has_other_system_prompt(branch, sibling):
            return Cause.OTHER_SYSTEM_PROMPT
        quoted = signals.quoted_output(branch, shared)
        if quoted is not None and signals.may_summarise(quoted, branch):
            self._edges.append(Edge(Cause.COMPACTION, quoted, branch))
            return Cause.COMPACTION
        if shared:
            # A message was removed or shortened, or it was rewritten.
            is_removed = branch.message.key in shared or is_stub(branch.message, sibling.message)
            return Cause.CONTEXT_DELETE if is_removed else Cause.EDIT
        if branch.message.role == sibling.message.role and parent.parent is not None:
            return Cause.EDIT
        return Cause.UNKNOWN

    def _classify_same_message(self, call: Call, other: Call, branch: Node, sibling: Node) -> Cause:
        """Classifies a branch whose message equals its sibling's, so that only the ids differ."""
        if call.sampling.get("model") != other.sampling.get("model"):
            return Cause.OTHER_MODEL
        if call.requested_config_digest != other.requested_config_digest:
            return Cause.TOOLS_CHANGED
        if call.agent not in (other.agent, self._main_agent):
            return Cause.SUB_AGENT
        output: Node | None = None
        if sibling.is_sampled:
            output = sibling
        elif branch.source_id != NO_NODE:
            output = self._tree.nodes[branch.source_id]
        if output is None or not (call.prompt_tokens and other.prompt_tokens):
            return Cause.UNKNOWN
        return Cause.THINK_STRIP if has_reasoning(output.message) else Cause.DRIFT

    def _add_spawn_edge(self, spawn: Node | None, branch: Node) -> None:
        if spawn is not None:
            self._edges.append(Edge(Cause.SUB_AGENT, spawn, branch))

    def _mark_compactions(self, forks: Sequence[Fork]) -> list[Fork]:
        """A branch of unknown cause whose output a new conversation quotes was made for that compaction."""
        quoted: set[int] = set()
        for edge in self._edges:
            node: Node | None = edge.source if edge.cause == Cause.COMPACTION else None
            while node is not None and node.id not in quoted:
                quoted.add(node.id)
                node = node.parent
        return [
            replace(fork, cause=Cause.COMPACTION)
            if fork.cause == Cause.UNKNOWN and fork.branch.id in quoted
            else fork
            for fork in forks
        ]

    def _conversations(self, forks: Sequence[Fork]) -> Conversations:
        """Links each branch that stays in a conversation with its sibling, or with the summary that it quotes
        if it shows no answers and that was written under its own system prompt."""
        signals = self._signals
        summaries = {
            edge.target.id: edge.source.id
            for edge in self._edges
            if edge.cause == Cause.COMPACTION
            and signals.have_one_system_prompt(edge.source, edge.target)
            and not signals.shows_answers(edge.target)
        }
        return Conversations(
            self._tree,
            signals.main_call,
            branches={fork.branch.id for fork in forks},
            links=[
                (summaries.get(fork.branch.id, fork.sibling.id), fork.branch.id)
                for fork in forks
                if fork.cause not in ASIDE_CAUSES
            ],
            undelivered=self._undelivered.keys(),
        )


class _SiblingOutputs:
    """The earlier outputs of one prompt, indexed so that classifying n outputs takes linear time."""

    def __init__(self, tree: Tree, undelivered: dict[int, DropReason]) -> None:
        self._tree = tree
        self._undelivered = undelivered
        self._last: Node | None = None
        self.agents: set[str | None] = set()
        self._first_by_tools: dict[bytes, Node] = {}
        self._last_by_tools: dict[bytes, Node] = {}
        self._undelivered_by_tools: dict[bytes, Node] = {}
        self._by_key: dict[tuple[bytes, bytes], Node] = {}

    def __bool__(self) -> bool:
        return self._last is not None

    @property
    def last(self) -> Node:
        assert self._last is not None
        return self._last

    def add(self, node: Node) -> None:
        tools = self._tree.call_of(node).requested_config_digest
        self._last = node
        self.agents.add(node.agent)
        self._first_by_tools.setdefault(tools, node)
        self._last_by_tools[tools] = node
        if node.id in self._undelivered:
            self._undelivered_by_tools[tools] = node
        self._by_key.setdefault((tools, node.message.key), node)

    def classify(self, branch: Node) -> tuple[Node, Cause]:
        """Returns the sibling to compare with and the cause of another output of the same prompt."""
        call = self._tree.call_of(branch)
        tools = call.requested_config_digest
        last = self._last_by_tools.get(tools)
        if last is None:
            return self.last, Cause.TOOLS_CHANGED
        undelivered = self._undelivered_by_tools.get(tools)
        if undelivered is not None:
            return undelivered, _cause_of_loss(self._undelivered[undelivered.id])
        if branch.id in self._undelivered:
            return last, _cause_of_loss(self._undelivered[branch.id])
        if call.retry_count:
            return last, Cause.RETRY
        equal = self._by_key.get((tools, branch.message.key))
        if equal is not None:
            return equal, Cause.DUPLICATE
        return self._first_by_tools[tools], Cause.BEST_OF_N


def _cause_of_loss(reason: DropReason) -> Cause:
    return Cause.CANCELLED if reason == DropReason.CANCELLED else Cause.RETRY


# -- undelivered outputs -------------------------------------------------------------------------------


def _undelivered_outputs(tree: Tree) -> dict[int, DropReason]:
    """Returns the outputs that never reached a client. A call of which an output is continued counts as
    delivered, whatever was recorded, apart from its outputs that were cut off; among the others, retries
    identify the outputs that were not used."""
    groups: dict[tuple[int, str], list[Call]] = {}
    for call in tree.calls:
        groups.setdefault((call.prompt_node, call.agent), []).append(call)
    undelivered: dict[int, DropReason] = {}
    repeated = {node.source_id for node in tree.nodes}
    for calls in groups.values():
        open_calls: list[Call] = []
        for call in calls:
            unused = [node for node in call.outputs if not tree.nodes[node].children and node not in repeated]
            if len(unused) == len(call.outputs):
                open_calls.append(call)
            elif tree.delivery(call) == Delivery.CANCELLED:
                undelivered.update(
                    {node: DropReason.CANCELLED for node in unused if _is_cut(tree.nodes[node])}
                )
        superseded = _superseded_calls(tree, calls, open_calls)
        for call in open_calls:
            delivery = tree.delivery(call)
            if delivery == Delivery.CANCELLED:
                reason = DropReason.CANCELLED
            elif call.index in superseded:
                reason = DropReason.RETRY
            elif delivery == Delivery.LOST:
                reason = DropReason.LOST
            else:
                continue
            undelivered.update(dict.fromkeys(call.outputs, reason))
    return undelivered


def _is_cut(node: Node) -> bool:
    return node.output is not None and node.output.finish_reason in CANCELLED_REASONS


def _superseded_calls(tree: Tree, calls: Sequence[Call], open_calls: Sequence[Call]) -> set[int]:
    """Returns the calls that the client sent again: lost calls with a later equal call, and one earlier call
    per retry header that no lost or cancelled call explains."""
    last = max(call.index for call in calls)
    lost = [call for call in open_calls if tree.delivery(call) == Delivery.LOST]
    superseded = {call.index for call in lost if call.index < last}
    explained = len(superseded) + sum(tree.delivery(call) == Delivery.CANCELLED for call in open_calls)
    pending: dict[int, deque[int]] = {}
    """Calls whose delivery is unknown by the value of their retry header, each in order."""
    for call in open_calls:
        if tree.delivery(call) == Delivery.PENDING:
            pending.setdefault(call.retry_count, deque()).append(call.index)
    for retry in sorted((call for call in calls if call.retry_count), key=lambda call: call.index):
        if explained:
            explained -= 1
            continue
        earlier = [count for count, waiting in pending.items() if count < retry.retry_count and waiting]
        if earlier:
            superseded.add(pending[max(earlier)].popleft())
    return superseded
