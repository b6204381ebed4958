"""Why does a tree fork? Every branch beyond the first at a node gets a cause, or `unknown`.

Causes are judged once a tree is read, not when a call arrives: concurrent identical calls are not retries,
and a reply shows by being continued that it reached its client. Where evidence is thin the answer is
`unknown`, because a wrong cause misleads more than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from branchline.core.call import Call, Delivery
from branchline.core.message import Message
from branchline.timelines.fork_signals import (
    MAX_SIBLINGS_COMPARED,
    ForkSignals,
    classify_replacement,
    have_common_message,
)
from branchline.tree.node import NO_NODE, Node
from branchline.tree.tree import Tree


class Cause(StrEnum):
    """Why there is a branch."""

    BEST_OF_N = "best_of_n"
    """The same prompt sampled again for another answer."""
    DUPLICATE = "twin"
    """The same, and the answers are equal."""
    RETRY = "retry"
    """The same prompt sent again because the answer never arrived."""
    CANCELLED = "cancelled"
    """A generation stopped on the way, and the prompt sent again."""
    REPAIR_LOOP = "repair_loop"
    """A reply got in temporary context, shown afterwards without that context."""
    EDIT = "edit"
    """A message replaced by another."""
    CONTEXT_DELETE = "context_delete"
    """Earlier messages removed, or emptied to a stub."""
    COMPACTION = "compaction"
    """A new start that quotes what was said before."""
    SUB_AGENT = "sub_agent"
    """Another agent's conversation."""
    SIDE_CALL = "side_call"
    """A question asked in passing: a title, a topic check."""
    THINK_STRIP = "think_strip"
    """The template leaves out earlier thinking."""
    TEMPLATE_REWRITE = "template_rewrite"
    """The template shows an earlier message otherwise than before (moved system text, a folded reply)."""
    TOOLS_CHANGED = "tools_changed"
    """The same conversation under other tools or template arguments."""
    DRIFT = "drift"
    """Foreign logs only: the same text, encoded again into other ids."""
    UNKNOWN = "unknown"


class DropReason(StrEnum):
    """Why an output never counts as something a client got."""

    RETRY = "retry"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True)
class Fork:
    """One branch beyond the first: where it leaves, from whom, and why."""

    parent: Node
    branch: Node
    sibling: Node
    """The sibling it is compared with."""
    cause: Cause
    call: Call
    """The first call through the branch."""


@dataclass(frozen=True)
class Edge:
    """A tie that no path shows: a sub-agent and the call that spawned it, a summary and its source."""

    cause: Cause
    source: Node
    target: Node


@dataclass
class ForkReport:
    """Everything a tree's shape says about what its agents did."""

    forks: list[Fork] = field(default_factory=list)
    """In the order the branches came."""
    undelivered: dict[int, DropReason] = field(default_factory=dict)
    """Sampled nodes that never reached a client, by node id."""
    edges: list[Edge] = field(default_factory=list)
    main_leaf: Node | None = None
    """The leaf of the first agent's timeline that ends last."""


def classify_forks(tree: Tree) -> ForkReport:
    """Causes of all forks, outputs nobody saw, and edges beyond the tree."""
    judgement = ForkReport(undelivered=_undelivered_outputs(tree))
    evidence = ForkSignals(tree)
    for node in tree.nodes:
        children = _main_child_first(evidence, node.all_children())
        answers = _SiblingOutputs(tree, judgement)
        for place, branch in enumerate(children):
            if place:
                before = children[max(0, place - MAX_SIBLINGS_COMPARED) : place]
                beside, cause = _classify_branch(tree, evidence, judgement, node, branch, before, answers)
                judgement.forks.append(Fork(node, branch, beside, cause, evidence.first_call(branch)))
            if branch.is_sampled:
                answers.add(branch)
    judgement.forks = _mark_compactions(sorted(judgement.forks, key=lambda fork: fork.branch.id), judgement)
    judgement.main_leaf = _main_leaf(tree, judgement)
    return judgement


def _main_child_first(evidence: ForkSignals, children: list[Node]) -> list[Node]:
    """A title asked for before the work begins is no trunk: the work is, and the title its branch."""
    if len(children) < 2 or children[0].is_sampled or not evidence.is_side_call(children[0]):
        return children
    for place, child in enumerate(children):
        if not child.is_sampled and not evidence.is_side_call(child):
            return [child, *children[:place], *children[place + 1 :]]
    return children


