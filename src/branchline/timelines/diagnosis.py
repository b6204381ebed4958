"""Explains a fork: its position, both sides, what the client changed, the cause and the cost.

    first divergent token 42: "…<think>plan" became "…The"; cause think_strip; 310 tokens computed again

Tokens show where two sides diverge. For an edited history the diagnosis also names the message and the field:

    message 11 (assistant), arguments of Bash: command: 'cd /srv && ' removed at character 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import NO_IDS, Ids
from branchline.timelines.causes import Cause, Fork
from branchline.tree.tree import Node, Tree

Decode = Callable[[Ids], str]
_EXCERPT_TOKENS = 12
"""Tokens shown of each side."""
_MAX_EXCERPT_CHARS = 60
"""Characters shown of a changed text."""
EDIT_CAUSES = (Cause.EDIT, Cause.CONTEXT_DELETE, Cause.REPAIR_LOOP, Cause.UNKNOWN)
"""Causes for which the client may have edited its history."""


@dataclass(frozen=True)
class Diagnosis:
    """The explanation of one fork."""

    fork: Fork
    first_divergent_token: int | None
    """Its position on the path; None if there are no ids to compare."""
    before: str
    """The sibling's side, decoded."""
    after: str
    """The branch's side, decoded."""
    tokens_computed_again: int
    """Tokens of the branch's first prompt that repeat messages of the sibling's path after the divergence."""
    edit_description: str = ""
    """What the client changed in its history; empty if the cause is no edit."""

    @property
    def cause(self) -> Cause:
        return self.fork.cause

    def __str__(self) -> str:
        if self.first_divergent_token is None:
            position = f"message {self.fork.branch.depth}"
        else:
            position = f"first divergent token {self.first_divergent_token}"
        edit = f"{self.edit_description}; " if self.edit_description else ""
        return (
            f"{position}: {self.before!r} became {self.after!r}; {edit}cause {self.cause}; "
            f"{self.tokens_computed_again} token{'s' * (self.tokens_computed_again != 1)} computed again"
        )


def diagnose(tree: Tree, fork: Fork, decode: Decode | None = None) -> Diagnosis:
    """Explains one fork; without a decoder the sides are shown as ids, or as text if there are no ids."""
    ours = _branch_nodes(tree, fork)
    theirs = _sibling_nodes(fork.sibling)
    our_ids, their_ids = _prompt_ids(tree, fork, ours), _join(theirs)
    common = _common_prefix(our_ids, their_ids)
    if not len(our_ids) or not len(their_ids):
        position, before, after = None, _side_text(fork.sibling.message), _side_text(fork.branch.message)
    else:
        position = fork.parent.end + common
        before = _format_ids(their_ids[common : common + _EXCERPT_TOKENS], decode)
        after = _format_ids(our_ids[common : common + _EXCERPT_TOKENS], decode)
    again = 0 if fork.branch.is_sampled else _recomputed_tokens(ours, theirs, len(our_ids), common)
    edit = ""
    if fork.cause in EDIT_CAUSES and not fork.branch.is_sampled:
        old, new = ([node.message for node in nodes] for nodes in (theirs, ours))
        edit = describe_edit(old, new, fork.branch.depth)
    return Diagnosis(fork, position, before, after, again, edit)


def _branch_nodes(tree: Tree, fork: Fork) -> list[Node]:
    """Returns the nodes from the branch to the end of its first prompt, or a sampled branch alone."""
    if fork.branch.is_sampled:
        return [fork.branch]
    return tree.nodes[fork.call.prompt_node].path()[fork.parent.depth :]


def _prompt_ids(tree: Tree, fork: Fork, nodes: Sequence[Node]) -> Ids:
    """Returns the ids that the branch's first prompt adds, including those stored on its output node."""
    if fork.branch.is_sampled or not fork.call.outputs:
        return _join(nodes)
    output = tree.nodes[fork.call.outputs[0]]
    return np.concatenate((_join(nodes), output.ids[: output.sampled_start - output.start]))


def _sibling_nodes(sibling: Node) -> list[Node]:
    """Returns the sibling and its first descendants."""
    nodes = [sibling]
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
    """Counts tokens after the common ids that belong to messages of both sides."""
    known = {node.message.key for node in theirs}
    if not any(len(node.ids) for node in ours):
        # In a tree built from a log, messages have no ids of their own: divide the ids by text length.
        lengths = [len(node.message.content) + 1 for node in ours]
        repeated = sum(
            length for node, length in zip(ours, lengths, strict=True) if node.message.key in known
        )
        return max(0, round(tokens * repeated / sum(lengths)) - common)
    position = again = 0
    for node in ours:
        if node.message.key in known:
            again += max(0, len(node.ids) - max(0, common - position))
        position += len(node.ids)
    return again


