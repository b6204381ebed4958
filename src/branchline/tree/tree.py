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

from branchline.chat.base import Codec, HistoryPolicy, MessageTokens, NewMessage
from branchline.core.call import AppliedEquivalence, Call, Delivery, Generation, Output, Request
from branchline.core.echo import Equivalence, match_echo
from branchline.core.errors import TreeError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import NO_IDS, Ids, Origin, Runs, as_ids, encode_runs, normalize_runs
from branchline.tree.argument_defaults import SampledToolCalls
from branchline.tree.delta import Delivered, NewNode, TreeDelta, TreeRecord
from branchline.tree.match import UNDELIVERED, PathMatcher, longest_raw_path, reorder_tool_results
from branchline.tree.node import NO_NODE, Node, root_node


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, ready for an engine, and what a commit needs to put its output in the right place."""

    request: Request
    parent: Node
    """The deepest node of the matched path that stays as it is."""
    messages: tuple[Message, ...]
    """The messages below `parent`, one for each piece."""
    message_tokens: tuple[MessageTokens, ...]
    source_ids: tuple[int, ...]
    """For each piece the node it shows again, or NOWHERE."""
    generation_prompt_ids: Ids
    prompt_ids: Ids
    applied_equivalences: tuple[AppliedEquivalence, ...]
    ambiguous_match: bool
    encoded_tokens: int
    rewrite_reason: str


class Tree:
    """An append-only tree of messages and their ids."""

    def __init__(self, *, restore_reasoning: bool = True) -> None:
        self.is_chronological = True
        """Whether calls stand in the order they happened; a tree grown from a log cannot know."""
        self.nodes: list[Node] = [root_node()]
        self.calls: list[Call] = []
        self._deliveries: dict[int, Delivery] = {}
        self._resumed_calls: set[int] = set()
        self._sampled_by_key: dict[bytes, list[Node]] = {}
        self._sampled_tool_calls = SampledToolCalls()
        self._matcher = PathMatcher(self.root, self._delivery_of)
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
        return self.calls[node.output.call_index]

    def delivery(self, call: Call) -> Delivery:
        return self._deliveries.get(call.index, Delivery.PENDING)

    def _delivery_of(self, node: Node) -> Delivery:
        return self.delivery(self.call_of(node))

    # -- prepare -------------------------------------------------------------------------------------

    def prepare(self, request: Request, codec: Codec, history: HistoryPolicy = "template") -> Turn:
        """The next prompt for a request. Mutates nothing."""
        first_key = _first_message_key(request.prompt_config_digest, request.messages[0].key)
        match = self._matcher.find(request, first_key)
        filled: tuple[AppliedEquivalence, ...] = ()
        if len(match.path) < len(request.messages) and request.messages[len(match.path)].tool_calls:
            # Nobody said that, it seems; but a client may only have written out what its tools have anyway.
            meant, filled = self._sampled_tool_calls.restore_sampled_arguments(
                request.messages, len(match.path), request.tools
            )
            match = self._matcher.find(replace(request, messages=meant), first_key) if filled else match
        path = match.path
        new, sources, messages, echoes = self._new_messages(request, match.messages, len(path))
        extension = codec.extend(
            path, new, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs, history=history
        )
        kept = extension.kept
        again = path[kept:]
        parts = [node.ids for node in path[:kept]]
        parts += [piece.ids for piece in extension.message_tokens]
        parts.append(extension.generation_prompt_ids)
        prompt_ids = np.concatenate(parts)
        prompt_ids.flags.writeable = False
        return Turn(
            request=request,
            parent=path[kept - 1] if kept else self.root,
            messages=(*(node.message for node in again), *messages),
            message_tokens=extension.message_tokens,
            source_ids=(*(_source_id(node) for node in again), *sources),
            generation_prompt_ids=extension.generation_prompt_ids,
            prompt_ids=prompt_ids,
            applied_equivalences=(
                *(AppliedEquivalence(-1, used) for used in request.equivalences),
                *match.applied_equivalences,
                *filled,
                *echoes,
            ),
            ambiguous_match=match.ambiguous,
            encoded_tokens=extension.encoded_tokens,
            rewrite_reason=extension.rewrite_reason,
        )

    def prepare_ids(self, request: Request, prompt_ids: Ids, codec: Codec) -> Turn:
        """A turn for a bare prompt: it goes on from the longest path whose ids it repeats."""
        path = longest_raw_path(self.root, prompt_ids)
        rest = as_ids(prompt_ids[path[-1].end if path else 0 :])
        piece = MessageTokens(rest, normalize_runs(((len(rest), Origin.CONTEXT),)))
        return Turn(
            request=request,
            parent=path[-1] if path else self.root,
            messages=(Message("user", codec.decode(rest)),) if len(rest) else (),
            message_tokens=(piece,) if len(rest) else (),
            source_ids=(NO_NODE,) if len(rest) else (),
            generation_prompt_ids=NO_IDS,
            prompt_ids=prompt_ids,
            applied_equivalences=(),
            ambiguous_match=False,
            encoded_tokens=len(rest),
            rewrite_reason="",
        )

    def _new_messages(
        self, request: Request, messages: Sequence[Message], start: int
    ) -> tuple[list[NewMessage], list[int], list[Message], list[AppliedEquivalence]]:
        """The messages behind the path; those that were sampled in another place are recognised."""
        shown: list[NewMessage] = []
        sources: list[int] = []
        kept: list[Message] = []
        echoes: list[AppliedEquivalence] = []
        pending = list(messages)
        for index in range(start, len(pending)):
            message = pending[index]
            source = self._find_sampled_elsewhere(message, request.agent)
            if source is None:
                shown.append(NewMessage(message))
                sources.append(NO_NODE)
                kept.append(message)
                continue
            used = match_echo(source.message, message) or ()
            echoes += [AppliedEquivalence(index, equivalence) for equivalence in used]
            moved = reorder_tool_results(source.message, message, pending, index)
            if moved and Equivalence.REORDERED_CALLS not in used:
                echoes.append(AppliedEquivalence(index, Equivalence.REORDERED_RESULTS))
            for place, result in (moved or {}).items():
                pending[place] = result
            shown.append(NewMessage(source.message, source.sampled_ids))
            sources.append(source.id)
            kept.append(source.message)
        return shown, sources, kept, echoes

    def _find_sampled_elsewhere(self, message: Message, agent: str) -> Node | None:
        if message.role != "assistant":
            return None
        best: tuple[int, ...] | None = None
        found: Node | None = None
        for node in self._sampled_by_key.get(message.key, ()):
            used = match_echo(node.message, message)
            if used is None or (
                Equivalence.DROPPED_REASONING in used
                and (node.agent != agent or not self._matcher.restore_reasoning)
            ):
                continue
            ids = {call.id for call in node.message.tool_calls if call.id} & {
                call.id for call in message.tool_calls
            }
            rank = (
                -len(ids),
                node.agent != agent,
                self._delivery_of(node) in UNDELIVERED,
                len(used),
                node.id,
            )
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
        template_time: float = 0.0,
    ) -> TreeDelta:
        """What committing these outputs of a turn adds. Mutates nothing; raises where they do not fit."""
        if not generations:
            raise TreeError("commit: got no generation, expected one for each choice")
        new: list[NewNode] = []
        parent_id = turn.parent.id
        parent: Node | None = turn.parent
        for message, piece, source in zip(turn.messages, turn.message_tokens, turn.source_ids, strict=True):
            if parent is not None:
                parent = self.find_context_child(
                    parent, message, piece.ids, turn.request.prompt_config_digest
                )
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
            ids, output = _check_generation(generation, call_index, choice)
            message = generation.message or (
                codec.parse(
                    ids, generation.finish_reason, turn.request.tools, turn.request.chat_template_kwargs
                )
                if codec
                else Message("assistant")
            )
            node_id = len(self.nodes) + len(new)
            spans = normalize_runs(
                ((len(turn.generation_prompt_ids), Origin.TEMPLATE), (len(ids), Origin.SAMPLED))
            )
            joined = as_ids(np.concatenate((turn.generation_prompt_ids, ids)))
            new.append(NewNode(node_id, prompt_node, message, joined, spans, NO_NODE, output))
            outputs.append(node_id)
        call = Call(
            index=call_index,
            id=call_id or f"call-{call_index}",
            agent=turn.request.agent,
            prompt_node=prompt_node,
            outputs=tuple(outputs),
            prompt_tokens=len(turn.prompt_ids),
            prompt_config_digest=turn.request.prompt_config_digest,
            requested_config_digest=turn.request.prompt_config_digest,
            applied_equivalences=turn.applied_equivalences,
            ambiguous_match=turn.ambiguous_match,
            encoded_tokens=turn.encoded_tokens,
            rewrite_reason=turn.rewrite_reason,
            retry_count=turn.request.retry_count,
            spawned_by=turn.request.spawned_by,
            sampling=turn.request.sampling,
            reused_nodes=tuple(source for source in turn.source_ids if source != NO_NODE),
            template_time=template_time,
            trainable=turn.request.trainable,
            resumed_call_index=self._resumed_call_index(turn.request.resume_call_id),
            has_instructions=turn.request.has_instructions,
        )
        return TreeDelta(tuple(new), call)

    def find_call(self, call_id: str) -> Call | None:
        """The call with this id, the latest where clients gave it twice."""
        return next((call for call in reversed(self.calls) if call.id == call_id), None)

    def find_sampled_tool_call(self, call_id: str) -> ToolCall | None:
        """The tool call that was sampled and has this id on the wire."""
        return self._sampled_tool_calls.find(call_id)

    def is_resumed(self, call: Call) -> bool:
        """Whether another call went on from it, so that its tokens count there."""
        return call.index in self._resumed_calls

    def _resumed_call_index(self, call_id: str) -> int:
        call = self.find_call(call_id) if call_id else None
        if call is None:
            return NO_NODE
        if call.index in self._resumed_calls:
            raise TreeError(f"commit: call {call_id} was resumed already, and tokens count once")
        return call.index

    def apply(self, record: TreeRecord) -> Call:
        """Adds what a record says, whole or not at all."""
        if isinstance(record, Delivered):
            self._deliveries[record.call_index] = record.delivery
            return self.calls[record.call_index]
        if record.call.index != len(self.calls) or (record.nodes and record.nodes[0].id != len(self.nodes)):
            raise TreeError(
                f"commit of call {record.call.index}: expected call {len(self.calls)} "
                f"with nodes from {len(self.nodes)}; another commit came between plan and apply"
            )
        # The call first: whoever prepares meanwhile may meet a node of it.
        self.calls.append(record.call)
        if record.call.resumed_call_index != NO_NODE:
            self._resumed_calls.add(record.call.resumed_call_index)
        for new in record.nodes:
            self._add_node(new, record.call)
        return record.call

    def _add_node(self, new: NewNode, call: Call) -> None:
        parent = self.nodes[new.parent_id]
        key, frame = new.message.key, (call.prompt_config_digest if parent.parent is None else b"")
        if parent.parent is None:
            key = _first_message_key(frame, key)
        sampled_ids = None
        if new.output is not None:
            sampled = new.spans[-1][0] if new.spans and new.spans[-1][1] == Origin.SAMPLED else 0
            sampled_ids = new.ids[len(new.ids) - sampled :]
        elif new.source_id != NO_NODE:
            sampled_ids = self.nodes[new.source_id].sampled_ids
        node = Node(
            new.id,
            parent,
            key,
            new.message,
            new.ids,
            new.spans,
            output=new.output,
            sampled_ids=sampled_ids,
            source_id=new.source_id,
            prompt_config_digest=frame,
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
            self._sampled_by_key.setdefault(node.message.key, []).append(node)
            self._sampled_tool_calls.add(node.message)

    def find_context_child(
        self, parent: Node, message: Message, ids: Ids, prompt_config_digest: bytes
    ) -> Node | None:
        """The child that adds this message as these ids, if there is one; sampled nodes do not count."""
        key = (
            message.key
            if parent.parent is not None
            else _first_message_key(prompt_config_digest, message.key)
        )
        for child in (parent.children or {}).get(key, ()):
            if child.output is None and np.array_equal(child.ids, ids):
                return child
        return None

    # -- reading -------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[], Tree]:
        """The tree as it is now, for whoever reads on while it grows.

        This takes note of what there is and is quick: no commit may run beside it. The call it gives makes
        the tree of that, and can be made anywhere at any time. Nodes never change but for their children, so
        only those are recreated.
        """
        nodes, calls = self.nodes[1:], self.calls[:]
        deliveries, resumed = self._deliveries.copy(), self._resumed_calls.copy()

        def tree() -> Tree:
            then = Tree(restore_reasoning=self._matcher.restore_reasoning)
            then.is_chronological = self.is_chronological
            then.calls, then._deliveries, then._resumed_calls = calls, deliveries, resumed
            for node in nodes:
                assert node.parent is not None
                then._attach(node.copy_under(then.nodes[node.parent.id]))
            return then

        return tree

    def path_ids(self, node: Node) -> Ids:
        """The ids from the root to a node: what the model saw, and said."""
        return as_ids(np.concatenate([entry.ids for entry in node.path()] or [node.ids]))

    def leaves(self) -> list[Node]:
        """Nodes nothing follows, in the order they were added."""
        return [node for node in self.nodes if not node.children and node.parent is not None]


def _first_message_key(frame: bytes, key: bytes) -> bytes:
    """Other tools or template arguments make another first message, whatever it says."""
    return xxhash.xxh3_128_digest(frame + key) if frame else key


def _source_id(node: Node) -> int:
    return node.id if node.is_sampled else node.source_id


def _check_generation(generation: Generation, call: int, choice: int) -> tuple[Ids, Output]:
    ids = as_ids(generation.ids)
    count = len(ids)
    logprobs = generation.logprobs
    if logprobs is not None:
        logprobs = np.array(logprobs, np.float32)
        if len(logprobs) != count:
            raise TreeError(f"logprobs: got {len(logprobs)} for {count} sampled ids, expected one for each")
        logprobs.flags.writeable = False
    if isinstance(generation.versions, int | np.integer):
        versions: Runs = normalize_runs(((count, int(generation.versions)),))
    else:
        if len(generation.versions) != count:
            raise TreeError(
                f"versions: got {len(generation.versions)} for {count} sampled ids, expected one for each"
            )
        versions = encode_runs(np.asarray(generation.versions))
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
    return ids, Output(call, choice, generation.finish_reason, logprobs, versions, routed, generation.inexact)