def _mark_compactions(forks: Sequence[Fork], judgement: ForkReport) -> list[Fork]:
    """A branch nothing else explains, whose answer a new start quotes, was for that summary."""
    quoted = {
        node.id for edge in judgement.edges if edge.cause == Cause.COMPACTION for node in edge.source.path()
    }
    return [
        replace(fork, cause=Cause.COMPACTION)
        if fork.cause == Cause.UNKNOWN and fork.branch.id in quoted
        else fork
        for fork in forks
    ]


# -- outputs nobody saw ---------------------------------------------------------------------------------


def _undelivered_outputs(tree: Tree) -> dict[int, DropReason]:
    """An output that is continued was seen, whatever was recorded; of the others, retries show the losers."""
    groups: dict[tuple[int, str], list[Call]] = {}
    for call in tree.calls:
        groups.setdefault((call.prompt_node, call.agent), []).append(call)
    unseen: dict[int, DropReason] = {}
    shown = {node.source_id for node in tree.nodes}
    for calls in groups.values():
        open_calls = [
            call
            for call in calls
            if not any(tree.nodes[node].children or node in shown for node in call.outputs)
        ]
        losers = _superseded_calls(tree, calls, open_calls)
        for call in open_calls:
            delivery = tree.delivery(call)
            if delivery == Delivery.CANCELLED:
                reason = DropReason.CANCELLED
            elif call.index in losers:
                reason = DropReason.RETRY
            elif delivery == Delivery.LOST:
                reason = DropReason.LOST
            else:
                continue
            unseen.update(dict.fromkeys(call.outputs, reason))
    return unseen


def _superseded_calls(tree: Tree, calls: Sequence[Call], open_calls: Sequence[Call]) -> set[int]:
    """Calls whose client asked again: by its retry header, or because they were lost and asked anew."""
    losers = {
        call.index
        for call in open_calls
        if tree.delivery(call) == Delivery.LOST and any(other.index > call.index for other in calls)
    }
    cancelled = sum(tree.delivery(call) == Delivery.CANCELLED for call in open_calls)
    spoken_for = len(losers) + cancelled
    for retry in sorted((call for call in calls if call.retry_count), key=lambda call: call.index):
        if spoken_for:
            spoken_for -= 1
            continue
        before = [
            call
            for call in open_calls
            if call.index not in losers
            and call is not retry
            and call.retry_count < retry.retry_count
            and tree.delivery(call) == Delivery.PENDING
        ]
        if before:
            losers.add(max(before, key=lambda call: (call.retry_count, -call.index)).index)
    return losers


# -- causes ---------------------------------------------------------------------------------------------


class _SiblingOutputs:
    """The outputs of one prompt so far, so that a thousand of them take a thousand looks."""

    def __init__(self, tree: Tree, judgement: ForkReport) -> None:
        self._tree = tree
        self._undelivered = judgement.undelivered
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
        """Two outputs of one conversation: asked twice, or asked again."""
        call = self._tree.call_of(branch)
        last = self._last_by_tools.get(call.requested_config_digest)
        if last is None:
            return self.last, Cause.TOOLS_CHANGED
        unseen = self._undelivered_by_tools.get(call.requested_config_digest)
        for node, beside in ((unseen, unseen), (branch, last)):
            drop = self._undelivered.get(node.id) if node is not None else None
            if drop is not None and beside is not None:
                return beside, Cause.CANCELLED if drop == DropReason.CANCELLED else Cause.RETRY
        if call.retry_count:
            return last, Cause.RETRY
        twin = self._by_key.get((call.requested_config_digest, branch.message.key))
        if twin is not None:
            return twin, Cause.DUPLICATE
        return self._first_by_tools[call.requested_config_digest], Cause.BEST_OF_N


