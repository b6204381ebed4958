"""The prefix tree of one session: every call's prompt and output is a path, and nothing is ever changed.

    turn = tree.prepare(request, codec)      # looks, mutates nothing
    delta = tree.plan(turn, generations)     # what a commit would add
    call = tree.apply(delta)                 # adds it

Context nodes are found by key and ids, sampled nodes are always new: calls of one session can run side
by side, and siblings are siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from branchline.chat.base import Codec, History, Piece, Shown
from branchline.core.call import Call, Delivery, Echo, Generation, Output, Request
from branchline.core.echo import Equivalence, echo
from branchline.core.errors import TreeError
from branchline.core.message import Message, ToolCall
from branchline.core.runs import NO_IDS, Ids, Origin, Runs, as_ids, compress, runs_of
from branchline.tree.defaults import SampledCalls
from branchline.tree.delta import Delivered, Delta, NewNode, Record
from branchline.tree.match import UNSEEN, Matcher, longest_path, reorder
from branchline.tree.node import NOWHERE, Node, root_node


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, ready for an engine, and what a commit needs to put its output in the right place."""

    request: Request
    parent: Node
    """The deepest node of the matched path that stays as it is."""
    messages: tuple[Message, ...]
    """The messages below `parent`, one for each piece."""
    pieces: tuple[Piece, ...]
    sources: tuple[int, ...]
    """For each piece the node it shows again, or NOWHERE."""
    opening: Ids
    prompt_ids: Ids
    echoes: tuple[Echo, ...]
    ambiguous: bool
    encoded: int
    rewritten: str


