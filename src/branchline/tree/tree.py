"""The prefix tree of one session: every call's prompt and output is a path, and no node ever changes.

    turn = tree.prepare(request, codec)      # reads only
    delta = tree.plan(turn, generations)     # what a commit would add
    call = tree.apply(delta)                 # adds it

Context nodes are found by key and ids; sampled nodes are always new. So calls of one session can run
concurrently, and equal outputs become siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from branchline.chat.base import Codec, HistoryPolicy, MessageTokens, NewMessage
from branchline.core.call import AppliedEquivalence, Call, Delivery, Generation, Output, Request
from branchline.core.echo import Equivalence, match_echo
from branchline.core.errors import TreeError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import NO_IDS, Ids, Origin, Runs, as_ids, encode_runs, normalize_runs
from branchline.tree.argument_defaults import restore_sampled_arguments
from branchline.tree.delta import Delivered, NewNode, TreeDelta, TreeRecord
from branchline.tree.match import UNDELIVERED, PathMatcher, longest_raw_path, reorder_tool_results
from branchline.tree.node import NO_NODE, Node, root_node


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt for an engine, and what a commit needs to add its outputs."""

    request: Request
    parent: Node
    """The deepest node of the matched path that the prompt keeps as recorded."""
    messages: tuple[Message, ...]
    """The messages after `parent`, one per entry of `message_tokens`."""
    message_tokens: tuple[MessageTokens, ...]
    source_ids: tuple[int, ...]
    """For each message the sampled node that it repeats, or NO_NODE."""
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
        """Whether calls are in the order in which they happened; unknown for a tree built from a log."""
        self.nodes: list[Node] = [root_node()]
        self.calls: list[Call] = []
        self._deliveries: dict[int, Delivery] = {}
        self._resumed_calls: set[int] = set()
        self._sampled_by_key: dict[bytes, list[Node]] = {}
        self._sampled_tool_calls: dict[str, ToolCall] = {}
        self._restore_reasoning = restore_reasoning
        self._matcher = PathMatcher(self.root, self._delivery_of, restore_reasoning=restore_reasoning)

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def token_count(self) -> int:
        """The number of stored tokens; a token shared by several paths counts once."""
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
        """Builds the prompt for a request. Does not change the tree."""
        first_key = _first_message_key(request.prompt_config_digest, request.messages[0].key)
        match = self._matcher.find(request, first_key)
        filled: tuple[AppliedEquivalence, ...] = ()
        if len(match.path) < len(request.messages) and request.messages[len(match.path)].tool_calls:
            # The mismatch may only be defaults of the tool's schema that the client filled in.
            restored, filled = restore_sampled_arguments(
                request.messages, len(match.path), request.tools, self._sampled_tool_calls
            )
            match = self._matcher.find(replace(request, messages=restored), first_key) if filled else match
        path = match.path
        new, source_ids, applied = self._new_messages(request, match.messages, len(path))
        extension = codec.extend(
            path, new, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs, history=history
        )
        kept = extension.kept
        rewritten = path[kept:]
        parts = [node.ids for node in path[:kept]]
        parts += [tokens.ids for tokens in extension.message_tokens]
        parts.append(extension.generation_prompt_ids)
        prompt_ids = np.concatenate(parts)
        prompt_ids.flags.writeable = False
        return Turn(
            request=request,
            parent=path[kept - 1] if kept else self.root,
            messages=(*(node.message for node in rewritten), *(message.message for message in new)),
            message_tokens=extension.message_tokens,
            source_ids=(*(_source_id(node) for node in rewritten), *source_ids),
            generation_prompt_ids=extension.generation_prompt_ids,
            prompt_ids=prompt_ids,
            applied_equivalences=(
                *(AppliedEquivalence(-1, used) for used in request.equivalences),
                *match.applied_equivalences,
                *filled,
                *applied,
            ),
            ambiguous_match=match.ambiguous,
            encoded_tokens=extension.encoded_tokens,
            rewrite_reason=extension.rewrite_reason,
        )

    def prepare_ids(self, request: Request, prompt_ids: Ids, codec: Codec) -> Turn:
        """Builds a turn for a raw prompt, which continues the longest path whose ids it starts with."""
        path = longest_raw_path(self.root, prompt_ids)
        rest = as_ids(prompt_ids[path[-1].end if path else 0 :])
        tokens = MessageTokens(rest, normalize_runs(((len(rest), Origin.CONTEXT),)))
        return Turn(
            request=request,
            parent=path[-1] if path else self.root,
            messages=(Message("user", codec.decode(rest)),) if len(rest) else (),
            message_tokens=(tokens,) if len(rest) else (),
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
    ) -> tuple[list[NewMessage], list[int], list[AppliedEquivalence]]:
        """Returns the messages after the path, their source nodes, and the equivalences applied to them.

        A message that was sampled elsewhere in the tree is replaced by the sampled message and its ids.
        """
        new: list[NewMessage] = []
        source_ids: list[int] = []
        applied: list[AppliedEquivalence] = []
        pending = list(messages)
        for index in range(start, len(pending)):
            message = pending[index]
            source = self._find_sampled_elsewhere(message, request.agent)
            if source is None:
                new.append(NewMessage(message))
                source_ids.append(NO_NODE)
                continue
            used = match_echo(source.message, message) or ()
            applied += [AppliedEquivalence(index, equivalence) for equivalence in used]
            moved = reorder_tool_results(source.message, message, pending, index)
            if moved and Equivalence.REORDERED_CALLS not in used:
                applied.append(AppliedEquivalence(index, Equivalence.REORDERED_RESULTS))
            for position, result in (moved or {}).items():
                pending[position] = result
            new.append(NewMessage(source.message, source.sampled_ids))
            source_ids.append(source.id)
        return new, source_ids, applied

    def _find_sampled_elsewhere(self, message: Message, agent: str) -> Node | None:
        if message.role != "assistant":
            return None
        best: tuple[int, ...] | None = None
        found: Node | None = None
        for node in self._sampled_by_key.get(message.key, ()):
            used = match_echo(node.message, message)
            if used is None or (
                Equivalence.DROPPED_REASONING in used and (node.agent != agent or not self._restore_reasoning)
            ):
                continue
            echoed_ids = {call.id for call in node.message.tool_calls if call.id} & {
                call.id for call in message.tool_calls
            }
            rank = (
                -len(echoed_ids),
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
        """Returns what committing these generations adds. Does not change the tree; raises TreeError if a
        generation is invalid."""
        if not generations:
            raise TreeError("commit: got no generation, expected one for each choice")
        new: list[NewNode] = []
        parent_id = turn.parent.id
        parent: Node | None = turn.parent
        for message, tokens, source in zip(turn.messages, turn.message_tokens, turn.source_ids, strict=True):
            if parent is not None:
                parent = self.find_context_child(
                    parent, message, tokens.ids, turn.request.prompt_config_digest
                )
            if parent is not None:
                parent_id = parent.id
                continue
            node_id = len(self.nodes) + len(new)
            new.append(NewNode(node_id, parent_id, message, tokens.ids, tokens.spans, source))
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
        """Returns the latest call with this id, or None; clients may use an id twice."""
        return next((call for call in reversed(self.calls) if call.id == call_id), None)

    def find_sampled_tool_call(self, call_id: str) -> ToolCall | None:
        """Returns the sampled tool call with this wire id, or None."""
        return self._sampled_tool_calls.get(call_id)

    def is_resumed(self, call: Call) -> bool:
        """Whether another call resumed this call, so that its tokens are counted there."""
        return call.index in self._resumed_calls

    def _resumed_call_index(self, call_id: str) -> int:
        call = self.find_call(call_id) if call_id else None
        if call is None:
            return NO_NODE
        if call.index in self._resumed_calls:
            raise TreeError(f"commit: call {call_id} was resumed already, expected one resuming call")
        return call.index

    def apply(self, record: TreeRecord) -> Call:
        """Applies a record completely, or raises TreeError and changes nothing."""
        if isinstance(record, Delivered):
            self._deliveries[record.call_index] = record.delivery
            return self.calls[record.call_index]
        if record.call.index != len(self.calls) or (record.nodes and record.nodes[0].id != len(self.nodes)):
            raise TreeError(
                f"commit of call {record.call.index}: expected call {len(self.calls)} "
                f"with nodes from {len(self.nodes)}; another commit came between plan and apply"
            )
        # The call first: a concurrent prepare may already find its nodes.
        self.calls.append(record.call)
        if record.call.resumed_call_index != NO_NODE:
            self._resumed_calls.add(record.call.resumed_call_index)
        for new in record.nodes:
            self._add_node(new, record.call)
        return record.call

    def _add_node(self, new: NewNode, call: Call) -> None:
        parent = self.nodes[new.parent_id]
        key, config_digest = new.message.key, b""
        if parent.parent is None:
            config_digest = call.prompt_config_digest
            key = _first_message_key(config_digest, key)
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
            prompt_config_digest=config_digest,
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
            for call in node.message.tool_calls:
                if call.id:
                    self._sampled_tool_calls[call.id] = call

    def find_context_child(
        self, parent: Node, message: Message, ids: Ids, prompt_config_digest: bytes
    ) -> Node | None:
        """Returns the context child with this message and these ids, or None."""
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

    def copy(self, lock: AbstractContextManager[object] | None = None) -> Tree:
        """Returns an independent tree that shares the values of the nodes, which never change.

        `lock` must exclude commits; it is held while the lists are copied, not while the nodes are rebuilt.
        """
        with lock or nullcontext():
            nodes, calls, deliveries = self.nodes[1:], self.calls[:], self._deliveries.copy()
        copy = Tree(restore_reasoning=self._restore_reasoning)
        copy.is_chronological = self.is_chronological
        copy.calls, copy._deliveries = calls, deliveries
        copy._resumed_calls = {call.resumed_call_index for call in calls} - {NO_NODE}
        for node in nodes:
            assert node.parent is not None
            copy._attach(node.copy_under(copy.nodes[node.parent.id]))
        return copy

    def path_ids(self, node: Node) -> Ids:
        """Returns the ids from the root to a node."""
        return as_ids(np.concatenate([entry.ids for entry in node.path()] or [node.ids]))

    def leaves(self) -> list[Node]:
        """Returns the nodes without children, in the order in which they were added."""
        return [node for node in self.nodes if not node.children and node.parent is not None]


def _first_message_key(config_digest: bytes, key: bytes) -> bytes:
    """Returns a node key that differs for other tools or template arguments."""
    return xxhash.xxh3_128_digest(config_digest + key) if config_digest else key


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
            f"versions: got {max(v for _, v in versions)}, expected integers from 0 to 2147483647"
        )
    return ids, Output(call, choice, generation.finish_reason, logprobs, versions, generation.inexact)