def _classify_branch(
    tree: Tree,
    evidence: ForkSignals,
    judgement: ForkReport,
    at: Node,
    branch: Node,
    before: Sequence[Node],
    answers: _SiblingOutputs,
) -> tuple[Node, Cause]:
    if branch.is_sampled:
        if answers:
            if branch.agent not in answers.agents and branch.agent != tree.calls[0].agent:
                # Told the very same, and yet another: it goes on from its own answer.
                _add_spawn_edge(judgement, evidence.spawning_node(branch), branch)
                return answers.last, Cause.SUB_AGENT
            return answers.classify(branch)
        # A context message stood here first; whatever made it a branch is the cause.
        return before[0], _classify_context_branch(tree, evidence, judgement, at, before[0], branch)
    beside = evidence.closest_sibling(branch, before)
    return beside, _classify_context_branch(tree, evidence, judgement, at, branch, beside)


def _classify_context_branch(
    tree: Tree, evidence: ForkSignals, judgement: ForkReport, at: Node, branch: Node, beside: Node
) -> Cause:
    call = evidence.first_call(branch)
    other = evidence.first_call(beside)
    is_same = branch.message.key == beside.message.key
    if is_same and call.rewrite_reason:
        return Cause.THINK_STRIP if call.rewrite_reason == Cause.THINK_STRIP else Cause.TEMPLATE_REWRITE
    spawn = evidence.spawning_node(branch, strict=is_same)
    _add_spawn_edge(judgement, spawn, branch)
    another = call.agent != other.agent and call.agent != tree.calls[0].agent
    if spawn is not None or another or call.spawned_by:
        return Cause.SUB_AGENT
    if is_same:
        return _classify_same_message(tree, call, other, branch, beside)
    new, old = evidence.prompt_messages_below(branch), evidence.path_messages_below(beside, branch)
    if branch.source_id != NO_NODE and at.parent is not None and at in tree.nodes[branch.source_id].path():
        # Shown without what led to it; where more of the old path is kept, it is that which was removed.
        return Cause.CONTEXT_DELETE if have_common_message(new[1:], old) else Cause.REPAIR_LOOP
    if evidence.is_side_call(branch):
        return Cause.SIDE_CALL
    quoted = evidence.quoted_output(branch)
    if quoted is not None:
        judgement.edges.append(Edge(Cause.COMPACTION, quoted, branch))
        return Cause.COMPACTION
    if old and new and have_common_message(new, old):
        return Cause.CONTEXT_DELETE if _was_removed(new, old) else Cause.EDIT
    if old and new and new[0].role == old[0].role and at.parent is not None:
        return Cause.EDIT
    return Cause.UNKNOWN


def _add_spawn_edge(judgement: ForkReport, spawn: Node | None, branch: Node) -> None:
    if spawn is not None:
        judgement.edges.append(Edge(Cause.SUB_AGENT, spawn, branch))


def _classify_same_message(tree: Tree, call: Call, other: Call, branch: Node, beside: Node) -> Cause:
    """The same message, and yet another node: its ids are others."""
    if call.requested_config_digest != other.requested_config_digest:
        return Cause.TOOLS_CHANGED
    if call.agent != other.agent:
        return Cause.SUB_AGENT
    said = (
        beside if beside.is_sampled else tree.nodes[branch.source_id] if branch.source_id != NO_NODE else None
    )
    if said is None or not (call.prompt_tokens and other.prompt_tokens):
        return Cause.UNKNOWN
    return Cause.THINK_STRIP if said.message.reasoning_content else Cause.DRIFT


def _was_removed(new: Sequence[Message], old: Sequence[Message]) -> bool:
    """Whether the first difference is something missing or emptied rather than something rewritten."""
    if any(message.key == new[0].key for message in old):
        return True
    return classify_replacement(new[0], old[0]) == "stub"


# -- the main history -----------------------------------------------------------------------------------


def _main_leaf(tree: Tree, judgement: ForkReport) -> Node | None:
    aside = {fork.branch.id for fork in judgement.forks if fork.cause in (Cause.SUB_AGENT, Cause.SIDE_CALL)}
    best: Node | None = None
    for leaf in tree.leaves():
        if leaf.agent != tree.calls[0].agent or leaf.id in judgement.undelivered:
            continue
        if best is None or (not _passes_through(leaf, aside), leaf.id) > (
            not _passes_through(best, aside),
            best.id,
        ):
            best = leaf
    return best


def _passes_through(leaf: Node, branches: set[int]) -> bool:
    return bool(branches) and any(node.id in branches for node in leaf.path())
