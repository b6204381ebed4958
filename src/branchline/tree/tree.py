"""The prefix tree of one session: every call's prompt and output is a path, and no node ever changes.

    delta = tree.plan(turn, generations)     # what a commit would add
    call = tree.apply(delta)                 # adds it

A node is one message and the ids it added after its parent's. Concatenating `node.ids` from the root to a
node gives exactly the ids the model saw up to that node (and, for a sampled node, the ids it sampled).

Context nodes are found by key and ids; sampled nodes are always new. So calls of one session can run
concurrently, and equal outputs become siblings. A commit is a value: it is applied, written to the journal
and applied again on replay, so a replayed tree equals the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash

from branchline.chat.base import Codec, MessageTokens
from branchline.chat.vision import ImageSpan
from branchline.core.call import AppliedEquivalence, Call, Delivery, Generation, Output, Request
from branchline.core.errors import TreeError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import NO_IDS, Ids, Origin, Runs, as_ids, encode_runs, normalize_runs

ROOT_ID = 0
NO_NODE = -1


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One message of a tree. A node in a tree never changes; only children are added."""

    id: int
    parent: Node | None
    key: bytes
    """Key among its siblings: the message's key; for a first message, combined with the config digest."""
    message: Message
    ids: Ids
    spans: Runs
    start: int = 0
    """The number of tokens before this node on its path."""
    end: int = 0
    depth: int = 0
    output: Output | None = None
    sampled_ids: Ids | None = None
    """The output as sampled: a view of `ids`, or the source's ids if this node repeats an output."""
    ends_sampled: bool = False
    """Whether `ids` end with `sampled_ids`; False if a template rendered the message differently."""
    source_id: int = NO_NODE
    """The node that this node repeats as context, or NO_NODE."""
    prompt_config_digest: bytes = b""
    agent: str | None = None
    """The agent that sampled it; None for context."""
    children: dict[bytes, list[Node]] | None = None
    """By key. A node knows its children as long as its tree exists."""

    @property
    def is_sampled(self) -> bool:
        return self.output is not None

    @property
    def sampled_start(self) -> int:
        """The position on the path where the sampled ids begin; they reach to `end`."""
        return self.end - (len(self.sampled_ids) if self.output and self.sampled_ids is not None else 0)

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def all_children(self) -> list[Node]:
        """Children in the order they were added."""
        if not self.children:
            return []
        if len(self.children) == 1:
            return next(iter(self.children.values()))
        return sorted((child for group in self.children.values() for child in group), key=lambda n: n.id)

    def copy_under(self, parent: Node) -> Node:
        """Returns a copy of the node under another parent, without children. Its values are shared."""
        return replace(self, parent=parent, children=None)

    def __repr__(self) -> str:
        kind = "sampled" if self.is_sampled else self.message.role
        return f"<Node {self.id} {kind} {self.message.content[:20]!r} {len(self.ids)} ids>"


# -- records -----------------------------------------------------------------------------------------


class NewNode(msgspec.Struct, frozen=True, array_like=True):
    """A node to add; parents precede their children."""

    id: int
    parent_id: int
    message: Message
    ids: Ids
    spans: Runs
    source_id: int = NO_NODE
    output: Output | None = None


class TreeDelta(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """One commit: the missing context nodes, the sampled nodes and the call."""

    nodes: tuple[NewNode, ...]
    call: Call


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag="delivery"):
    """The delivery of a call's outputs."""

    call_index: int
    delivery: Delivery


TreeRecord = TreeDelta | Delivered


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, list(value.shape), value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a journal record")


def decode_array(_: type, value: Any) -> Any:
    """The `dec_hook` with which a decoder reads arrays of records."""
    dtype, shape, data = value
    array = np.frombuffer(data, dtype).reshape(shape)
    array.flags.writeable = False
    return array


encode_record = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
"""Encodes a record of this module, or another struct kept in the same journal."""
_decoder: msgspec.msgpack.Decoder[TreeRecord] = msgspec.msgpack.Decoder(TreeRecord, dec_hook=decode_array)
decode_record = _decoder.decode


# -- tree --------------------------------------------------------------------------------------------


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
    path_ids: Ids | None = None
    """The ids before the output on its path if they differ from `prompt_ids`, because the call continues a
    path with other tools; None if they are equal."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the prompt, in order."""