class Tree:
    """An append-only tree of messages and their ids."""

    def __init__(self, *, restore_reasoning: bool = True) -> None:
        self.is_chronological = True
        """Whether calls stand in the order they happened; a tree grown from a log cannot know."""
        self.nodes: list[Node] = [root_node()]
        self.calls: list[Call] = []
        self._deliveries: dict[int, Delivery] = {}
        self._resumed: set[int] = set()
        self._sampled: dict[bytes, list[Node]] = {}
        self._sampled_calls = SampledCalls()
        self._matcher = Matcher(self.root, self._delivery_of)
        self._matcher.restore_reasoning = restore_reasoning

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def token_count(self) -> int:
        """Stored tokens: of the tree, not of its paths."""
        return sum(len(node.ids) for node in self.nodes)

    def call_of(self, node: Node) -> Call:
        """The call that sampled a node."""
        if node.output is None:
            raise TreeError(f"node {node.id} was not sampled, so no call made it")
        return self.calls[node.output.call]

    def delivery(self, call: Call) -> Delivery:
        return self._deliveries.get(call.index, Delivery.PENDING)

    def _delivery_of(self, node: Node) -> Delivery:
        return self.delivery(self.call_of(node))

    # -- prepare -------------------------------------------------------------------------------------

    def prepare(self, request: Request, codec: Codec, history: History = "template") -> Turn:
        """The next prompt for a request. Mutates nothing."""
        first_key = _root_key(request.frame, request.messages[0].key)
        match = self._matcher.find(request, first_key)
        filled: tuple[Echo, ...] = ()
        if len(match.path) < len(request.messages) and request.messages[len(match.path)].calls:
            # Nobody said that, it seems; but a client may only have written out what its tools have anyway.
            meant, filled = self._sampled_calls.restore(request.messages, len(match.path), request.tools)
            match = self._matcher.find(replace(request, messages=meant), first_key) if filled else match
        path = match.path
        new, sources, messages, echoes = self._new_messages(request, match.messages, len(path))
        extension = codec.extend(path, new, tools=request.tools, template=request.template, history=history)
        kept = extension.kept
        again = path[kept:]
        parts = [node.ids for node in path[:kept]]
        parts += [piece.ids for piece in extension.pieces]
        parts.append(extension.opening)
        prompt_ids = np.concatenate(parts)
        prompt_ids.flags.writeable = False
        return Turn(
            request=request,
            parent=path[kept - 1] if kept else self.root,
            messages=(*(node.message for node in again), *messages),
            pieces=extension.pieces,
            sources=(*(_source_of(node) for node in again), *sources),
            opening=extension.opening,
            prompt_ids=prompt_ids,
            echoes=(*(Echo(-1, used) for used in request.equivalences), *match.echoes, *filled, *echoes),
            ambiguous=match.ambiguous,
            encoded=extension.encoded,
            rewritten=extension.rewritten,
        )

    def prepare_ids(self, request: Request, prompt_ids: Ids, codec: Codec) -> Turn:
        """A turn for a bare prompt: it goes on from the longest path whose ids it repeats."""
        path = longest_path(self.root, prompt_ids)
        rest = as_ids(prompt_ids[path[-1].end if path else 0 :])
        piece = Piece(rest, runs_of(((len(rest), Origin.CONTEXT),)))
        return Turn(
            request=request,
            parent=path[-1] if path else self.root,
            messages=(Message("user", codec.decode(rest)),) if len(rest) else (),
            pieces=(piece,) if len(rest) else (),
            sources=(NOWHERE,) if len(rest) else (),
            opening=NO_IDS,
            prompt_ids=prompt_ids,
            echoes=(),
            ambiguous=False,
            encoded=len(rest),
            rewritten="",
        )

    def _new_messages(
        self, request: Request, messages: Sequence[Message], start: int
    ) -> tuple[list[Shown], list[int], list[Message], list[Echo]]:
        """The messages behind the path; those that were sampled in another place are recognised."""
        shown: list[Shown] = []
        sources: list[int] = []
        kept: list[Message] = []
        echoes: list[Echo] = []
        pending = list(messages)
        for index in range(start, len(pending)):
            message = pending[index]
            source = self._sampled_elsewhere(message, request.agent)
            if source is None:
                shown.append(Shown(message))
                sources.append(NOWHERE)
                kept.append(message)
                continue
            used = echo(source.message, message) or ()
            echoes += [Echo(index, equivalence) for equivalence in used]
            moved = reorder(source.message, message, pending, index)
            if moved and Equivalence.REORDERED_CALLS not in used:
                echoes.append(Echo(index, Equivalence.REORDERED_RESULTS))
            for place, result in (moved or {}).items():
                pending[place] = result
            shown.append(Shown(source.message, source.sampled_ids))
            sources.append(source.id)
            kept.append(source.message)
        return shown, sources, kept, echoes

    def _sampled_elsewhere(self, message: Message, agent: str) -> Node | None:
        if message.role != "assistant":
            return None
        best: tuple[int, ...] | None = None
        found: Node | None = None
        for node in self._sampled.get(message.key, ()):
            used = echo(node.message, message)
            if used is None or (
                Equivalence.DROPPED_REASONING in used
                and (node.agent != agent or not self._matcher.restore_reasoning)
            ):
                continue
            ids = {call.id for call in node.message.calls if call.id} & {call.id for call in message.calls}
            rank = (-len(ids), node.agent != agent, self._delivery_of(node) in UNSEEN, len(used), node.id)
            if best is None or rank < best:
                best, found = rank, node
        return found

    # -- commit --------------------------------------------------------------------------------------

    def plan(
        self,
        turn: Turn,
        generations: Sequence[Generation],
        call_id: str = "",
        codec: Codec | None = None,
        clock: float = 0.0,
    ) -> Delta:
        """What committing these outputs of a turn adds. Mutates nothing; raises where they do not fit."""
        if not generations:
            raise TreeError("commit: got no generation, expected one for each choice")
        new: list[NewNode] = []
        parent_id = turn.parent.id
        parent: Node | None = turn.parent
        for message, piece, source in zip(turn.messages, turn.pieces, turn.sources, strict=True):
            if parent is not None:
                parent = self.context_child(parent, message, piece.ids, turn.request.frame)
            if parent is not None:
                parent_id = parent.id
                continue
            node_id = len(self.nodes) + len(new)
            new.append(NewNode(node_id, parent_id, message, piece.ids, piece.spans, source))
            parent_id = node_id
        call_index = len(self.calls)
        prompt_node = parent_id
        outputs: list[int] = []
        for choice, generation in enumerate(generations):
            ids, output = _read_generation(generation, call_index, choice)
            message = generation.message or (
                codec.parse(ids, generation.finish, turn.request.tools, turn.request.template)
                if codec
                else Message("assistant")
            )
            node_id = len(self.nodes) + len(new)
            spans = runs_of(((len(turn.opening), Origin.TEMPLATE), (len(ids), Origin.SAMPLED)))
            joined = as_ids(np.concatenate((turn.opening, ids)))
            new.append(NewNode(node_id, prompt_node, message, joined, spans, NOWHERE, output))
            outputs.append(node_id)
        call = Call(
            index=call_index,
            id=call_id or f"call-{call_index}",
            agent=turn.request.agent,
            prompt_node=prompt_node,
            outputs=tuple(outputs),
            prompt_tokens=len(turn.prompt_ids),
            frame=turn.request.frame,
            tools=turn.request.frame,
            echoes=turn.echoes,
            ambiguous_echo=turn.ambiguous,
            encoded_tokens=turn.encoded,
            rewritten=turn.rewritten,
            retry=turn.request.retry,
            spawned_by=turn.request.spawned_by,
            sampling=turn.request.sampling,
            shown=tuple(source for source in turn.sources if source != NOWHERE),
            clock=clock,
            trained=turn.request.trained,
            resumes=self._resumed_index(turn.request.resumes),
            instructed=turn.request.instructed,
        )
        return Delta(tuple(new), call)

    def find_call(self, call_id: str) -> Call | None:
        """The call with this id, the latest where clients gave it twice."""
        return next((call for call in reversed(self.calls) if call.id == call_id), None)

    def sampled_call(self, call_id: str) -> ToolCall | None:
        """The tool call that was sampled and has this id on the wire."""
        return self._sampled_calls.find(call_id)

    def is_resumed(self, call: Call) -> bool:
        """Whether another call went on from it, so that its tokens count there."""
        return call.index in self._resumed

    def _resumed_index(self, call_id: str) -> int:
        call = self.find_call(call_id) if call_id else None
        if call is None:
            return NOWHERE
        if call.index in self._resumed:
            raise TreeError(f"commit: call {call_id} was resumed already, and tokens count once")
        return call.index

    def apply(self, record: Record) -> Call:
        """Adds what a record says, whole or not at all."""
        if isinstance(record, Delivered):
            self._deliveries[record.call] = record.delivery
            return self.calls[record.call]
        if record.call.index != len(self.calls) or (record.nodes and record.nodes[0].id != len(self.nodes)):
            raise TreeError(
                f"commit of call {record.call.index}: expected call {len(self.calls)} "
                f"with nodes from {len(self.nodes)}; another commit came between plan and apply"
            )
        # The call first: whoever prepares meanwhile may meet a node of it.
        self.calls.append(record.call)
        if record.call.resumes != NOWHERE:
            self._resumed.add(record.call.resumes)
        for new in record.nodes:
            self._add(new, record.call)
        return record.call

    def _add(self, new: NewNode, call: Call) -> None:
        parent = self.nodes[new.parent]
        key, frame = new.message.key, (call.frame if parent.parent is None else b"")
        if parent.parent is None:
            key = _root_key(frame, key)
        sampled_ids = None
        if new.output is not None:
            sampled = new.spans[-1][0] if new.spans and new.spans[-1][1] == Origin.SAMPLED else 0
            sampled_ids = new.ids[len(new.ids) - sampled :]
        elif new.source != NOWHERE:
            sampled_ids = self.nodes[new.source].sampled_ids
        node = Node(
            new.id,
            parent,
            key,
            new.message,
            new.ids,
            new.spans,
            output=new.output,
            sampled_ids=sampled_ids,
            source=new.source,
            frame=frame,
            agent=call.agent if new.output is not None else None,
        )
        self._attach(node)

    def _attach(self, node: Node) -> None:
        self.nodes.append(node)
        if node.parent is not None:
            if node.parent.children is None:
                node.parent.children = {}
            node.parent.children.setdefault(node.key, []).append(node)
        if node.output is not None:
            self._sampled.setdefault(node.message.key, []).append(node)
            self._sampled_calls.add(node.message)

    def context_child(self, parent: Node, message: Message, ids: Ids, frame: bytes) -> Node | None:
        """The child that adds this message as these ids, if there is one; sampled nodes do not count."""
        key = message.key if parent.parent is not None else _root_key(frame, message.key)
        for child in (parent.children or {}).get(key, ()):
            if child.output is None and np.array_equal(child.ids, ids):
                return child
        return None

    # -- reading -------------------------------------------------------------------------------------

    def moment(self) -> Callable[[], Tree]:
        """The tree as it is now, for whoever reads on while it grows.

        This takes note of what there is and is quick: no commit may run beside it. The call it gives makes
        the tree of that, and can be made anywhere at any time. Nodes never change but for their children, so
        only those are made again.
        """
        nodes, calls = self.nodes[1:], self.calls[:]
        deliveries, resumed = self._deliveries.copy(), self._resumed.copy()

        def tree() -> Tree:
            then = Tree(restore_reasoning=self._matcher.restore_reasoning)
            then.is_chronological = self.is_chronological
            then.calls, then._deliveries, then._resumed = calls, deliveries, resumed
            for node in nodes:
                assert node.parent is not None
                then._attach(node.alone(then.nodes[node.parent.id]))
            return then

        return tree

    def path_ids(self, node: Node) -> Ids:
        """The ids from the root to a node: what the model saw, and said."""
        return as_ids(np.concatenate([entry.ids for entry in node.path()] or [node.ids]))

    def leaves(self) -> list[Node]:
        """Nodes nothing follows, in the order they were added."""
        return [node for node in self.nodes if not node.children and node.parent is not None]


