"""A timeline: one root-to-leaf path of a tree, read as aligned arrays.

`ids`, `origins`, `mask`, `logprobs` and `versions` always have one length. A timeline is a view; its arrays
are computed from the nodes on first use.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from branchline.core.call import Call
from branchline.core.message import Media, Message
from branchline.core.sample import AnswerSpan, LogprobMeasurement
from branchline.core.token_arrays import NO_IDS, Floats, Ids, Origin, decode_runs, normalize_runs
from branchline.tree.tree import Node, Tree

Author = Literal["llm", "env"]
NO_VERSION = -1


class Timeline:
    """A path of a tree as messages and arrays."""

    def __init__(self, tree: Tree, leaf: Node) -> None:
        self.tree = tree
        self.leaf = leaf
        self.nodes = leaf.path()

    @property
    def agent(self) -> str:
        return self.leaf.agent or ""

    @property
    def messages(self) -> list[Message]:
        return [node.message for node in self.nodes]

    @property
    def authors(self) -> list[Author]:
        """`llm` for each message sampled on this path, `env` for context, including repeated replies."""
        return ["llm" if node.is_sampled else "env" for node in self.nodes]

    @property
    def media(self) -> list[Media]:
        return [media for node in self.nodes for media in node.message.media]

    @cached_property
    def sampled_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.is_sampled]

    @cached_property
    def calls(self) -> list[Call]:
        return [self.tree.call_of(node) for node in self.sampled_nodes]

    @property
    def answers(self) -> list[AnswerSpan]:
        """The tokens of each sampled message, and how their logprobs were measured."""
        return [
            AnswerSpan(
                node.sampled_start,
                node.end,
                call.id,
                node.id,
                LogprobMeasurement.from_sampling(call.sampling),
            )
            for node, call in zip(self.sampled_nodes, self.calls, strict=True)
        ]

    @property
    def exact(self) -> bool:
        """Whether every sampled token has exactly the context it was sampled in."""
        return not self.inexact_tokens

    @property
    def inexact_tokens(self) -> int:
        """The number of sampled tokens whose context differs from the context they were sampled in."""
        return sum(
            len(node.sampled_ids)
            for node in self.nodes
            if node.output is not None and node.output.inexact and node.sampled_ids is not None
        )

    def __len__(self) -> int:
        return self.leaf.end

    @cached_property
    def ids(self) -> Ids:
        return np.concatenate([NO_IDS, *(node.ids for node in self.nodes)])

    @cached_property
    def origins(self) -> NDArray[np.int8]:
        runs = normalize_runs(run for node in self.nodes for run in node.spans)
        return decode_runs(runs, np.int8).astype(np.int8, copy=False)

    @cached_property
    def mask(self) -> NDArray[np.int8]:
        """1 for sampled tokens, else 0."""
        mask: NDArray[np.int8] = (self.origins == Origin.SAMPLED).astype(np.int8)
        return mask

    @cached_property
    def logprobs(self) -> Floats:
        """Logprobs of sampled tokens, NaN if missing; 0 for all other tokens."""
        logprobs = np.zeros(len(self), np.float32)
        for node in self.nodes:
            if node.output is not None:
                sampled = node.output.logprobs
                logprobs[node.sampled_start : node.end] = np.nan if sampled is None else sampled
        return logprobs

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        """The policy version that sampled each token; -1 for all other tokens."""
        versions = np.full(len(self), NO_VERSION, np.int32)
        for node in self.sampled_nodes:
            start = node.sampled_start
            for count, version in node.output.versions if node.output else ():
                versions[start : start + count] = version
                start += count
        return versions

    @cached_property
    def token_node_ids(self) -> NDArray[np.int32]:
        """The node id of each token."""
        return np.repeat(
            np.array([node.id for node in self.nodes], np.int32), [len(node.ids) for node in self.nodes]
        )

    def __repr__(self) -> str:
        outputs = " · ".join(repr(node.message.content[:16]) for node in self.sampled_nodes)
        return f"<Timeline {len(self.nodes)} messages, {len(self)} tokens: {outputs}>"


def timelines_of(tree: Tree) -> list[Timeline]:
    """Returns every timeline of a tree, in the order in which their leaves were added."""
    return [Timeline(tree, leaf) for leaf in tree.leaves()]
