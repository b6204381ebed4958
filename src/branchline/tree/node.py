"""A node: one message and the ids it added after its parent's.

Concatenating `node.ids` from the root to a node gives exactly the ids the model saw up to that node (and,
for a sampled node, the ids it sampled). A node in a tree never changes; only children are added.
"""

from __future__ import annotations

import numpy as np

from branchline.core.call import Output
from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS, Ids, Runs

ROOT_ID = 0
NO_NODE = -1


class Node:
    """One message of a tree. A plain class with slots, because a tree holds many nodes."""

    __slots__ = (
        "agent",
        "children",
        "depth",
        "ends_sampled",
        "id",
        "ids",
        "key",
        "message",
        "output",
        "parent",
        "prompt_config_digest",
        "sampled_ids",
        "source_id",
        "spans",
        "start",
    )

    def __init__(
        self,
        id: int,
        parent: Node | None,
        key: bytes,
        message: Message,
        ids: Ids,
        spans: Runs,
        *,
        output: Output | None = None,
        sampled_ids: Ids | None = None,
        source_id: int = NO_NODE,
        prompt_config_digest: bytes = b"",
        agent: str | None = None,
    ) -> None:
        self.id = id
        self.parent = parent
        self.key = key
        """Key among its siblings: the message's key; for a first message, combined with the config digest."""
        self.message = message
        self.ids = ids
        self.spans = spans
        self.output = output
        self.sampled_ids = sampled_ids
        """The output as sampled: a view of `ids`, or the source's ids if this node repeats an output."""
        self.ends_sampled: bool = output is not None or _ends_with(ids, sampled_ids)
        """Whether `ids` end with `sampled_ids`; False if a template rendered the message differently."""
        self.source_id = source_id
        """The node that this node repeats as context, or NO_NODE."""
        self.prompt_config_digest = prompt_config_digest
        self.agent = agent
        """The agent that sampled it; None for context."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.start: int = parent.end if parent is not None else 0
        """The number of tokens before this node on its path."""
        self.children: dict[bytes, list[Node]] | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

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

    def copy_under(self, parent: Node | None) -> Node:
        """Returns a copy of the node under another parent, without children. Its values are shared."""
        copy = Node.__new__(Node)
        for name in Node.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.parent = parent
        copy.children = None
        return copy

    def __repr__(self) -> str:
        kind = "sampled" if self.is_sampled else self.message.role
        return f"<Node {self.id} {kind} {self.message.content[:20]!r} {len(self.ids)} ids>"


def _ends_with(ids: Ids, sampled_ids: Ids | None) -> bool:
    if sampled_ids is None:
        return False
    return bool(np.array_equal(ids[len(ids) - len(sampled_ids) :], sampled_ids))


def root_node() -> Node:
    return Node(ROOT_ID, None, b"", Message("system"), NO_IDS, ())
