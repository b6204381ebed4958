"""Turns linked foreign calls into a tree.

The log says what a whole prompt was, not which ids each message of it added. So the ids between two
outputs sit, as context, on the later output, and messages in between add none: nodes meet by what they
say, and every path still spells prompt and output exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from branchline.core.call import AppliedEquivalence, Call, Delivery, Output
from branchline.core.echo import match_echo
from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS, Ids, Origin, as_ids, normalize_runs
from branchline.timelines.alignment import AlignmentMethod
from branchline.timelines.links import Link
from branchline.timelines.log import LoggedCall
from branchline.timelines.prefix_index import starts_with
from branchline.tree.delta import Delivered, NewNode, TreeDelta
from branchline.tree.node import NO_NODE, Node
from branchline.tree.tree import Tree

_UNVISITED, _VISITING, _ADDED = range(3)

OutputRef = tuple[int, int]
"""(call, output) in a log."""
_MAX_SOURCES = 16
"""Equal answers looked through for the best source of one message; more would make `OK` quadratic."""


@dataclass(frozen=True)
class BuiltTree:
    """A tree grown from a log, and which logged call each of its calls is."""

    tree: Tree
    call_order: list[int]


def build_tree(
    calls: Sequence[LoggedCall],
    links: Sequence[Link | None],
    left_out: set[OutputRef],
    *,
    ignore_tools: bool,
) -> BuiltTree:
    """Grows a tree from calls and what each continues."""
    grower = _TreeBuilder(calls, links, left_out, ignore_tools)
    order = _parents_first(links, grower.sources)
    for index in order:
        grower.add_call(index)
    return BuiltTree(grower.tree, order)


def _parents_first(links: Sequence[Link | None], sources: Sequence[dict[int, OutputRef]]) -> list[int]:
    """An order in which what a call continues, and what it shows again, comes before it."""
    order: list[int] = []
    state = [_UNVISITED] * len(links)
    # Calls whose own continuation says what they show: they cannot wait for it.
    given_up: set[int] = set()
    for first in range(len(links)):
        stack = [first]
        while stack:
            index = stack[-1]
            link = links[index]
            waiting: list[int] = []
            if state[index] == _UNVISITED:
                needed = [link.parent] if link is not None else []
                needed += [call for call, _ in sources[index].values() if call not in given_up]
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
                given_up.add(index)
                continue
            state[index] = _ADDED
            order.append(index)
    return order


class _TreeBuilder:
    def __init__(
        self,
        calls: Sequence[LoggedCall],
        links: Sequence[Link | None],
        left_out: set[OutputRef],
        ignore_tools: bool,
    ) -> None:
        self.tree = Tree()
        self.tree.is_chronological = False
        self.sources = _find_sources(calls, links)
        self._calls = calls
        self._links = links
        self._omitted = left_out
        self._ignore_tools = ignore_tools
        self._nodes: dict[OutputRef, Node] = {}
        self._inexact: set[OutputRef] = set()

    def add_call(self, index: int) -> None:
        """Adds one call whose parent is in the tree already."""
        call, link = self._calls[index], self._links[index]
        parent, start, ids, exact = self.tree.root, 0, call.prompt_ids, call.prompt_ids is not None
        if link is not None:
            place = (link.parent, link.output)
            parent, start, cut = self._nodes[place], link.depth, link.alignment
            if cut is not None:
                exact = exact and cut.method == AlignmentMethod.IDENTICAL and place not in self._inexact
                ids = None if ids is None else ids[cut.end :]
            elif ids is not None:
                # What it continues was logged without ids: the prompt itself says what stands there.
                path = self.tree.path_ids(parent)
                exact = starts_with(ids, path)
                ids = ids[len(path) :] if exact else None
        frame = b"" if self._ignore_tools else call.request.prompt_config_digest
        gap = NO_IDS if ids is None else ids
        new, prompt_node, echoes, shown = self._context_nodes(index, parent, start, frame)
        choices = [choice for choice in range(len(call.outputs)) if (index, choice) not in self._omitted]
        call_index, free = len(self.tree.calls), len(self.tree.nodes) + len(new)
        outputs = [
            _output_node(call, call_index, choice, gap, free + offset, prompt_node, exact)
            for offset, choice in enumerate(choices)
        ]
        record = Call(
            index=call_index,
            id=call.id or f"line-{call.line}",
            agent=call.agent,
            prompt_node=prompt_node,
            outputs=tuple(node.id for node in outputs),
            prompt_tokens=0 if call.prompt_ids is None else len(call.prompt_ids),
            prompt_config_digest=frame,
            requested_config_digest=call.request.prompt_config_digest,
            applied_equivalences=echoes,
            reused_nodes=shown,
        )
        self.tree.apply(TreeDelta((*new, *outputs), record))
        self.tree.apply(Delivered(record.index, Delivery.DELIVERED))
        for choice, node in zip(choices, outputs, strict=True):
            self._nodes[index, choice] = self.tree.nodes[node.id]
            if not exact:
                self._inexact.add((index, choice))

    def _context_nodes(
        self, index: int, parent: Node, start: int, frame: bytes
    ) -> tuple[list[NewNode], int, tuple[AppliedEquivalence, ...], tuple[int, ...]]:
        messages = self._calls[index].request.messages
        new: list[NewNode] = []
        echoes: list[AppliedEquivalence] = []
        shown: list[int] = []
        at: Node | None = parent
        parent_id = parent.id
        for place in range(start, len(messages)):
            message = messages[place]
            source = self._nodes.get(self.sources[index].get(place, (-1, -1)))
            if source is not None:
                shown.append(source.id)
                echoes += [
                    AppliedEquivalence(place, used) for used in match_echo(source.message, message) or ()
                ]
            at = self.tree.find_context_child(at, message, NO_IDS, frame) if at is not None else None
            if at is not None:
                parent_id = at.id
                continue
            node_id = len(self.tree.nodes) + len(new)
            new.append(NewNode(node_id, parent_id, message, NO_IDS, (), source.id if source else NO_NODE))
            parent_id = node_id
        return new, parent_id, tuple(echoes), tuple(shown)


def _find_sources(calls: Sequence[LoggedCall], links: Sequence[Link | None]) -> list[dict[int, OutputRef]]:
    """For each call, which of the messages it adds as context were sampled in another place, and where."""
    said: dict[bytes, list[OutputRef]] = {}
    for index, call in enumerate(calls):
        for choice, output in enumerate(call.outputs):
            said.setdefault(output.message.key, []).append((index, choice))
    sources: list[dict[int, OutputRef]] = []
    for index, (call, link) in enumerate(zip(calls, links, strict=True)):
        found: dict[int, OutputRef] = {}
        for place in range(link.depth if link is not None else 0, len(call.request.messages)):
            message = call.request.messages[place]
            if message.role == "assistant" and message.key in said:
                source = _best_source(calls, message, index, said[message.key][:_MAX_SOURCES])
                if source is not None:
                    found[place] = source
        sources.append(found)
    return sources


def _best_source(
    calls: Sequence[LoggedCall], message: Message, index: int, places: Sequence[OutputRef]
) -> OutputRef | None:
    ranked: list[tuple[bool, int, int, OutputRef]] = []
    for call, choice in places:
        used = match_echo(calls[call].outputs[choice].message, message) if call != index else None
        if used is not None:
            other_agent = calls[call].agent != calls[index].agent
            ranked.append((other_agent, len(used), calls[call].line, (call, choice)))
    return min(ranked)[-1] if ranked else None


def _output_node(
    call: LoggedCall, call_index: int, choice: int, gap: Ids, node_id: int, parent: int, exact: bool
) -> NewNode:
    output = call.outputs[choice]
    said = NO_IDS if output.ids is None else output.ids
    known = Output(
        call_index,
        choice,
        output.finish_reason,
        output.logprobs if output.ids is not None else None,
        normalize_runs(((len(said), 0),)),
        inexact=not (exact and output.ids_were_sampled),
    )
    spans = normalize_runs(((len(gap), Origin.CONTEXT), (len(said), Origin.SAMPLED)))
    ids = as_ids(np.concatenate((gap, said)))
    return NewNode(node_id, parent, output.message, ids, spans, NO_NODE, known)