class Tree:
    """An append-only tree of messages and their ids."""

    def __init__(self) -> None:
        self.is_chronological = True
        """Whether calls are in the order in which they happened; unknown for a tree built from a log."""
        self.root = Node(ROOT_ID, None, b"", Message("system"), NO_IDS, ())
        self.nodes: list[Node] = [self.root]
        self.calls: list[Call] = []
        self.deliveries: dict[int, Delivery] = {}
        """The known deliveries by call index."""
        self.sampled_by_key: dict[bytes, list[Node]] = {}
        """Sampled nodes by the key of their message."""
        self.sampled_tool_calls: dict[str, ToolCall] = {}
        """Sampled tool calls by their wire ids."""
        self._resumed_calls: set[int] = set()

    def __del__(self) -> None:
        # Parents and children refer to each other. Without this, the nodes of a tree that is no longer used
        # would stay in memory until the next garbage collection. A node that is still used keeps its path.
        for node in self.nodes:
            node.children = None

    @property
    def token_count(self) -> int:
        """The number of stored tokens; a token shared by several paths counts once."""
        return sum(len(node.ids) for node in self.nodes)

    def call_of(self, node: Node) -> Call:
        """The call that sampled a node."""
        if node.output is None:
            raise TreeError(f"node {node.id} was not sampled, so no call made it")
        return self.calls[node.output.call_index]

    def answer_at(self, node: Node) -> Node | None:
        """The answer that a node is, or repeats as context (it was sampled on another branch if a template
        has dropped its reasoning, for example). None for other context."""
        if node.is_sampled:
            return node
        return self.nodes[node.source_id] if node.source_id != NO_NODE else None

    def delivery(self, call: Call) -> Delivery:
        return self.deliveries.get(call.index, Delivery.PENDING)

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
            if turn.path_ids is not None:
                output = msgspec.structs.replace(output, inexact=True)
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
            resumed_call_index=self._resumed_call_index(turn.request.resume_call_id)
            if turn.request.resume_call_id
            else NO_NODE,
            has_instructions=turn.request.has_instructions,
        )
        return TreeDelta(tuple(new), call)

    def find_call(self, call_id: str) -> Call | None:
        """Returns the latest call with this id, or None; clients may use an id twice."""
        return next((call for call in reversed(self.calls) if call.id == call_id), None)

    def find_sampled_tool_call(self, call_id: str) -> ToolCall | None:
        """Returns the sampled tool call with this wire id, or None."""
        return self.sampled_tool_calls.get(call_id)

    def is_resumed(self, call: Call) -> bool:
        """Whether another call resumed this call, so that its tokens are counted there."""
        return call.index in self._resumed_calls

    def _resumed_call_index(self, call_id: str) -> int:
        call = self.find_call(call_id)
        if call is None:
            return NO_NODE
        if call.index in self._resumed_calls:
            raise TreeError(f"commit: call {call_id} was resumed already, expected one resuming call")
        return call.index

    def apply(self, record: TreeRecord) -> Call:
        """Applies a record completely, or raises TreeError and changes nothing."""
        if isinstance(record, Delivered):
            self.deliveries[record.call_index] = record.delivery
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
            parent = self.nodes[new.parent_id]
            key, config_digest = new.message.key, b""
            if parent.parent is None:
                config_digest = record.call.prompt_config_digest
                key = first_message_key(config_digest, key)
            sampled_ids, ends_sampled = None, False
            if new.output is not None:
                count = new.spans[-1][0] if new.spans and new.spans[-1][1] == Origin.SAMPLED else 0
                sampled_ids, ends_sampled = new.ids[len(new.ids) - count :], True
            elif new.source_id != NO_NODE:
                sampled_ids = self.nodes[new.source_id].sampled_ids
                ends_sampled = sampled_ids is not None and np.array_equal(
                    new.ids[len(new.ids) - len(sampled_ids) :], sampled_ids
                )
            self._attach(
                Node(
                    new.id,
                    parent,
                    key,
                    new.message,
                    new.ids,
                    new.spans,
                    start=parent.end,
                    end=parent.end + len(new.ids),
                    depth=parent.depth + 1,
                    output=new.output,
                    sampled_ids=sampled_ids,
                    ends_sampled=ends_sampled,
                    source_id=new.source_id,
                    prompt_config_digest=config_digest,
                    agent=record.call.agent if new.output is not None else None,
                )
            )
        return record.call

    def _attach(self, node: Node) -> None:
        self.nodes.append(node)
        if node.parent is not None:
            if node.parent.children is None:
                node.parent.children = {}
            node.parent.children.setdefault(node.key, []).append(node)
        if node.output is not None:
            self.sampled_by_key.setdefault(node.message.key, []).append(node)
            for call in node.message.tool_calls:
                if call.id:
                    self.sampled_tool_calls[call.id] = call

    def find_context_child(
        self, parent: Node, message: Message, ids: Ids, prompt_config_digest: bytes
    ) -> Node | None:
        """Returns the context child with this message and these ids, or None."""
        key = first_message_key(prompt_config_digest, message.key) if parent.parent is None else message.key
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
            nodes, calls, deliveries = self.nodes[1:], self.calls[:], self.deliveries.copy()
        copy = Tree()
        copy.is_chronological = self.is_chronological
        copy.calls, copy.deliveries = calls, deliveries
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


def first_message_key(config_digest: bytes, key: bytes) -> bytes:
    """Returns a node key that differs for other tools or template arguments."""
    return xxhash.xxh3_128_digest(config_digest + key) if config_digest else key


def check_record(record: TreeRecord) -> None:
    """Raises TreeError for a record, read from a file, whose outputs lack a version or a logprob of a sampled
    id; `plan` makes no such record."""
    for node in record.nodes if isinstance(record, TreeDelta) else ():
        if node.output is None:
            continue
        count = sum([length for length, origin in node.spans if origin == Origin.SAMPLED])
        versions = sum([length for length, _ in node.output.versions])
        if versions != count:
            raise TreeError(f"node {node.id}: got {versions} versions for {count} sampled ids")
        logprobs = node.output.logprobs
        if logprobs is not None and len(logprobs) != count:
            raise TreeError(f"node {node.id}: got {len(logprobs)} logprobs for {count} sampled ids")


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
    is_encoded = generation.inexact
    return ids, Output(call, choice, generation.finish_reason, logprobs, versions, is_encoded, is_encoded)