def _root_key(frame: bytes, key: bytes) -> bytes:
    """Other tools or template arguments make another first message, whatever it says."""
    return xxhash.xxh3_128_digest(frame + key) if frame else key


def _source_of(node: Node) -> int:
    return node.id if node.is_sampled else node.source


def _read_generation(generation: Generation, call: int, choice: int) -> tuple[Ids, Output]:
    ids = as_ids(generation.ids)
    count = len(ids)
    logprobs = generation.logprobs
    if logprobs is not None:
        logprobs = np.array(logprobs, np.float32)
        if len(logprobs) != count:
            raise TreeError(f"logprobs: got {len(logprobs)} for {count} sampled ids, expected one for each")
        logprobs.flags.writeable = False
    if isinstance(generation.versions, int | np.integer):
        versions: Runs = runs_of(((count, int(generation.versions)),))
    else:
        if len(generation.versions) != count:
            raise TreeError(
                f"versions: got {len(generation.versions)} for {count} sampled ids, expected one for each"
            )
        versions = compress(np.asarray(generation.versions))
    if any(not 0 <= version < 2**31 for _, version in versions):
        raise TreeError(
            f"versions: got {max(v for _, v in versions)}, expected whole numbers from 0 to 2147483647"
        )
    routed = generation.routed_experts
    if routed is not None:
        routed = np.array(routed)
        if len(routed) != count:
            raise TreeError(
                f"routed_experts: got {len(routed)} rows for {count} sampled ids, expected one for each"
            )
        routed.flags.writeable = False
    return ids, Output(call, choice, generation.finish, logprobs, versions, routed, generation.inexact)
