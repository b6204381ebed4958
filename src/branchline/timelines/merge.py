"""Merges calls captured elsewhere into one tree, independent of their order.

The rule, AgentJet's, is applied to all calls at once: a timeline whose messages are a prefix of another
timeline is absorbed by it, and its output is marked as sampled there. By default only if the ids are a prefix
too, so that the context of every output is what was logged for its call. A `MergePolicy` can allow more; then
an output whose context has other ids than the logged ones is marked `inexact`. Calls of different agents or
models never continue each other.

    merged = merge(read_log("calls.jsonl"))
    merged.tree, merged.line_of_call, merged.repairs

A log contains the ids of a whole prompt, not the ids that each message added. So in the tree the ids between
two outputs belong, as context, to the later output, and the messages between them have no ids. Context nodes
are found by their messages, and every path still has exactly the ids of prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from branchline.core.call import AppliedEquivalence, Call, Delivery, Output
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS, Ids, Origin, as_ids, normalize_runs
from branchline.timelines.alignment import AlignmentMethod
from branchline.timelines.links import KeptApart, Link, MergePolicy, find_links
from branchline.timelines.log import LoggedCall
from branchline.timelines.responses import join_copies, unknown_facts
from branchline.tree.match import match_echo
from branchline.tree.tree import NO_NODE, Delivered, NewNode, Node, Tree, TreeDelta

OutputRef = tuple[int, int]
"""(call, output) in a log."""
_MAX_SOURCES = 16
"""Equal answers compared to find the source of one message; without a limit, common answers take quadratic
time."""
_MAX_SHOWN = 5
"""How many names an error lists."""
_UNVISITED, _VISITING, _ADDED = range(3)


@dataclass(frozen=True)
class Repair:
    """A logged call in whose prompt the sampled ids of an earlier output were put back."""

    line: int
    method: AlignmentMethod


@dataclass
class MergeResult:
    """The calls of one session, linked; the tree is built on first use."""

    calls: list[LoggedCall]
    links: list[Link | None]
    policy: MergePolicy
    duplicates: list[OutputRef] = field(default_factory=list)
    """Outputs left out because an equal one is kept."""
    repeated: list[LoggedCall] = field(default_factory=list)
    """Calls with the outputs that are left out because another line has them: `join_copies`."""
    contradicting: list[int] = field(default_factory=list)
    """Lines with another answer than an earlier line has under the same response id and index; both are
    kept."""
    kept_apart: list[KeptApart] = field(default_factory=list)
    """Calls that would continue a longer path if the policy allowed it."""

    @property
    def repairs(self) -> list[Repair]:
        return [
            Repair(call.line, link.alignment.method)
            for call, link in zip(self.calls, self.links, strict=True)
            if link is not None
            and link.alignment is not None
            and link.alignment.method != AlignmentMethod.IDENTICAL
        ]

    @property
    def tree(self) -> Tree:
        return self._built.tree

    @cached_property
    def line_of_call(self) -> list[int]:
        """The log line of each call of the tree."""
        return [self.calls[index].line for index in self._built.call_order]

    def logged_call(self, call_index: int) -> LoggedCall:
        """The logged call of a call of the tree."""
        return self.calls[self._built.call_order[call_index]]

    @cached_property
    def _built(self) -> _TreeBuilder:
        return _TreeBuilder(self.calls, self.links, set(self.duplicates), self.policy.ignore_tools)

    def timelines(self) -> Iterator[tuple[list[Message], list[int]]]:
        """Yields merged timelines as (messages, positions of sampled messages), without building the tree."""
        continued = {(link.parent, link.output) for link in self.links if link is not None}
        dropped = set(self.duplicates)
        for index, call in enumerate(self.calls):
            sampled: list[int] | None = None
            for choice, output in enumerate(call.outputs):
                if (index, choice) in continued or (index, choice) in dropped:
                    continue
                if sampled is None:
                    sampled = self._sampled_positions(index)
                yield [*call.request.messages, output.message], [*sampled, len(call.request.messages)]

    def _sampled_positions(self, index: int) -> list[int]:
        positions: list[int] = []
        link = self.links[index]
        while link is not None:
            positions.append(link.depth - 1)
            link = self.links[link.parent]
        return positions[::-1]


def merge(calls: Iterable[LoggedCall], policy: MergePolicy | None = None) -> MergeResult:
    """Merges the calls of one session, in time linear in the log, except for many answers with equal text
    and other ids, each of which is compared with each call that shows the text. Raises InputError for calls
    of several sessions: `group_by_session` separates them."""
    policy = policy or MergePolicy()
    calls = list(calls)
    if len(sessions := sorted({call.session for call in calls})) > 1:
        shown = ", ".join(map(repr, sessions[:_MAX_SHOWN])) + ", …" * (len(sessions) > _MAX_SHOWN)
        raise InputError(
            f"calls: got calls of {len(sessions)} sessions ({shown}), expected those of one: merge each of "
            "group_by_session(calls).values()"
        )
    copies = join_copies(calls)
    calls = copies.calls
    scopes = _scopes(calls)
    found = find_links(calls, scopes, policy)
    merged = MergeResult(
        calls,
        found.links,
        policy,
        repeated=copies.left_out,
        contradicting=copies.contradicting,
        kept_apart=found.kept_apart,
    )
    if policy.deduplicate:
        merged.duplicates = list(_duplicates(calls, scopes, merged.links, policy))
    return merged


def _texts(message: Message) -> tuple[object, ...]:
    """What two equal messages share, however they were written as JSON."""
    return message.key, message.content, message.reasoning_content


def _to_bytes(values: Ids | None) -> bytes | None:
    return None if values is None else values.tobytes()


def _scopes(calls: Sequence[LoggedCall]) -> list[int]:
    """Returns equal numbers for calls that may be linked: those of one agent and one model."""
    numbers: dict[tuple[str, str], int] = {}
    return [numbers.setdefault((call.agent, call.model), len(numbers)) for call in calls]


def _duplicates(
    calls: Sequence[LoggedCall],
    scopes: Sequence[int],
    links: Sequence[Link | None],
    policy: MergePolicy,
) -> Iterator[OutputRef]:
    """Yields outputs that are equal to another one of an equal prompt; continued ones are kept, then those
    of which most is known."""
    continued = {(link.parent, link.output) for link in links if link is not None}
    kept: set[object] = set()
    outputs = [(index, choice) for index, call in enumerate(calls) for choice in range(len(call.outputs))]

    def order(place: OutputRef) -> tuple[bool, ...]:
        call, output = calls[place[0]], calls[place[0]].outputs[place[1]]
        return place not in continued, not output.ids_were_sampled, *unknown_facts(call.prompt_ids, output)

    for index, choice in sorted(outputs, key=order):
        call, output = calls[index], calls[index].outputs[choice]
        identity: tuple[object, ...] = (
            scopes[index],
            call.request.message_keys,
            b"" if policy.ignore_tools else call.request.prompt_config_digest,
            _texts(output.message),
        )
        if not policy.inexact:
            identity += (_to_bytes(call.prompt_ids), _to_bytes(output.ids))
        if identity in kept and (index, choice) not in continued:
            yield index, choice
        kept.add(identity)


# -- building the tree ---------------------------------------------------------------------------------


class _TreeBuilder:
    """Builds a tree from linked calls; `call_order` has the index of the logged call of each tree call."""

    def __init__(
        self,
        calls: Sequence[LoggedCall],
        links: Sequence[Link | None],
        left_out: set[OutputRef],
        ignore_tools: bool,
    ) -> None:
        self.tree = Tree()
        self.tree.is_chronological = False
        self._calls = calls
        self._links = links
        self._left_out = left_out
        self._ignore_tools = ignore_tools
        self._sources = _find_sources(calls, links)
        self._nodes: dict[OutputRef, Node] = {}
        self._inexact: set[OutputRef] = set()
        self._estimated: set[OutputRef] = set()
        self.call_order = _parents_first(links, self._sources)
        for index in self.call_order:
            self._add_call(index)

    def _add_call(self, index: int) -> None:
        """Adds a call whose parent is already in the tree."""
        call, link = self._calls[index], self._links[index]
        parent, start, ids, exact = self.tree.root, 0, call.prompt_ids, call.prompt_ids is not None
        estimated = ids is None
        if link is not None:
            continued = (link.parent, link.output)
            parent, start, alignment = self._nodes[continued], link.depth, link.alignment
            if alignment is not None and ids is not None:
                gap = ids[alignment.end :]
                if alignment.method != AlignmentMethod.IDENTICAL or continued in self._inexact:
                    # What was put back on the path may be what this prompt has.
                    exact = np.array_equal(np.concatenate((self.tree.path_ids(parent), gap)), ids)
                    estimated = not exact and (
                        alignment.method == AlignmentMethod.ESTIMATE or continued in self._estimated
                    )
                ids = gap
            elif ids is not None:
                # Ids are missing on the path: the prompt begins with those that are known.
                ids = ids[parent.end :]
        config_digest = b"" if self._ignore_tools else call.request.prompt_config_digest
        gap = NO_IDS if ids is None else ids
        new, prompt_node, applied, reused = self._context_nodes(index, parent, start, config_digest)
        choices = [choice for choice in range(len(call.outputs)) if (index, choice) not in self._left_out]
        call_index, next_id = len(self.tree.calls), len(self.tree.nodes) + len(new)
        outputs = [
            _output_node(call, call_index, choice, gap, next_id + offset, prompt_node, exact, estimated)
            for offset, choice in enumerate(choices)
        ]
        record = Call(
            index=call_index,
            id=call.id or f"line-{call.line}",
            agent=call.agent,
            prompt_node=prompt_node,
            outputs=tuple(node.id for node in outputs),
            prompt_tokens=0 if call.prompt_ids is None else len(call.prompt_ids),
            prompt_config_digest=config_digest,
            requested_config_digest=call.request.prompt_config_digest,
            applied_equivalences=applied,
            reused_nodes=reused,
            sampling={"model": call.model} if call.model else {},
            trainable=call.request.trainable,
        )
        self.tree.apply(TreeDelta((*new, *outputs), record))
        # Either all outputs of a call were cut off or none, see `join_copies`.
        delivery = Delivery.CANCELLED if call.outputs[0].is_cut else Delivery.DELIVERED
        self.tree.apply(Delivered(record.index, delivery))
        for choice, node in zip(choices, outputs, strict=True):
            self._nodes[index, choice] = self.tree.nodes[node.id]
            if not exact:
                self._inexact.add((index, choice))
            if estimated:
                self._estimated.add((index, choice))

    def _context_nodes(
        self, index: int, parent: Node, start: int, config_digest: bytes
    ) -> tuple[list[NewNode], int, tuple[AppliedEquivalence, ...], tuple[int, ...]]:
        """Returns the missing context nodes, the last prompt node, the equivalences and the reused nodes."""
        messages = self._calls[index].request.messages
        new: list[NewNode] = []
        applied: list[AppliedEquivalence] = []
        reused: list[int] = []
        node: Node | None = parent
        parent_id = parent.id
        for position in range(start, len(messages)):
            message = messages[position]
            source = self._nodes.get(self._sources[index].get(position, (-1, -1)))
            if source is not None:
                reused.append(source.id)
                applied += [
                    AppliedEquivalence(position, used) for used in match_echo(source.message, message) or ()
                ]
            node = (
                self.tree.find_context_child(node, message, NO_IDS, config_digest)
                if node is not None
                else None
            )
            if node is not None:
                parent_id = node.id
                continue
            node_id = len(self.tree.nodes) + len(new)
            new.append(NewNode(node_id, parent_id, message, NO_IDS, (), source.id if source else NO_NODE))
            parent_id = node_id
        return new, parent_id, tuple(applied), tuple(reused)


def _output_node(
    call: LoggedCall,
    call_index: int,
    choice: int,
    gap: Ids,
    node_id: int,
    parent: int,
    exact: bool,
    estimated: bool,
) -> NewNode:
    output = call.outputs[choice]
    sampled = NO_IDS if output.ids is None else output.ids
    data = Output(
        call_index,
        choice,
        output.finish_reason,
        output.logprobs if output.ids is not None else None,
        normalize_runs(((len(sampled), 0),)),
        inexact=not (exact and output.ids_were_sampled),
        estimated=estimated or not output.ids_were_sampled,
    )
    spans = normalize_runs(((len(gap), Origin.CONTEXT), (len(sampled), Origin.SAMPLED)))
    ids = as_ids(np.concatenate((gap, sampled)))
    return NewNode(node_id, parent, output.message, ids, spans, NO_NODE, data)


def _parents_first(links: Sequence[Link | None], sources: Sequence[dict[int, OutputRef]]) -> list[int]:
    """Returns an order in which each call follows the call it continues and the calls whose outputs it
    repeats."""
    order: list[int] = []
    state = [_UNVISITED] * len(links)
    # Calls that continue a call which repeats their output: that call does not wait for them.
    in_cycle: set[int] = set()
    for first in range(len(links)):
        stack = [first]
        while stack:
            index = stack[-1]
            link = links[index]
            waiting: list[int] = []
            if state[index] == _UNVISITED:
                needed = [link.parent] if link is not None else []
                needed += [call for call, _ in sources[index].values() if call not in in_cycle]
                waiting = [other for other in needed if state[other] == _UNVISITED]
                state[index] = _VISITING
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if state[index] != _VISITING:
                continue
            if link is not None and state[link.parent] != _ADDED:
                state[index] = _UNVISITED
                in_cycle.add(index)
                continue
            state[index] = _ADDED
            order.append(index)
    return order


def _find_sources(calls: Sequence[LoggedCall], links: Sequence[Link | None]) -> list[dict[int, OutputRef]]:
    """Returns for each call the outputs that its context messages repeat, by message position. An output that
    was cut off is none of them: only a call that continues it shows that it reached its client."""
    outputs: dict[bytes, list[OutputRef]] = {}
    for index, call in enumerate(calls):
        for choice, output in enumerate(call.outputs):
            if not output.is_cut:
                outputs.setdefault(output.message.key, []).append((index, choice))
    sources: list[dict[int, OutputRef]] = []
    scopes = _scopes(calls)
    for index, (call, link) in enumerate(zip(calls, links, strict=True)):
        found: dict[int, OutputRef] = {}
        for position in range(link.depth if link is not None else 0, len(call.request.messages)):
            message = call.request.messages[position]
            if message.role == "assistant" and message.key in outputs:
                source = _best_source(calls, scopes, message, index, outputs[message.key][:_MAX_SOURCES])
                if source is not None:
                    found[position] = source
        sources.append(found)
    return sources


def _best_source(
    calls: Sequence[LoggedCall],
    scopes: Sequence[int],
    message: Message,
    index: int,
    candidates: Sequence[OutputRef],
) -> OutputRef | None:
    ranked: list[tuple[bool, int, int, OutputRef]] = []
    for call, choice in candidates:
        used = match_echo(calls[call].outputs[choice].message, message) if call != index else None
        if used is not None:
            ranked.append((scopes[call] != scopes[index], len(used), calls[call].line, (call, choice)))
    return min(ranked)[-1] if ranked else None