def _format_ids(ids: Ids, decode: Decode | None) -> str:
    return decode(ids) if decode is not None else " ".join(map(str, ids.tolist()))


def _side_text(message: Message) -> str:
    return f"{message.role}: {message.content or _calls_text(message)}"[:80]


# -- what the client changed ---------------------------------------------------------------------------


def describe_edit(old: Sequence[Message], new: Sequence[Message], depth: int) -> str:
    """Describes how `new` differs from `old`, two message sequences at the same depth; empty if the first
    messages are equal."""
    if not old or not new or old[0].key == new[0].key:
        return ""
    removed = next((index for index, message in enumerate(old) if message.key == new[0].key), 0)
    if removed:
        return f"{_count_messages(removed)} removed at {depth}: {_excerpts(old[:removed])}"
    inserted = next((index for index, message in enumerate(new) if message.key == old[0].key), 0)
    if inserted:
        return f"{_count_messages(inserted)} inserted at {depth}: {_excerpts(new[:inserted])}"
    if old[0].role != new[0].role:
        return f"message {depth}: {_excerpt(old[0])} became {_excerpt(new[0])}"
    return f"message {depth} ({new[0].role}), " + "; ".join(_field_changes(old[0], new[0]))


def _field_changes(old: Message, new: Message) -> Iterator[str]:
    if old.content != new.content:
        yield f"text: {_text_change(old.content, new.content)}"
    names = [[call.name for call in message.tool_calls] for message in (old, new)]
    if names[0] != names[1]:
        yield f"calls: {', '.join(names[0]) or 'none'} became {', '.join(names[1]) or 'none'}"
    else:
        for one, other in zip(old.tool_calls, new.tool_calls, strict=True):
            if one.canonical_arguments != other.canonical_arguments:
                yield f"arguments of {one.name}: " + "; ".join(_argument_changes(one, other))
    if old.media != new.media:
        yield f"media: {len(old.media)} became {len(new.media)}, or others"
    for name, before, after in (
        ("reasoning", old.reasoning_content, new.reasoning_content),
        ("refusal", old.refusal, new.refusal),
        ("name", old.name, new.name),
    ):
        if before != after:
            yield f"{name}: {_text_change(before, after)}"


def _argument_changes(old: ToolCall, new: ToolCall) -> Iterator[str]:
    one, other = _arguments_object(old), _arguments_object(new)
    if one is None or other is None:
        yield _text_change(old.arguments, new.arguments)
        return
    for name in {**one, **other}:
        if name not in other:
            yield f"{name} removed (it was {_json(one[name])})"
        elif name not in one:
            yield f"{name} added ({_json(other[name])})"
        elif one[name] != other[name]:
            before, after = one[name], other[name]
            if not isinstance(before, str) or not isinstance(after, str):
                before, after = _json(before), _json(after)
            yield f"{name}: {_text_change(before, after)}"


def _arguments_object(call: ToolCall) -> dict[str, Any] | None:
    value = msgspec.json.decode(call.canonical_arguments) if call.is_json else None
    return value if isinstance(value, dict) else None


def _json(value: Any) -> str:
    return _truncate(msgspec.json.encode(value).decode())


def _text_change(old: str, new: str) -> str:
    """Describes where and how two texts differ.

    >>> _text_change("cd /srv && cat it", "cat it")
    "'cd /srv && ' removed at character 0"
    """
    start = _common_prefix_length(old, new)
    end = _common_prefix_length(old[start:][::-1], new[start:][::-1])
    gone, added = (text[start : len(text) - end] for text in (old, new))
    if gone and added:
        return f"{_truncate(gone)!r} became {_truncate(added)!r} at character {start}"
    longer, shorter, verb = (old, new, "removed") if gone else (new, old, "inserted")
    if longer.endswith(shorter):
        # The change is at the start, even if the rest begins with the same characters.
        start = 0
    size = len(longer) - len(shorter)
    return f"{_truncate(longer[start : start + size])!r} {verb} at character {start}"


def _common_prefix_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _count_messages(count: int) -> str:
    return f"{count} message{'s' * (count != 1)}"


def _excerpts(messages: Sequence[Message]) -> str:
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return _excerpt(messages[0]) + more


def _excerpt(message: Message) -> str:
    return f"{message.role} {_truncate(message.content or _calls_text(message))!r}"


def _calls_text(message: Message) -> str:
    return " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "…"
