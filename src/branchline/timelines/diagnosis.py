"""Why did it not merge? For a fork: the where, both sides, what was rewritten, the cause, the cost.

first divergent token 42: "…<think>plan" became "…The"; cause think_strip; 310 tokens computed again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS, Ids
from branchline.timelines.causes import Cause, Fork
from branchline.timelines.edit_description import describe_edit
from branchline.tree.node import Node
from branchline.tree.tree import Tree

Decode = Callable[[Ids], str]
_EXCERPT_TOKENS = 12
"""Tokens shown of each side."""
EDIT_CAUSES = (Cause.EDIT, Cause.CONTEXT_DELETE, Cause.REPAIR_LOOP, Cause.UNKNOWN)
"""Causes that are something done to the history; of the others, what is asked is something else."""


@dataclass(frozen=True)
class Diagnosis:
    """A fork explained."""

    fork: Fork
    first_divergent_token: int | None
    """Its place on the path; None where there are no ids to compare."""
    before: str
    """The sibling's side, decoded."""
    after: str
    """The branch's side, decoded."""
    tokens_computed_again: int
    """Tokens of the branch's first prompt that its sibling's path already had, beyond the common ids."""
    edit_description: str = ""
    """What the client did to its history, message and field; empty where it did nothing of the kind."""

    @property
    def cause(self) -> Cause:
        return self.fork.cause

    def __str__(self) -> str:
        if self.first_divergent_token is None:
            place = f"message {self.fork.branch.depth}"
        else:
            place = f"first divergent token {self.first_divergent_token}"
        rewritten = f"{self.edit_description}; " if self.edit_description else ""
        return (
            f"{place}: {self.before!r} became {self.after!r}; {rewritten}cause {self.cause}; "
            f"{self.tokens_computed_again} token{'s' * (self.tokens_computed_again != 1)} computed again"
        )


def diagnose(tree: Tree, fork: Fork, decode: Decode | None = None) -> Diagnosis:
    """Explains one fork; without a decoder the sides are shown as the messages' texts or as ids."""
    ours = _branch_nodes(tree, fork)
    theirs = _sibling_nodes(fork.sibling)
    our_ids, their_ids = _ids_of_prompt(tree, fork, ours), _join(theirs)
    common = _common_prefix(our_ids, their_ids)
    if not len(our_ids) or not len(their_ids):
        place, before, after = None, _excerpt(fork.sibling.message), _excerpt(fork.branch.message)
    else:
        place = fork.parent.end + common
        before = _format_ids(their_ids[common : common + _EXCERPT_TOKENS], decode)
        after = _format_ids(our_ids[common : common + _EXCERPT_TOKENS], decode)
    again = 0 if fork.branch.is_sampled else _recomputed_tokens(ours, theirs, len(our_ids), common)
    rewritten = ""
    if fork.cause in EDIT_CAUSES and not fork.branch.is_sampled:
        old, new = ([node.message for node in nodes] for nodes in (theirs, ours))
        rewritten = describe_edit(old, new, fork.branch.depth)
    return Diagnosis(fork, place, before, after, again, rewritten)


def _branch_nodes(tree: Tree, fork: Fork) -> list[Node]:
    """From the branch to the end of its first prompt; a sampled branch is itself."""
    if fork.branch.is_sampled:
        return [fork.branch]
    return tree.nodes[fork.call.prompt_node].path()[fork.parent.depth :]


def _ids_of_prompt(tree: Tree, fork: Fork, nodes: Sequence[Node]) -> Ids:
    """What the branch's first prompt adds, the part that its output carries included."""
    if fork.branch.is_sampled or not fork.call.outputs:
        return _join(nodes)
    output = tree.nodes[fork.call.outputs[0]]
    return np.concatenate((_join(nodes), output.ids[: output.sampled_start - output.start]))


def _sibling_nodes(beside: Node) -> list[Node]:
    """Down the sibling's first children."""
    nodes = [beside]
    while nodes[-1].children:
        nodes.append(nodes[-1].all_children()[0])
    return nodes


def _join(nodes: Sequence[Node]) -> Ids:
    return np.concatenate([NO_IDS, *(node.ids for node in nodes)])


def _common_prefix(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _recomputed_tokens(ours: Sequence[Node], theirs: Sequence[Node], tokens: int, common: int) -> int:
    """Tokens behind the common ids that belong to messages both sides have."""
    known = {node.message.key for node in theirs}
    if not any(len(node.ids) for node in ours):
        # A grafted tree does not know the ids of single messages: share them out by length.
        lengths = [len(node.message.content) + 1 for node in ours]
        shown = sum(length for node, length in zip(ours, lengths, strict=True) if node.message.key in known)
        return max(0, round(tokens * shown / sum(lengths)) - common)
    place = again = 0
    for node in ours:
        if node.message.key in known:
            again += max(0, len(node.ids) - max(0, common - place))
        place += len(node.ids)
    return again


def _format_ids(ids: Ids, decode: Decode | None) -> str:
    return decode(ids) if decode is not None else " ".join(map(str, ids.tolist()))


def _excerpt(message: Message) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {message.content or calls}"[:80]
